"""The GPU check: its report, that it goes on past a failed part, and that it tells wrong from right."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from bench.gpu_check import __main__, goals
from bench.gpu_check.__main__ import PART_NAMES, _read, _run_in_process
from bench.gpu_check.report import Goal, Head, Line, Part, Report, render, render_lines
from tests.kernels.triton_support import DEVICE, why_not

ROOT = Path(__file__).resolve().parents[2]
needs_kernels = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def report(*parts: Part, interpreted: bool = False) -> Report:
    return Report(device="some card", interpreted=interpreted, versions={"torch": "2"}, parts=parts)


def test_a_report_holds_if_every_part_ended_and_nothing_is_wrong() -> None:
    good = Part(name="a", title="A", lines=(Line("x", {"us": 1.25}, holds=True), Line("y", {"n": 3})))
    wrong = Part(name="b", title="B", lines=(Line("z", {}, holds=False),))
    died = Part(name="c", title="C", error="ended with status -11: it said nothing")
    assert report(good).holds
    for bad in (wrong, died):
        assert not report(good, bad).holds
    text = render(report(good, wrong, died))
    assert "SOMETHING ASSERTED DOES NOT HOLD" in text
    assert "FAILED: ended with status -11" in text
    assert "everything asserted holds" in render(report(good))
    assert "No rate here means anything" in render(report(good, interpreted=True))


def test_lines_are_a_table_of_all_their_cells() -> None:
    lines = [Line("long name", {"us": 12.3456}, holds=True), Line("b", {"GB/s": 2.0, "us": 4}, holds=False)]
    head, first, second = render_lines(lines)
    assert head.split() == ["us", "GB/s"]
    assert first.split() == ["long", "name", "12.3", "ok"]
    assert second.split() == ["b", "4", "2", "WRONG"]
    assert len({len(head), len(first), len(second)}) == 1
    assert render_lines([]) == []


def test_what_is_aimed_at_stands_beside_what_was_found() -> None:
    """Told, not asserted: a slow device is not a wrong one."""
    aimed = (
        goals.of_ceiling("of copy bandwidth", 0.8512, 0.85),
        Goal("gap between steps", 61.4, 50.0, " us", at_most=True),
    )
    made = report(Part(name="e", title="E", lines=(Line("decode 16 x 8192", {}, goals=aimed), Line("y", {}))))
    assert made.holds
    lines = [line.split() for line in render(made).splitlines()]
    at = lines.index(["aimed", "at", "on", "an", "H100:", "1", "of", "2", "met"])
    assert lines[at + 2 : at + 4] == [
        ["decode", "16", "x", "8192:", "of", "copy", "bandwidth", "85.1", "%", ">=", "85", "%", "met"],
        ["decode", "16", "x", "8192:", "gap", "between", "steps", "61.4", "us", "<=", "50", "us", "MISSED"],
    ]
    assert "aimed at" not in render(report(Part(name="a", title="A", lines=(Line("y", {}),))))


def test_a_steps_goals_are_those_of_one_shape() -> None:
    steps, gaps = {"exact": 10e-3, "fast": 9e-3}, {"exact": 20.0, "fast": 70.0}
    found = goals.decode_step("Llama-3-8B", 16, 7.2e-3, steps, gaps)
    assert [(goal.what, round(goal.found, 1), goal.is_met) for goal in found] == [
        ("fast, of roofline", 80.0, True),
        ("exact, of fast", 0.9, True),
        ("exact, gap between steps", 20.0, True),
        ("fast, gap between steps", 70.0, False),
    ]
    assert goals.decode_step("Qwen3-0.6B", 16, 7.2e-3, steps, gaps) == ()
    assert goals.decode_step("Llama-3-8B", 4, 7.2e-3, steps, gaps) == ()


def test_a_report_is_json() -> None:
    aimed = (Goal("of roofline", 80.0, 75.0, " %"),)
    part = Part(name="a", title="A", lines=(Line("x", {"us": 1.5, "note": "n"}, holds=True, goals=aimed),))
    assert msgspec.json.decode(msgspec.json.encode(report(part)), type=Report) == report(part)


def test_a_part_that_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    part = _run_in_process("kernels", time.monotonic() + 60, interpret=True)
    assert part.error == "ended with status 1: it said nothing"
    assert not part.holds


def test_a_part_that_is_late_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    endless = tmp_path / "endless"
    endless.write_text("#!/bin/sh\nexec cat /dev/zero > /dev/null\n")
    endless.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(endless))
    part = _run_in_process("kernels", time.monotonic() - 1, interpret=True)
    assert part.error is not None
    assert part.error.endswith("no time was left")


def test_what_a_part_had_found_is_kept(tmp_path: Path) -> None:
    found = [Line("x", {"us": 1}), Line("y", {}, holds=False)]
    written = [msgspec.json.encode(value).decode() for value in (Head("A", "note"), *found)]
    path = tmp_path / "part.jsonl"
    path.write_text("\n".join(written) + "\n" + written[1][:7])
    assert _read(path, "a") == (Head("A", "note"), tuple(found))
    assert _read(tmp_path / "none", "a") == (Head("a", ""), ())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "bench.gpu_check"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 1
    [line] = result.stderr.strip().splitlines()
    assert line.startswith("the triton backend needs ")


def test_a_result_that_cannot_be_written_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(__main__, "_device_or_exit", lambda: "some card")
    monkeypatch.setattr(__main__, "_run_in_process", lambda *_, **__: pytest.fail("it was run"))
    out = tmp_path / "none" / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 2
    assert f"--out: cannot write {out}: No such file or directory" in capsys.readouterr().err


def test_what_must_be_exact_is_whatever_mode_the_user_serves_in(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def run(name: str, *_: object, **__: object) -> Part:
        seen.append(os.environ.get("BATON_GPU_MODE"))
        return Part(name=name, title=name)

    monkeypatch.setenv("BATON_GPU_MODE", "fast")
    monkeypatch.setattr(__main__, "_device_or_exit", lambda: "some card")
    monkeypatch.setattr(__main__, "_run_in_process", run)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--only", "handover"])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert (ended.value.code, seen) == (0, [None])


@needs_kernels
def test_every_part_has_a_process_and_the_other_way_round() -> None:
    from bench.gpu_check.parts import PARTS

    assert tuple(PARTS) == PART_NAMES


@needs_kernels
def test_correctness_tells_wrong_from_right(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.gpu_check import correctness
    from kernels.triton.backend import TritonBackend

    backend = TritonBackend()
    sizes = correctness.TINY
    check = correctness._Check(backend, torch.float32, sizes)
    assert all(line.holds for line in [*check.moves(), *check.row_wise(), *check._rotary_and_write(3, 1, 24)])
    monkeypatch.setattr(backend, "rms_norm", lambda x, weight, eps: x)
    wrong = [line.name for line in check.row_wise() if not line.holds]
    assert wrong == [f"rms_norm of {width}" for width in sizes.widths]


@needs_kernels
@pytest.mark.skipif(DEVICE != "cpu", reason="bf16 has kernels on a GPU")
def test_what_went_to_the_reference_does_not_pass() -> None:
    from bench.gpu_check import correctness
    from kernels.triton.backend import TritonBackend

    check = correctness._Check(TritonBackend(), torch.bfloat16, correctness.TINY)
    for _ in range(2):  # the log says so once
        first = next(check.row_wise())
        assert first.holds is False
        assert first.cells["note"] == "went to the reference"


@needs_kernels
def test_a_models_steps_are_measured_in_both_modes() -> None:
    from bench.engine_cases import decode
    from bench.gpu_check import engine_speed, kernel_speed
    from bench.gpu_check.timing import Ceilings, Clock
    from cluster.engine.model_spec import Dtype
    from kernels.triton.backend import TritonBackend

    exact, fast = kernel_speed.both_modes(TritonBackend())
    sizes = engine_speed.Sizes(models=("tiny, group 4",), cases=(decode(2, 9),))
    clock = Clock(exact.device, 0.0)
    lines = list(
        engine_speed.run({"exact": exact, "fast": fast}, clock, Ceilings(1e12, 1e14), Dtype.FP32, sizes)
    )
    assert [line.name for line in lines] == ["tiny, group 4 decode 2 x 9"]
    assert {"exact ms", "fast ms", "roofline ms", "fast/exact", "tok/s"} <= lines[0].cells.keys()
    assert {"exact served ms", "exact gap us", "fast served ms"} <= lines[0].cells.keys()
    assert lines[0].holds


class NoClock:
    """Every measurement takes a second, and nothing is run."""

    is_gpu = False

    def seconds(self, run: Callable[[], object], *, cold: bool = True) -> float:
        return 1.0

    def captured(self, run: Callable[[], object]) -> Callable[[], object]:
        return run


@needs_kernels
def test_every_kernel_that_something_is_aimed_at_for_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.gpu_check import kernel_speed
    from bench.gpu_check.timing import Ceilings
    from kernels.triton.backend import TritonBackend

    for name in ("MANY_KEYS", "LONG_PROMPT", "MANY_BYTES"):
        monkeypatch.setattr(goals, name, 1)
    exact, fast = kernel_speed.both_modes(TritonBackend())
    clock, ceilings = cast(Any, NoClock()), Ceilings(1e12, 1e14)
    measure = kernel_speed.KernelSpeed(exact, fast, clock, ceilings, torch.float32, kernel_speed.TINY)
    lines = list(measure.run())
    aimed = {line.name.split()[0]: [goal.what for goal in line.goals] for line in lines if line.goals}
    copy, product = "of copy bandwidth", "of the product"
    assert aimed == {
        "decode": [copy, f"fast, {copy}"],
        "prefill": [product, f"fast, {product}"],
        **{name: [copy] for name in ("rms_norm", "residual", "rotary", "gather", "scatter")},
    }
    assert lines[-1].name == "top-k, top-p, min-p and draw 2 x 300"


@needs_kernels
def test_the_sizes_reach_every_figure_that_is_aimed_at() -> None:
    from bench.gpu_check import engine_speed, kernel_speed

    sizes, item_bytes = kernel_speed.REAL, 2
    assert {goals.decode_attention(*case) for case in sizes.decode} == {None, 0.85, 0.60}
    assert {goals.prefill_attention(length) for length in sizes.prefill} == {None, 0.60}
    assert goals.row_wise(2 * sizes.row_bytes) == 0.80
    per_token = (sizes.heads[0] + 2 * sizes.heads[1]) * sizes.head_dim * item_bytes
    assert goals.row_wise(2 * sizes.num_rotated(item_bytes) * per_token) == 0.80
    assert goals.STEP_MODEL in engine_speed.REAL.models
    rows = {case.num_seqs for case in engine_speed.REAL.cases if case.num_queries == 1}
    assert rows == set(goals.STEP_ROWS)


@needs_kernels
def test_a_model_without_room_is_told_and_the_next_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.gpu_check import engine_speed
    from bench.gpu_check.timing import Ceilings

    def fails(model: str, *_: object) -> object:
        if model == "large":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 15.0 GiB.\nmore")
        return SimpleNamespace(run=lambda: iter([Line("small decode", {})]))

    monkeypatch.setattr(engine_speed, "_Model", fails)
    sizes = engine_speed.Sizes(models=("large", "small"), cases=())
    lines = list(engine_speed.run({}, cast(Any, NoClock()), Ceilings(1.0, 1.0), cast(Any, None), sizes))
    assert [line.name for line in lines] == ["large: no room on this device", "small decode"]
    assert lines[0].cells["note"] == "CUDA out of memory. Tried to allocate 15.0 GiB."


@needs_kernels
def test_what_is_generated_does_not_depend_on_chunks_or_companions() -> None:
    """With the reference: this is about the driver."""
    from bench.gpu_check.invariance import generate
    from bench.gpu_check.worlds import make_pool, make_runner, random_weights, spec_of
    from cluster.engine.model_spec import Dtype
    from kernels.reference import ReferenceBackend

    name, backend = "tiny, group 4", ReferenceBackend()
    weights = random_weights(spec_of(name), torch.float32, backend)
    prompts = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15], [16]]

    def run(prompts: list[list[int]], chunk: int | None) -> list[list[object]]:
        pool = make_pool(name, Dtype.FP32, backend.device, 3, 16)
        return generate(make_runner(name, weights, Dtype.FP32, backend, pool, 16), prompts, 4, chunk, 1)

    alone = run(prompts[:1], None)[0]
    assert len(alone) == 4
    assert run(prompts[:1], 3)[0] == alone
    together = run(prompts, None)
    assert together[0] == alone
    assert [len(outputs) for outputs in together] == [4, 4, 4]


async def test_a_prompt_computed_in_another_process_gives_the_same_tokens() -> None:
    """With the reference and over `shm`: this is about the flow."""
    from bench.gpu_check import handover
    from cluster.engine.model_spec import Dtype
    from cluster.kv.edges import EdgeKind

    lines = [line async for line in handover.check(EdgeKind.SHM, "reference", Dtype.FP32, handover.TINY)]
    assert len(lines) == 2 + len(handover.TINY.prompts)
    assert [line for line in lines if not line.holds] == []
    assert {line.cells["expected"] for line in lines[2:]} == {handover.TINY.num_tokens}


def test_other_keys_and_values_are_seen() -> None:
    from bench.gpu_check.handover import _requests, _same_prompt

    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    [one, _], [other, _] = _requests(prompts, 1, range(4)), _requests(prompts, 1, range(4)[::-1])
    assert [one.blocks, other.blocks] == [[0, 1], [3, 2]]
    own = torch.arange(4 * 2 * 2 * 3 * 1 * 2, dtype=torch.float32).view(4, 2, 2, 3, 1, 2)
    shared = torch.zeros_like(own)
    shared[[3, 2]] = own[[0, 1]]
    assert _same_prompt(own, shared, one, other)
    shared[2, :, :, 2] += 1  # behind the prompt
    assert _same_prompt(own, shared, one, other)
    shared[2, 1, 1, 1, 0, 0] += 1  # its last token
    assert not _same_prompt(own, shared, one, other)


async def test_an_edge_between_two_processes_is_checked_to_the_end() -> None:
    """Over gloo: pieces, one dropped, a killed peer, the edge beside it, the next epoch."""
    from bench.gpu_check import edge_check
    from cluster.kv.edges import EdgeKind

    lines = [line async for line in edge_check.check(EdgeKind.GLOO, edge_check.TINY)]
    assert len(lines) == len(edge_check.TINY.pieces) + 4
    assert [line for line in lines if not line.holds] == []


async def test_a_second_process_that_cannot_begin_is_no_wait() -> None:
    from bench.gpu_check.peer_process import PeerDied, PeerProcess

    with pytest.raises(PeerDied, match="the second process ended with status 1"):
        await PeerProcess.start({"PYTHONHOME": "/no/such/place"})


async def test_other_bytes_than_were_sent_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.gpu_check import edge_check
    from bench.gpu_check.peer import random_bytes
    from cluster.kv.edges import EdgeKind

    monkeypatch.setattr(edge_check, "random_bytes", lambda shape, seed: random_bytes(shape, seed + 1))
    async with contextlib.aclosing(edge_check.check(EdgeKind.GLOO, edge_check.TINY)) as found:
        first = await anext(found)
    assert first.holds is False
    assert first.cells["said"] == "other bytes than were sent"
