"""What cannot work is known before anything is prepared, and the last line is true."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.machine import Machine
from bench.peers import __main__ as command
from bench.peers import compare_peers
from bench.peers.comparison import Comparison
from bench.peers.options import comparison_from, parser
from bench.peers.peer import Peer

MACHINE = Machine("a CPU", 2, (), "3", 10.0, 20.0, 30.0, 40.0)


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Names of peers made ready; none is really, nor is the machine measured."""
    names: list[str] = []

    def prepare(peer: Peer, *_: Any) -> None:
        names.append(peer.name)
        if "vllm" in peer.name:
            raise compare_peers.CannotRun("it needs another CPU")

    monkeypatch.setattr(compare_peers, "prepare", prepare)
    monkeypatch.setattr(compare_peers, "versions", lambda _: {})
    monkeypatch.setattr(compare_peers, "why_not", lambda *_: None)
    monkeypatch.setattr(command, "describe_machine", lambda: MACHINE)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    return names


def run(tmp_path: Path, *arguments: str) -> int:
    cache = ("--cache", str(tmp_path / "cache"))
    out = () if "--out" in arguments else ("--out", str(tmp_path / "table"))
    return command.main([*cache, *out, *arguments])


NOBODY = {"name": "x", "title": "X", "precision": "-", "weight_bits": 16, "kv_bits": 16, "is_baton": False}
COMPARISON = {
    "parts": [{"facts": {}, "machine": {}}],
    "peers": [NOBODY | {"settings": {}, "rounds": []}],
}
BAD = [
    (("--slo", "ttft=-1"), "ttft=-1"),
    (("--slo", ""), "empty"),
    (("--slo", "tftt=1s"), "did you mean `ttft`"),
    (("--peers", ""), "a name is empty"),
    (("--peers", "baton-colocated,"), "a name is empty"),
    (("--peers", "baton-colocated,vllm"), "unknown vllm"),
    (("--peers", "vllm-float32,vllm-float32"), "give each name once"),
    (("--goodput-peers", "vllm-float32,vllm-float32"), "give each name once"),
    (("--goodput-peers", "nobody"), "unknown nobody"),
    (("--peers", "vllm-float32", "--goodput-peers", "baton-colocated"), "would not be measured"),
    (("--resume", "{tmp}/nowhere.json"), "cannot be read"),
    (("--resume", "{tmp}"), "cannot be read"),
    (("--resume", "{tmp}/other.json"), "not the JSON file of a comparison"),
    (("--out", "{tmp}/file/table"), "Cannot write"),
    (("--out", "{tmp}/table.json"), "without suffix"),
    (("--out", ""), "without suffix"),
    (("--out", "{tmp}/taken"), "Cannot write"),
    (("--trace", "{tmp}/nowhere.csv"), "cannot be read"),
    (("--trace", "{tmp}/other.json"), "other.json"),
    (("--rounds", "0"), "--rounds 0"),
    (("--rounds", "-1"), "--rounds -1"),
    (("--seeds", "0"), "--seeds 0"),
    (("--seeds", "999999999999"), "give 100 or fewer"),
    (("--max-probes", "0"), "--max-probes 0"),
    (("--probe-seconds", "nan"), "--probe-seconds nan"),
    (("--tolerance", "1"), "--tolerance 1"),
    (("--scale-lengths", "-3"), "--scale-lengths -3"),
    (("--budget-minutes", "inf"), "--budget-minutes inf"),
    (("--max-loop-seconds", "0"), "--max-loop-seconds 0"),
    (("--concurrency", "8:4"), "IN_FLIGHT:REQUESTS"),
    (("--concurrency", "8:8,8:16"), "each number in flight once"),
    (("--model", "/nowhere"), "/nowhere"),
    (("--prompts", "text", "--trace", "{tmp}/trace.jsonl"), "a trace's prompts are random ids"),
    (("--prompts", "text", "--resume", "{tmp}/random.json"), "add rounds with --prompts random"),
    (("--resume", "{tmp}/text.json"), "add rounds with --prompts text"),
]


