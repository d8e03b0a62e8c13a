"""What is wrong with a command line is one sentence that names the flags, before anything is offered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.load import cli_entry
from bench.load.cli import SweepOptions, app
from bench.load.cli_checks import slo_notes
from bench.load.cli_load import LoadOptions
from bench.load.cli_search import SearchOptions
from bench.load.cli_session import api_key
from bench.load.cli_settings import command_line, plan_settings
from bench.load.mock.process import MockProcess, read_truths, running_mock
from bench.load.plans.settings import PromptForm, TraceReplay
from cluster.errors import BatonError, ConfigError

AZURE = str(Path(__file__).parent / "data" / "azure.csv")
ENOUGH = ("--requests", "1", "--rate", "1")


@pytest.fixture(scope="module")
def mock() -> Iterator[MockProcess]:
    with running_mock() as running:
        yield running


def sentence(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, terminal_width=200)
    assert isinstance(result.exception, BatonError), (result.output, result.exception)
    assert "\n" not in str(result.exception)
    return str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--rate", "1"), "--requests N"),
        (("--requests", "1"), "--rate R"),
        ((*ENOUGH, "--closed-loop", "2"), "leave --rate out"),
        (("--closed-loop", "2", "--duration", "5s"), "give --requests N: leave --duration out"),
        (("--closed-loop", "2"), "give --requests N."),
        ((*ENOUGH, "--slo", "ttft=-5ms"), "ttft=-5ms"),
        ((*ENOUGH, "--slo", "tftt=5ms"), "did you mean `ttft`"),
        ((*ENOUGH, "--timeout", "soon"), "--timeout soon"),
        ((*ENOUGH, "--timeout", "0"), "--timeout 0"),
        ((*ENOUGH, "--ids", "9-3"), "--ids 9-3"),
        ((*ENOUGH, "--percentiles", "often"), "--percentiles often"),
        ((*ENOUGH, "--percentiles", "50,101"), "from 0 to 100"),
        ((*ENOUGH, "--percentiles", "nan"), "from 0 to 100"),
        ((*ENOUGH, "--extra-body", "[1]"), "--extra-body"),
        ((*ENOUGH, "--extra-body", "{"), "--extra-body"),
        ((*ENOUGH, "--burstiness", "2", "--arrival", "burst"), "--burstiness"),
        ((*ENOUGH, "--steady", "--warmup", "3"), "--steady"),
        ((*ENOUGH, "--temperature", "nan"), "--temperature nan"),
        ((*ENOUGH, "--temperature", "-1"), "--temperature -1"),
        ((*ENOUGH, "--cores", "0"), "--cores 0"),
        ((*ENOUGH, "--accelerators", "-1"), "--accelerators -1"),
        ((*ENOUGH, "--processes", "0"), "--processes 0"),
        ((*ENOUGH, "--max-model-len", "0"), "--max-model-len 0"),
        ((*ENOUGH, "--speed-up", "2"), "--speed-up would do nothing: give --trace too"),
        ((*ENOUGH, "--trace-offset", "2s"), "--trace-offset would do nothing: give --trace"),
        ((*ENOUGH, "--trace-format", "azure"), "--trace-format would do nothing"),
        ((*ENOUGH, "--scale-lengths", "2"), "--scale-lengths would do nothing"),
        ((*ENOUGH, "--prefix-tokens", "9", "--prefix-skew", "1"), "--prefix-tokens and --prefix-skew"),
        ((*ENOUGH, "--think", "2s"), "--think would do nothing: give --turns too"),
        ((*ENOUGH, "--turns", "2", "--random-think"), "--random-think would do nothing: give --think too"),
        ((*ENOUGH, "--system-tokens", "5"), "--system-tokens would do nothing: give --turns"),
        ((*ENOUGH, "--keep-text"), "--keep-text would do nothing: give --out"),
        ((*ENOUGH, "--strict"), "--strict would do nothing: give --slo too"),
        (("--trace", AZURE, "--trace-format", "foo"), "--trace-format foo: use azure, mooncake"),
        ((*ENOUGH, "--turns", "2", "--prefix-groups", "2"), "--prefix-groups and --turns"),
        (("--rate", "inf", "--requests", "1"), "--arrival burst"),
        (("--rate", "nan", "--requests", "1"), "A rate of nan"),
        ((*ENOUGH, "--sharegpt", "nowhere.json"), "--sharegpt nowhere.json: there is no such file"),
        (("--trace", "nowhere.csv"), "--trace nowhere.csv: there is no such file"),
        (("--trace", "."), "--trace .: that is a directory; give the file in it"),
        ((*ENOUGH, "--sharegpt", "."), "--sharegpt .: that is a directory"),
        (("--trace", "/dev/null"), "--trace /dev/null: that is no ordinary file"),
        (("--trace", AZURE, "--input-tokens", "5"), "--trace has its own lengths"),
        (("--trace", AZURE, "--prefix-groups", "5"), "--trace and --prefix-groups"),
        (("--trace", AZURE, "--turns", "5"), "--trace and --turns"),
        (("--trace", AZURE, "--rate", "5", "--speed-up", "2"), "leave --speed-up out"),
        (("--trace", AZURE, "--duration", "0"), "--duration 0: give a time above 0"),
        (("--trace", AZURE, "--speed-up", "1e-320"), "speed-up must be"),
        (("--trace", AZURE, "--scale-lengths", "1e-320"), "scale and speed-up must be"),
        (("--trace", "x" * 400), "it cannot be read (File name too long)"),
        ((*ENOUGH, "--sharegpt", "x" * 400), "File name too long"),
        ((*ENOUGH, "--prefix-groups", "9" * 23), "--prefix-groups is above 1,000,000"),
        ((*ENOUGH, "--cores", "9" * 400), "--cores is above 1,000,000"),
        ((*ENOUGH, "--accelerators", "9" * 400), "--accelerators is above"),
        (("--num-prompts", "5"), "--requests N"),
        (("--request-rate=5",), "--rate R"),
        (("--max-concurrency", "5"), "--closed-loop N"),
        (("--random-input-len", "5"), "--input-tokens N"),
        (("--random-output-len", "5"), "--output-tokens N"),
        (
            (*ENOUGH, "--slo", "ttft=1s", "--slo", "tpot=1s"),
            "--slo is given 2 times: give it once, with all bounds",
        ),
        ((*ENOUGH, "--rate", "2"), "--rate is given 2 times: give it once."),
        ((*ENOUGH, "--extra-body", '{"a": NaN}'), "NaN is no number"),
        ((*ENOUGH, "--extra-body", f'{{"seed": {10**30}}}'), "it cannot be sent"),
        ((*ENOUGH, "--extra-body", '{"stop": "\\ud800"}'), "it cannot be sent"),
        ((*ENOUGH, "--extra-body", '{"a":' + "[" * 100_000), "--extra-body: not JSON"),
        ((*ENOUGH, "--timeout", "9" * 400), "--timeout is above 1,000,000,000 s"),
        ((*ENOUGH, "--turns", "2", "--think", "9999999h"), "--think is above 1,000,000,000 s"),
        ((*ENOUGH, "--seed", "9" * 30), "--seed is above"),
        ((*ENOUGH, "--salt", "9" * 30), "--salt is above"),
        ((*ENOUGH, "--ids", "0-2000000000"), "no vocabulary is so large"),
        (("--rate", "1", "--duration", "2s", "--warmup", "2s"), "leave nothing to measure of 2 s"),
        (
            ("--rate", "1", "--duration", "2s", "--warmup", "1s", "--cooldown", "1s"),
            "give a longer --duration",
        ),
        ((*ENOUGH, "--api-key-env", "NO_SUCH_VARIABLE"), "the environment has no such variable"),
    ],
)
def test_options_that_cannot_work_need_no_server(arguments: tuple[str, ...], part: str) -> None:
    assert part in sentence("run", "--url", "http://127.0.0.1:1", *arguments)


@pytest.mark.parametrize(
    ("command", "part"),
    [
        (("sweep", "--requests", "2", "--rates", "1,-2"), "A rate of -2"),
        (("sweep", "--requests", "2", "--rates", "1,nan"), "A rate of nan"),
        (("sweep", "--requests", "2", "--rates", "1,2,1"), "give each number once"),
        (("sweep", "--requests", "2", "--rate", "1"), "leave --rate out"),
        (("sweep", "--trace", AZURE, "--speed-up", "2"), "leave --speed-up out"),
        (("sweep", "--requests", "2", "--closed-loop", "1"), "leave --closed-loop out"),
        (("max-goodput", "--slo", "ttft=1s", "--targets", "0.9,2"), "targets"),
        (("max-goodput", "--slo", "ttft=1s", "--targets", "nan"), "targets"),
        (("max-goodput", "--slo", "ttft=1s", "--seeds", "0"), "seeds"),
        (("max-goodput", "--slo", "ttft=1s", "--seeds", "9" * 20), "from 1 to 100"),
        (("max-goodput", "--slo", "ttft=1s", "--arrival", "burst"), "burst"),
        (("max-goodput", "--slo", "ttft=1s", "--rate", "2"), "leave --rate out"),
        (("max-goodput", "--slo", "ttft=1s", "--warmup", "60s"), "leave nothing to measure of 60 s"),
        (("max-goodput", "--slo", "ttft=1s", "--duration", "1s"), "--start-rate 1 offers less than one"),
        (("run", "--requests", "1", "--rate", "1", "--target", "0.8"), "give --strict too"),
        (
            ("run", "--requests", "1", "--rate", "1", "--slo", "e2e=1s", "--strict", "--target", "nan"),
            "a share above 0",
        ),
        (("max-goodput", "--slo", "ttft=1s", "--keep-text", "--out", "x.json"), "leave --keep-text out"),
    ],
)
def test_searches_and_sweeps_check_what_they_vary(command: tuple[str, ...], part: str) -> None:
    name, *arguments = command
    assert part in sentence(name, "--url", "http://127.0.0.1:1", *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--rate", "1", "--requests", "1", "--out", "{bad}/result.json"),
        ("run", "--rate", "1", "--requests", "1", "--report", "{bad}/page.html"),
        ("run", "--rate", "1", "--requests", "1", "--out", ""),
        ("sweep", "--requests", "1", "--out", "{bad}/result.json"),
        ("sweep", "--requests", "1", "--out", "{good}/sweep.json"),  # one of its files is a directory
        ("sweep", "--requests", "1", "--report", "{bad}/page.html"),
        ("max-goodput", "--slo", "ttft=1s", "--out", "{bad}/result.json"),
        ("max-goodput", "--slo", "ttft=1s", "--report", "{bad}/page.html"),
    ],
)
def test_outputs_are_tried_before_anything_is_offered(
    mock: MockProcess, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "sweep.rate-4.json").mkdir()
    texts = [text.format(bad=tmp_path / "file", good=tmp_path) for text in arguments]
    before = len(read_truths(mock.target))
    assert "Cannot write" in sentence(texts[0], "--url", mock.target.url, *texts[1:])
    assert len(read_truths(mock.target)) == before


def test_a_sweep_whose_trace_is_too_short_is_known_before_its_first_rate(mock: MockProcess) -> None:
    arguments = ("--trace", AZURE, "--arrival", "poisson", "--rates", "1,2", "--requests", "9999")
    before = len(read_truths(mock.target))
    assert "usable rows" in sentence("sweep", "--url", mock.target.url, *arguments)
    assert len(read_truths(mock.target)) == before


def test_two_outputs_of_one_name_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "one.json")
    assert "written twice" in sentence(
        "run", "--url", "http://127.0.0.1:1", *ENOUGH, "--out", path, "--report", path
    )


def test_the_same_file_by_another_name_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.json").symlink_to("one.json")
    for other in ("./one.json", "x/../one.json", str(tmp_path / "one.json"), "link.json"):
        arguments = (*ENOUGH, "--out", "one.json", "--report", other)
        assert "written twice" in sentence("run", "--url", "http://127.0.0.1:1", *arguments)


def test_a_page_does_not_replace_its_result(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text("{}")
    assert "one of the results" in sentence("report", str(path), "--out", str(path))
    assert path.read_text() == "{}"


def test_a_trace_keeps_its_rhythm_at_a_rate_unless_another_arrival_is_named() -> None:
    trace = Path(AZURE)
    assert plan_settings(LoadOptions(trace=trace)).arrival.kind == "trace"
    paced = plan_settings(LoadOptions(trace=trace, rate=3.0))
    assert (paced.arrival.kind, paced.arrival.rate) == ("trace", 3.0)
    poisson = plan_settings(LoadOptions(trace=trace, rate=3.0, arrival="poisson"))
    assert poisson.arrival.kind == "poisson"
    assert isinstance(poisson.workload, TraceReplay)


def test_sharegpt_prompts_are_text(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_text("[]")
    assert plan_settings(LoadOptions(sharegpt=path, rate=1.0, requests=1)).prompt_form is PromptForm.TEXT


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        ("ttft=1", ["--slo ttft=1 is read as 1 ms; for seconds write ttft=1s."]),
        (
            "e2el:5 ttft:200",
            ["--slo e2el:5 is read as 5 ms; for seconds write e2el=5s."],
        ),
        ("ttft=1s,tpot=5", []),
        ("ttft=200", []),
        ("ttft=1 s", []),
        (None, []),
    ],
)
def test_a_small_plain_bound_is_pointed_out(text: str | None, notes: list[str]) -> None:
    assert slo_notes(text) == notes


def test_a_flag_may_be_given_twice_and_a_value_may_look_like_an_option() -> None:
    """Only what would be ignored is refused."""
    told = sentence("run", "--url", "http://127.0.0.1:1", *ENOUGH, "--steady", "--steady", "--label=--rate")
    assert "nothing listens" in told


def test_the_key_comes_from_the_variable_that_is_named() -> None:
    given = LoadOptions(api_key_env="MINE")
    assert api_key(given, {"MINE": "k", "OPENAI_API_KEY": "other"}) == "k"
    assert api_key(LoadOptions(), {}) is None
    with pytest.raises(ConfigError, match="--api-key-env MINE"):
        api_key(given, {"MINE": ""})


def test_the_key_is_not_in_the_command_line() -> None:
    told = command_line(["baton", "bench", "run", "--label", "my sk-123"], "sk-123")
    assert told == "baton bench run --label 'my ***'"
    assert command_line(["a", "b"], None) == "a b"


def test_help_tells_the_exit_statuses_and_what_a_rate_of_chats_is() -> None:
    for command in ("run", "sweep", "max-goodput", "report", "compare"):
        output = " ".join(CliRunner().invoke(app, [command, "--help"], terminal_width=200).output.split())
        for part in ("0 complete and valid", "3 measured, but INVALID", "5 not all that was asked for"):
            assert part in output
    assert "chats per second" in CliRunner().invoke(app, ["run", "--help"], terminal_width=200).output


@pytest.mark.parametrize("kind", [LoadOptions, SweepOptions, SearchOptions])
def test_help_tells_the_default_of_every_option(kind: type[LoadOptions]) -> None:
    """Typer shows those that are values."""
    for field in fields(kind):
        is_value = field.default is not None and field.default is not False
        assert is_value is ("(default: " not in field.metadata["help"]), field.name


def test_an_invalid_option_of_the_file_kind_is_told_by_compare(tmp_path: Path) -> None:
    path = tmp_path / "search.json"
    path.write_text(json.dumps({"schema_version": 1, "kind": "max-goodput"}))
    assert "max-goodput search" in sentence("compare", str(path), str(path))
    assert "not the whole result" in sentence("report", str(path), "--out", str(tmp_path / "x.html"))


def test_endless_arrivals_over_a_trace_take_all_of_it(mock: MockProcess, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    arguments = ("--trace", AZURE, "--arrival", "poisson", "--rate", "1000", "--scale-lengths", "100")
    result = CliRunner().invoke(app, ["run", "--url", mock.target.url, *arguments, "--out", str(out)])
    assert result.exit_code in (0, 3), (result.output, result.exception)
    written = json.loads(out.read_text())
    usable = written["workload"]["num_rows_file"] - written["workload"]["num_rows_empty"]
    assert written["num_prompts"] == usable
    with pytest.raises(ConfigError, match="--speed-up"):
        plan_settings(LoadOptions(trace=Path(AZURE), rate=2.0, arrival="poisson", speed_up=2.0))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("run", "--bogus"), "No such option: --bogus"),
        (("run", "--rate", "abc"), "Invalid value for '--rate'"),
        (("run", "--rate"), "'--rate' requires an argument"),
        (("run", "extra"), "unexpected extra argument"),
        (("compare",), "Missing argument 'results'"),
        (("report", "--x"), "No such option: --x"),
    ],
)
def test_what_the_parser_refuses_is_one_line_and_a_usage_error(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], part: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli_entry.main(arguments, owns_process=False)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {part}") or part in line
    assert line.endswith(f"; see baton bench {arguments[0]} --help")
