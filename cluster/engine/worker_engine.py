"""What a worker needs of the engine before it can say who it is: model, backend, KV layout, runner.

1. `open_engine` finds or converts the model and builds the backend (seconds, off the event loop). On a GPU it
   loads the weights, too: how much KV there is follows from what they leave (`cluster.engine.gpu_model`).
2. The role makes its pool with `make_pool` and registers with `fingerprint`.
3. `make_runner` maps the weights and warms up, on a GPU it captures graphs; it runs on the engine thread.
4. `calibrate` measures a handful of steps there, before anybody waits for one.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

import torch

from cluster.config import DEFAULT_KV_BYTES
from cluster.engine.backends import make_backend
from cluster.engine.batch import Runner, StepOutput, StepPlan
from cluster.engine.gpu_model import GpuModel, open_on_gpu
from cluster.engine.model_spec import Dtype
from cluster.engine.parallel import SINGLE_RANK, kv_geometry
from cluster.engine.prepare import prepare_model
from cluster.engine.prepared_model import PreparedModel
from cluster.engine.runner import ModelRunner
from cluster.engine.speculation import SpeculatingRunner, Speculation
from cluster.errors import ConfigError
from cluster.kv.block_copy import Mover
from cluster.kv.layout import KVLayout
from cluster.kv.pool import KVPool
from cluster.live_step_model import ASSUMED
from cluster.role_config import WorkerConfig
from cluster.step_calibration import LONG_TOKENS, MANY_ROWS, Calibration, Pool, fit_calibration, measure
from cluster.step_model import StepModel
from kernels.cpu.backend import CpuBackend
from kernels.cpu.core_board import CoreBoard
from kernels.cpu.lifeline import Lifeline, hold
from kernels.ops import Backend

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerEngine:
    """A prepared model on a backend, before its weights are mapped."""

    prepared: PreparedModel
    backend: Backend
    layout: KVLayout
    max_model_len: int
    num_threads: int
    board: CoreBoard | None  # where others see that this worker computes
    keep_lifeline: Callable[[int], Lifeline | None] | None  # how others see at once that it was killed
    gpu: GpuModel | None = None  # the model, where it is on a GPU

    @property
    def fingerprint(self) -> str:
        """The model's, and how KV is kept where not as the model computes: equal ones give equal bits."""
        model, kept = self.prepared.fingerprint, self.layout.dtype
        return model if kept == self.prepared.dtype.wire_name else f"{model}-kv-{kept}"

    def make_pool(self, *, shared: bool) -> KVPool:
        """KV memory of `layout`, fresh; `shared`: with processes of this host.

        Raises:
            ConfigError: there is not so much memory.
        """
        if self.gpu is not None:
            return self.gpu.make_pool(self.layout, shared=shared)
        return KVPool.shared(self.layout) if shared else KVPool.private(self.layout)

    def make_mover(self, pool: torch.Tensor) -> Mover | None:
        """What moves blocks to and from an edge's staging on the same GPU; None: they are copied. `pool` as
        for `make_runner`. Takes a second where kernels have to be compiled."""
        return None if self.gpu is None else self.gpu.make_mover(pool)

    @property
    def can_speculate(self) -> bool:
        """Whether rows may bring drafts. On a GPU steps of one token per row are replayed as graphs, and what
        drafts cost there has not been measured."""
        return self.gpu is None

    def make_runner(self, pool: torch.Tensor, *, speculates: bool = False) -> Callable[[], Runner]:
        """A function for the engine thread: thread-local compute settings are made there. `pool`: the whole
        of what `make_pool` made. `speculates`: only where that `can_speculate`."""
        assert self.can_speculate or not speculates

        def make() -> Runner:
            torch.set_num_threads(self.num_threads)
            with ExitStack() as mode:  # left with an error, and on a GPU, whose steps enter it themselves
                mode.enter_context(torch.inference_mode())
                started_s = time.perf_counter()
                if self.gpu is not None:
                    return self.gpu.make_runner(pool)
                with _busy(self.board):
                    runner = ModelRunner(self.prepared, pool, self.backend, self.max_model_len)
                    loaded_s = time.perf_counter()
                    runner.warm_up()
                logger.info(
                    "model `%s` loaded in %.2f s, warmed up in %.2f s",
                    self.prepared.name,
                    loaded_s - started_s,
                    time.perf_counter() - loaded_s,
                )
                speculating = SpeculatingRunner(runner, Speculation()) if speculates else runner
                return _ThreadRunner(speculating, self.board, mode.pop_all())

        return make

    def calibrate(self, pool: torch.Tensor) -> Callable[[Runner], StepModel]:
        """A function for the engine thread: how long steps take. The pool is afterwards as it was."""
        size = self.layout.block_size
        num_blocks = min(pool.shape[0], -(-LONG_TOKENS // size) + MANY_ROWS)

        def run(runner: Runner) -> StepModel:
            started_s = time.perf_counter()
            used = pool[:num_blocks]
            before = used.to("cpu", copy=True)  # a GPU may have no room for it
            used.zero_()  # whatever memory held before: no step meets a number that is none
            try:
                found = fit_calibration(measure(runner, Pool(num_blocks, size, self.max_model_len)))
            except Exception as error:  # a worker that can serve does not end for want of a measurement
                logger.exception("a step of the calibration failed")
                found = Calibration(ASSUMED, 0, f"a step failed ({type(error).__name__}: {error})")
            finally:
                used.copy_(before)
            if found.problem is not None:
                logger.warning(
                    "the calibration of step times failed: %s; assuming %s until steps have run",
                    found.problem,
                    found.model,
                )
            else:
                logger.info(
                    "calibrated with %d kinds of steps in %.2f s: %s",
                    found.num_shapes,
                    time.perf_counter() - started_s,
                    found.model,
                )
            return found.model

        return run


class _ThreadRunner:
    """A runner whose cores are lent between its steps, and whose thread stays in torch's inference mode."""

    def __init__(self, runner: Runner, board: CoreBoard | None, mode: ExitStack) -> None:
        self._runner, self._board, self._mode = runner, board, mode

    def run(self, plan: StepPlan, await_history: Callable[[], object] | None = None) -> StepOutput:
        with _busy(self._board):
            return self._runner.run(plan, await_history)


def _busy(board: CoreBoard | None) -> AbstractContextManager[None]:
    return nullcontext() if board is None else board.step()


def open_engine(config: WorkerConfig) -> WorkerEngine:
    """Find the model in the cache, or convert it, and lay out a pool of `config.kv_bytes`, or of what a GPU
    has left.

    Raises:
        ModelError: the model cannot be served.
        ConfigError: the pool is too small for a single sequence of two blocks, or the backend, or the KV edge
            from its memory, cannot work here.
    """
    torch.set_num_threads(config.num_threads)
    backend = make_backend(config.backend, config.num_threads, config.quantization, config.core_share)
    dtype = Dtype(config.dtype)
    prepared = prepare_model(config.model, dtype, backend)
    spec = prepared.spec
    layout = KVLayout.from_geometry(
        kv_geometry(
            spec,
            SINGLE_RANK,
            num_blocks=1,
            block_size=config.block_size,
            dtype=dtype.wire_name if config.kv_dtype == "auto" else config.kv_dtype,
        )
    )
    max_model_len = config.max_model_len or spec.max_context_len
    gpu = open_on_gpu(config, prepared, backend, layout, max_model_len) if backend.name == "triton" else None
    kv_bytes = DEFAULT_KV_BYTES[config.role] if config.kv_bytes is None else config.kv_bytes
    num_blocks = kv_bytes // layout.bytes_per_block if gpu is None else gpu.num_blocks
    if num_blocks < 2:
        raise ConfigError(
            f"KV memory of {kv_bytes >> 20} MiB holds {num_blocks} blocks of "
            f"{layout.bytes_per_block / 2**20:.1f} MiB; "
            "give workers of this role more, or use a smaller block size or `--kv-dtype int8`"
        )
    return WorkerEngine(
        prepared=prepared,
        backend=backend,
        layout=dataclasses.replace(layout, num_blocks=num_blocks),
        max_model_len=max_model_len,
        num_threads=config.num_threads,
        board=backend.board if isinstance(backend, CpuBackend) else None,
        keep_lifeline=hold if isinstance(backend, CpuBackend) else None,
        gpu=gpu,
    )