@pytest.mark.parametrize(("arguments", "part"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
@pytest.mark.parametrize("mode", ["measure", "--list", "--prepare-only"])
def test_what_cannot_work_is_one_line_before_anything_is_prepared(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    prepared: list[str],
    mode: str,
    arguments: tuple[str, ...],
    part: str,
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken.json").mkdir()
    (tmp_path / "other.json").write_text('{"parts": 5}')
    (tmp_path / "trace.jsonl").write_text('{"timestamp": 0, "input_length": 9, "output_length": 9}\n')
    (tmp_path / "random.json").write_text(json.dumps(COMPARISON))
    (tmp_path / "text.json").write_text(json.dumps(COMPARISON | {"prompts": "text"}))
    given = [argument.format(tmp=tmp_path) for argument in arguments]
    assert run(tmp_path, *given, *([] if mode == "measure" else [mode])) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert part in said.err
    assert prepared == []


@pytest.mark.parametrize(("kind", "stem"), [("random", "peers-"), ("text", "peers-text-")])
def test_prompts_of_text_have_chats_and_a_file_of_their_own(tmp_path: Path, kind: str, stem: str) -> None:
    options = parser().parse_args(["--prompts", kind, "--cache", str(tmp_path)])
    comparison, peers = comparison_from(options)
    is_text = kind == "text"
    assert comparison.out.name.startswith(f"{stem}{platform.machine()}-")
    assert (comparison.chats is not None) == is_text
    assert [peer.name for peer in peers if "--speculation" in peer.argv] == (
        [] if is_text else [peer.name for peer in peers if peer.is_baton]
    )
    assert all(num >= 3 * in_flight for in_flight, num in comparison.closed_loops)


def test_the_list_says_why_some_are_not_usual(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    generate = [line for line in lines if line.startswith("transformers-generate")]
    assert generate
    assert all("one request after another" in line for line in generate)


def test_preparing_says_who_is_ready_and_writes_no_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prepared: list[str]
) -> None:
    assert run(tmp_path, "--prepare-only", "--peers", "baton-colocated,vllm-float32") == 0
    assert prepared == ["baton-colocated", "vllm-float32"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "ready: baton-colocated; not ready: vllm-float32"
    assert not list(tmp_path.glob("table*"))
    assert run(tmp_path, "--prepare-only", "--peers", "vllm-float32") == 1


def test_a_comparison_without_a_server_says_so_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--peers", "vllm-float32") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"written: {tmp_path / 'table'}.json and .md; no server could be measured"
    table = (tmp_path / "table.md").read_text()
    assert "vLLM CPU, float32: it needs another CPU" in table
    assert "- transformers, generate, float32: only if named" in table
    assert "- Baton, colocated: not among the servers named (--peers)" in table
    assert "demo: SmolLM2" in table or "demo: smollm2" in table
    assert json.loads((tmp_path / "table.json").read_text())["not_measured"]


@pytest.mark.parametrize("has_figures", [False, True])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, compare_peers.Interrupted])
def test_an_interrupt_says_what_is_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    has_figures: bool,
    kind: type[BaseException],
) -> None:
    @contextlib.contextmanager
    def serving(*_: Any) -> Iterator[None]:
        yield

    def measure_peer(
        _: Comparison,
        peer: Peer,
        outcome: Any,
        running: None,
        loops: Any,
        number: int,
        report: Any,
        tell: Any,
    ) -> None:
        report.has_new_figures = has_figures
        raise kind

    monkeypatch.setattr(compare_peers, "serving", serving)
    monkeypatch.setattr(compare_peers, "measure_peer", measure_peer)
    assert run(tmp_path, "--peers", "baton-colocated") == 130
    said = capsys.readouterr().err.splitlines()
    if has_figures:
        assert said == [f"interrupted; what was measured is in {tmp_path / 'table'}.json and .md"]
        assert (tmp_path / "table.json").exists()
    else:
        assert said == ["interrupted before anything was measured; nothing is written"]
        assert not list(tmp_path.glob("table*"))
