"""`baton simulate` as people run it, the batches beneath it, the table, and a slice of the mutation check."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.simulator import mutations
from bench.simulator.batch import Batch, run
from bench.simulator.cli import app
from bench.simulator.mutation import Mutation
from bench.simulator.mutations import MUTATIONS
from bench.simulator.simulation import Report
from bench.simulator.table import Totals, render
from cluster.cli import app as baton
from cluster.errors import ConfigError
from decode_worker.core import DecodeCore

runner = CliRunner()

# mutation |-> a seed from which on few are needed; `python -m bench.simulator.mutations` runs all from 0
QUICK = {
    "skip the attempt check": 18,
    "skip the epoch check": 53,
    "keep a quota's place when the request is over": 0,
    "free before ack": 0,
    "resample token 0": 0,
    "lose the bitmap check": 0,
    "forget to renew leases": 31,
    "reuse quarantined blocks": 4,
    "free while a piece is sent": 0,
    "free during a step": 0,
    "keep what follows a wrong guess": 0,
    "guess beyond the room": 0,
    "share blocks before they are computed": 0,
    "share blocks across salts": 0,
    "forget which attempts were taken": 78,
    "give every attempt the same number": 0,
    "take token 0 twice": 4,
    "try without end": 0,
    "leave requests with dead workers": 0,
    "let leases live for ever": 21,
    "grant more places than there are": 88,
    "admit before a limit was leased": 7,
    "resume from the prompt alone": 0,
    "let go without telling the workers": 6,
}


def test_a_clean_batch_ends_with_0_and_a_table() -> None:
    result = runner.invoke(app, ["--faults", "--seeds", "3", "--requests", "40", "--jobs", "1"])
    assert result.exit_code == 0, result.output
    assert "Every rule held." in result.output
    assert "3 runs, 120 requests" in result.output
    assert "all requests" in result.output


def test_it_is_a_verb_of_baton() -> None:
    result = runner.invoke(baton, ["simulate", "--seeds", "1", "--requests", "10", "--jobs", "1"])
    assert result.exit_code == 0, result.output


def test_a_violation_prints_its_seed_and_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeCore, "quiet", lambda self: False)
    result = runner.invoke(app, ["--seeds", "2", "--first-seed", "7", "--requests", "5", "--jobs", "1"])
    assert result.exit_code == 1
    assert "seed 7: quiet" in result.output
    assert "again: baton simulate --seed 8 --requests 5" in result.output


def test_one_seed_gives_the_same_hash_with_and_without_its_log() -> None:
    options = ["--faults", "--seed", "11", "--requests", "15"]
    plain = runner.invoke(app, options)
    logged = runner.invoke(app, [*options, "--trace-log"])
    assert plain.exit_code == logged.exit_code == 0
    (line,) = [line for line in plain.output.splitlines() if line.startswith("Hash of the run")]
    assert line in logged.output
    assert "Reserve(request=" in logged.output
    assert "Reserve(request=" not in plain.output


def test_the_result_is_written_as_json_and_as_text(tmp_path: Path) -> None:
    out = tmp_path / "runs.json"
    options = ["--faults", "--seeds", "3", "--requests", "40", "--jobs", "1", "--out", str(out)]
    result = runner.invoke(app, options)
    assert result.exit_code == 0, result.output
    content = json.loads(out.read_text())
    assert content["command"] == "baton simulate --faults --seeds 3 --requests 40"
    assert (content["runs"], content["requests"], content["violations"]) == (3, 120, 0)
    assert sum(content["outcomes"].values()) == 120
    assert sum(kind["times"] for kind in content["faults"].values()) == content["faults_injected"] > 0
    assert content["wall_s"] > 0
    assert content["machine"]["num_cores"] >= 1
    text = out.with_suffix(".txt").read_text()
    assert text.startswith(f"$ {content['command']}\n")
    for kind, count in content["faults"].items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"{kind}  ")]
        assert line.removeprefix(kind).split()[0] == f"{count['times']:,}"


def test_the_mutation_check_writes_what_it_found(tmp_path: Path) -> None:
    out = tmp_path / "mutations.json"
    given = ["--only", "resample token 0", "--seeds", "5", "--out", str(out)]
    assert mutations.main(given) == 0
    (row,) = json.loads(out.read_text())["mutations"]
    assert row["rule"] == "resample token 0"
    assert row["found"]["violation"]
    assert "1 of 1 found." in out.with_suffix(".txt").read_text()


def test_a_rule_that_is_not_missed_ends_the_mutation_check_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutations, "find_all", lambda wanted, *_: [(wanted[0], None)])
    out = tmp_path / "mutations.json"
    assert mutations.main(["--only", "free before ack", "--out", str(out)]) == 1
    assert "NOT FOUND" in out.with_suffix(".txt").read_text()


def test_a_log_needs_a_seed() -> None:
    assert runner.invoke(app, ["--trace-log"]).exit_code == 2


@pytest.mark.parametrize(
    "options",
    [
        ["--seed", "3", "--seeds", "10"],
        ["--seed", "3", "--first-seed", "10"],
        ["--seed", "3", "--every-moment"],
        ["--seeds", "3", "--every-moment"],
        ["--seeds", "0"],
        ["--seed", "-1"],
    ],
)
def test_options_that_would_be_ignored_are_refused(options: list[str]) -> None:
    assert runner.invoke(app, [*options, "--requests", "5"]).exit_code == 2


def test_a_run_with_its_log_is_written_too(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    options = ["--seed", "3", "--requests", "5", "--trace-log", "--out", str(out)]
    assert runner.invoke(app, options).exit_code == 0
    assert json.loads(out.read_text())["first_seed"] == 3


def test_the_text_never_takes_the_place_of_the_result(tmp_path: Path) -> None:
    result = runner.invoke(app, ["--seeds", "1", "--requests", "5", "--out", str(tmp_path / "runs.txt")])
    assert result.exit_code == 1
    assert isinstance(result.exception, ConfigError)
    assert "choose another ending" in str(result.exception)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--only", "no such rule"], "no mutation has `no such rule` in its name"),
        (["--seeds", "0"], "must be at least 1, not 0"),
        (["--first-seed", "-1"], "must be at least 0, not -1"),
        (["--jobs", "0"], "must be at least 1, not 0"),
        (["--out", "/dev/null/found.json"], "Cannot write"),
    ],
)
def test_a_mutation_check_that_would_check_nothing_is_refused(
    given: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        mutations.main(given)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_two_processes_run_the_same_runs_as_one() -> None:
    batch = Batch(first_seed=30, num_seeds=4, num_requests=20, faults=True)
    alone = sorted(run(batch, 1), key=lambda report: report.seed)
    shared = sorted(run(batch, 2), key=lambda report: report.seed)
    assert shared == alone
    assert [report.seed for report in alone] == [30, 31, 32, 33]


def test_the_table_counts_requests_by_fault_and_outcome() -> None:
    totals = Totals()
    for seed in range(2):
        totals.add(
            Report(
                label=f"seed {seed}",
                seed=seed,
                digest=0,
                violation="I5" if seed else None,
                num_events=10,
                virtual_s=1.0,
                outcomes={"exact": 1000, "client left": 1},
                faults={"crash decode": 2},
                touched={"crash decode": {"exact": 5}},
                counters={"steps": 7},
            )
        )
    table = render(totals).splitlines()
    assert table[0].split() == ["fault", "times", "requests", "hit", "exact", "client", "left"]
    assert table[2].split() == ["crash", "decode", "4", "10", "10", "0"]
    assert table[4].split() == ["all", "requests", "4", "2,002", "2,000", "2"]
    assert table[-1] == "On the way: 14 steps."
    assert [report.seed for report in totals.failures] == [1]


@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if m.name in QUICK], ids=lambda m: m.name)
def test_a_broken_rule_is_found(mutation: Mutation) -> None:
    first = QUICK[mutation.name]
    originals = [vars(patch.owner)[patch.name] for patch in mutation.patches]
    found = mutations.find(mutation, range(first, first + 60))
    assert found is not None, mutation.name
    assert [vars(patch.owner)[patch.name] for patch in mutation.patches] == originals


def test_every_quick_mutation_exists() -> None:
    assert {mutation.name for mutation in MUTATIONS} >= QUICK.keys()
