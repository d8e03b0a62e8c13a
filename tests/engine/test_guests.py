"""A pass on borrowed cores gives the same bits, however guests come and go."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from cluster.core_board import BOARD_BYTES, BoardFile
from cluster.engine.batch import Row, StepPlan
from cluster.engine.model_spec import Dtype
from cluster.engine.packed_batch import pack
from cluster.engine.runner import ModelRunner
from cluster.ids import Attempt, BlockId, RequestId
from kernels.cpu.backend import CpuBackend
from kernels.cpu.core_board import LentCore, Seat, open_board
from kernels.cpu.native_forward import NativeForward
from tests.engine.tiny_models import BLOCK_SIZE, Engine, prompts, same_bits

BUSY, IDLE_SINCE_BOOT = -7, 1  # lines of the board as `core_board.h` has them
SELF, OWNER = 0, 1
# wide enough that stages have pieces to give away
WIDE = {"hidden_size": 96, "intermediate_size": 1024, "vocab_size": 2048, "num_hidden_layers": 4}
TIMEOUT_S = 20.0


class Script:
    """Writes the owner's line as an owner would, at once or on and on from a thread."""

    def __init__(self) -> None:
        self.file = BoardFile()
        descriptor = os.open(self.file.path, os.O_RDWR)
        self._memory = mmap.mmap(descriptor, BOARD_BYTES)
        os.close(descriptor)
        self._line = ctypes.c_int64.from_buffer(self._memory, OWNER * 64)
        self.set(IDLE_SINCE_BOOT)

    def set(self, value: int) -> None:
        self._line.value = value

    @contextmanager
    def flipping(self) -> Iterator[None]:
        """The owner begins and ends a step thousands of times a second."""
        stop = threading.Event()

        def flip() -> None:
            while not stop.is_set():
                self.set(BUSY)
                time.sleep(1e-5)
                self.set(IDLE_SINCE_BOOT)
                time.sleep(2e-4)

        thread = threading.Thread(target=flip)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def close(self) -> None:
        del self._line
        self._memory.close()
        self.file.close()


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()
    yield script
    script.close()


@pytest.fixture
def prepared_of(checkpoint: Any, prepare: Any) -> Callable[[Dtype], Any]:
    directory = checkpoint("qwen3", **WIDE).directory
    return lambda dtype: prepare(directory, dtype, CpuBackend(1))


def guests_of(script: Script, num_threads: int, num_lent: int) -> CpuBackend:
    lent = tuple(LentCore(num_threads + i, (OWNER,)) for i in range(num_lent))
    return CpuBackend(num_threads, seat=Seat(board=script.file.path, worker=SELF, lent=lent))


def fused(engine: Engine) -> NativeForward:
    assert isinstance(engine.decoder._fused, NativeForward)
    return engine.decoder._fused


def step(engine: Engine, rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    with torch.inference_mode():
        result = engine.decoder.forward(pack(rows, BLOCK_SIZE, 512, engine.device), engine.pool)
    return result.hidden.clone(), result.logits.clone(), result.best.tolist()


def batches(engine: Engine) -> list[list[Any]]:
    """A prefill of unequal prompts, a decode step, and both together."""
    texts = prompts(lengths=(1, 5, 17, 40, 150))
    return [
        [engine.row(i, text, 0) for i, text in enumerate(texts)],
        [engine.row(i, [i + 3], len(text)) for i, text in enumerate(texts)],
        [engine.row(7, texts[4][:90], 0), *(engine.row(i, [9], len(texts[i]) + 1) for i in (4, 0, 2))],
    ]


def run_all(engine: Engine) -> list[tuple[torch.Tensor, torch.Tensor, list[int]]]:
    return [step(engine, rows) for rows in batches(engine)]


@pytest.mark.parametrize(("num_threads", "num_lent"), [(1, 1), (1, 2), (2, 1), (5, 1)])
@pytest.mark.parametrize("dtype", list(Dtype), ids=lambda dtype: dtype.value)
def test_bits_are_the_same_while_guests_come_and_go(
    dtype: Dtype, num_threads: int, num_lent: int, script: Script, prepared_of: Any
) -> None:
    prepared = prepared_of(dtype)
    alone = Engine(prepared, CpuBackend(1))
    expected = run_all(alone)
    engine = Engine(prepared, guests_of(script, num_threads, num_lent))
    deadline = time.monotonic() + TIMEOUT_S
    num_rounds = 0
    with script.flipping():
        while num_rounds < 5 or fused(engine).num_borrowed == 0:
            assert time.monotonic() < deadline, "no guest has come"
            engine.pool.fill_(math.nan)
            for ours, theirs in zip(run_all(engine), expected, strict=True):
                assert torch.equal(ours[0], theirs[0])
                assert torch.equal(ours[1], theirs[1])
                assert ours[2] == theirs[2]
            assert same_bits(engine.pool, alone.pool)
            num_rounds += 1


def test_a_busy_owner_has_its_core_for_itself(script: Script, prepared_of: Any) -> None:
    engine = Engine(prepared_of(Dtype.FP32), guests_of(script, 1, 1))
    script.set(BUSY)
    watcher = open_board(fused(engine)._library, script.file.path)
    watcher.sit_down(OWNER)  # alive, so its line is not freed
    script.set(BUSY)
    run_all(engine)
    assert fused(engine).num_borrowed == 0
    assert watcher.claim(1)


def test_the_core_of_an_owner_that_died_within_a_step_is_borrowed(script: Script, prepared_of: Any) -> None:
    engine = Engine(prepared_of(Dtype.FP32), guests_of(script, 1, 1))
    script.set(BUSY)  # and nobody holds the lock of its line
    run_until_helped(engine)


def test_guests_go_home_without_work_and_at_the_end(script: Script, prepared_of: Any) -> None:
    engine = Engine(prepared_of(Dtype.FP32), guests_of(script, 1, 2))
    watcher = open_board(fused(engine)._library, script.file.path)
    run_until_helped(engine)
    for core in (1, 2):
        deadline = time.monotonic() + TIMEOUT_S
        while not watcher.claim(core):
            assert time.monotonic() < deadline, "a guest without work has stayed"
        watcher.release(core)
    run_all(engine)
    del engine  # perhaps while they are there
    assert watcher.claim(1)
    assert watcher.claim(2)


def test_a_teams_own_helpers_are_no_guests(prepared_of: Any) -> None:
    engine = Engine(prepared_of(Dtype.FP32), CpuBackend(3))
    for _ in range(20):
        run_all(engine)
    assert fused(engine)._library.baton_model_num_borrowed(fused(engine)._model) == 0


def test_one_guest_at_a_time_on_a_core(script: Script, prepared_of: Any) -> None:
    engine = Engine(prepared_of(Dtype.FP32), guests_of(script, 1, 1))
    other = open_board(fused(engine)._library, script.file.path)
    assert other.claim(1)
    run_all(engine)
    assert fused(engine).num_borrowed == 0
    other.release(1)
    run_until_helped(engine)


def test_a_step_tells_how_many_of_its_pieces_were_borrowed(script: Script, prepared_of: Any) -> None:
    prepared = prepared_of(Dtype.FP32)
    spec = prepared.spec
    pool = torch.zeros(4, spec.num_layers, 2, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    runner = ModelRunner(prepared, pool, guests_of(script, 1, 1))
    plan = StepPlan((Row(RequestId("a"), Attempt(1), [3] * 8, 0, [BlockId(0), BlockId(1)], None),))
    told, deadline = 0, time.monotonic() + TIMEOUT_S
    while told == 0:
        assert time.monotonic() < deadline, "no guest has come"
        told += runner.run(plan).num_borrowed
    fused = runner.decoder.fused
    assert fused is not None
    assert told == fused.num_borrowed


def test_a_board_that_is_not_there_is_said(prepared_of: Any) -> None:
    with pytest.raises(OSError, match="no core board can be opened at /nowhere"):
        CpuBackend(1, seat=Seat(board="/nowhere", worker=SELF, lent=(LentCore(1, (OWNER,)),)))


def run_until_helped(engine: Engine) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while fused(engine).num_borrowed == 0:
        assert time.monotonic() < deadline, "no guest has come"
        run_all(engine)
