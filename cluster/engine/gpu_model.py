"""A model on a GPU, from its weights to a runner that serves.

1. `open_on_gpu` checks what can be checked before, loads the weights, and runs the largest steps that this
   worker can be given on a pool of one block: what they took is kept free, KV gets of the rest.
2. The role makes its pool: as many blocks, and one of nobody for padding.
3. `make_runner`, on the engine thread, runs a step of each kind, so that kernels are compiled before anybody
   waits for them, and captures the graphs of decode steps on workers that decode.

In Triton's interpreter all of this happens on a CPU, but for the measuring: the pool is `kv_bytes` then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.config import DEFAULT_KV_BYTES
from cluster.engine.batch import Runner
from cluster.engine.decode_buckets import bucket_sizes
from cluster.engine.decode_graphs import DecodeGraphs
from cluster.engine.decode_inputs import DecodeInputs
from cluster.engine.decoder import Decoder
from cluster.engine.gpu_memory import (
    NUM_SCRATCH_BLOCKS,
    DeviceMemory,
    check_weights_fit,
    free_of_part,
    gib,
    largest_step,
    size_pool,
)
from cluster.engine.gpu_runner import GpuRunner
from cluster.engine.graph_capture import CudaCapture, eager
from cluster.engine.load import load_decoder
from cluster.engine.prepared_model import PreparedModel
from cluster.engine.runner import ModelRunner
from cluster.engine.weights_file import DATA
from cluster.errors import ConfigError, first_line
from cluster.ids import BlockId
from cluster.kv.block_copy import Mover
from cluster.kv.layout import KVLayout
from cluster.kv.pool import TORCH_DTYPES, KVPool
from cluster.kv.pool_device import device_pool, shared_device_pool
from cluster.role_config import WorkerConfig
from cluster.wire.messages import Role
from kernels.ops import Backend

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A loaded model. `num_blocks` of KV fit beside it and its steps."""

    prepared: PreparedModel
    backend: Backend
    decoder: Decoder
    num_blocks: int
    most_decode_rows: int  # 0: this worker does not decode

    def make_pool(self, layout: KVLayout, *, shared: bool) -> KVPool:
        """`shared`: with processes of this host.

        Raises:
            ConfigError: something else has taken the memory since it was measured.
        """
        make = shared_device_pool if shared else device_pool
        return make(layout, self.backend.device, NUM_SCRATCH_BLOCKS)

    def make_mover(self, pool: Tensor) -> Mover:
        """For edges that stage KV on this GPU; `pool` as for `make_runner`. Compiles its kernel."""
        from cluster.engine.block_mover import BlockMover  # needs triton

        mover = BlockMover()
        mover.prepare(pool, pool.shape[0] - NUM_SCRATCH_BLOCKS)
        return mover

    def make_runner(self, pool: Tensor) -> Runner:
        """`pool`: the whole of what `make_pool` made; its first block is written to.

        Raises:
            ConfigError: not even one step can be computed here; says why in one line.
        """
        device = self.backend.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        started_s = time.perf_counter()
        try:
            runner = ModelRunner(
                self.prepared, pool, self.backend, self.decoder.max_model_len, decoder=self.decoder
            )
            runner.warm_up()
            graphs = self._make_graphs(pool) if self.most_decode_rows else None
        except RuntimeError as error:
            raise _cannot_compute(error) from error
        logger.info(
            "model `%s` on %s is warm after %.2f s",
            self.prepared.name,
            device,
            time.perf_counter() - started_s,
        )
        return GpuRunner(runner, graphs, device)

    def _make_graphs(self, pool: Tensor) -> DecodeGraphs | None:
        device, spec = self.backend.device, self.prepared.spec
        sizes = bucket_sizes(self.most_decode_rows)
        try:
            with torch.inference_mode():
                sampler = self.backend.make_device_sampler(sizes[-1], spec.vocab_size)
                if sampler is None:
                    logger.warning(
                        "decode steps run without CUDA graphs: a vocabulary of %d is chosen from on the host",
                        spec.vocab_size,
                    )
                    return None
                scratch = BlockId(pool.shape[0] - NUM_SCRATCH_BLOCKS)
                inputs = DecodeInputs(sizes[-1], self.decoder.max_model_len, pool.shape[3], scratch, device)
                graphs = DecodeGraphs(self.decoder, pool, sampler, inputs, sizes)
                num_graphs = graphs.capture(CudaCapture(device) if device.type == "cuda" else eager)
        except torch.OutOfMemoryError as error:
            logger.warning("decode steps run without CUDA graphs: %s", first_line(error))
            return None
        logger.info("captured %d decode steps of up to %d rows", num_graphs, sizes[-1])
        return graphs


def open_on_gpu(
    config: WorkerConfig, prepared: PreparedModel, backend: Backend, layout: KVLayout, max_model_len: int
) -> GpuModel:
    """Load the model and find out how much KV fits beside it. `layout` says what a block is.

    Raises:
        ConfigError: weights, steps or KV do not fit, with needed and free GiB; or the KV edge needs KV in
            host memory.
        ModelError: see `load_decoder`.
    """
    if config.kv_edge == "shm":
        raise ConfigError(
            "the KV edge `shm` needs KV in memory of the host, and this worker keeps it on a GPU: "
            "use `--kv-edge cuda_ipc` on one host, `nccl` or `gloo` across hosts"
        )
    most_decode_rows = config.max_num_seqs if config.role is Role.DECODE else 0
    if backend.device.type != "cuda":
        decoder = load_decoder(prepared, backend, max_model_len)
        kv_bytes = DEFAULT_KV_BYTES[config.role] if config.kv_bytes is None else config.kv_bytes
        return GpuModel(prepared, backend, decoder, kv_bytes // layout.bytes_per_block, most_decode_rows)
    free, total = _free_and_total(backend.device, config.gpu_sharers)
    check_weights_fit((prepared.directory / DATA).stat().st_size, free, total)
    try:
        decoder = load_decoder(prepared, backend, max_model_len)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the weights do not fit in {gib(free)} of free GPU memory: {first_line(error)}"
        ) from error
    weights = int(torch.cuda.memory_allocated(backend.device))
    try:
        steps = _measure_steps(config, prepared, backend, layout, decoder)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of {config.max_chunk_tokens} tokens and {config.max_num_seqs} rows does not fit beside "
            f"{gib(weights)} of weights in {gib(free)} of free GPU memory ({first_line(error)}): lower "
            "`--prefill-chunk`, `--local-chunk` or `--max-num-seqs`"
        ) from error
    except RuntimeError as error:
        raise _cannot_compute(error) from error
    free, total = _free_and_total(backend.device, config.gpu_sharers)
    memory = DeviceMemory(total=total, free=free, weights=weights, steps=steps)
    flag = "--decode-kv" if config.role is Role.DECODE else "--prefill-kv"
    num_blocks = size_pool(memory, layout.bytes_per_block, config.gpu_memory_share, config.kv_bytes, flag)
    logger.info(
        "GPU memory: %s of weights, %s for steps, %s of KV in %d blocks, of %s%s",
        gib(weights),
        gib(steps),
        gib(num_blocks * layout.bytes_per_block),
        num_blocks,
        gib(total),
        f", 1/{config.gpu_sharers} of this GPU" if config.gpu_sharers > 1 else "",
    )
    return GpuModel(prepared, backend, decoder, num_blocks, most_decode_rows)


def _cannot_compute(error: RuntimeError) -> ConfigError:
    return ConfigError(f"no step can be computed on this GPU: {first_line(error)}")


def _measure_steps(
    config: WorkerConfig, prepared: PreparedModel, backend: Backend, layout: KVLayout, decoder: Decoder
) -> int:
    """Bytes that the largest steps take. A graph keeps what its step takes, so where there are graphs, those
    of a decode step count beside those of the largest one, and so does what graphs read and write."""
    max_model_len, vocab_size = decoder.max_model_len, prepared.spec.vocab_size
    pool = torch.zeros(1, *layout.shape[1:], dtype=TORCH_DTYPES[layout.dtype], device=backend.device)
    runner = ModelRunner(prepared, pool, backend, max_model_len, decoder=decoder)

    def peak(chunk_tokens: int, num_rows: int) -> int:
        plan = largest_step(chunk_tokens, num_rows, max_model_len, config.block_size)
        return _peak_bytes(lambda: runner.run(plan), backend.device)

    alone = {num_rows: peak(0, num_rows) for num_rows in bucket_sizes(config.max_num_seqs)}
    largest_alone = max(alone.values())
    counts = {config.max_num_seqs, max(alone, key=alone.__getitem__)}
    largest = max(largest_alone, *(peak(config.max_chunk_tokens, num_rows) for num_rows in counts))
    if config.role is not Role.DECODE:
        return largest
    kept = max(alone) * (4 * vocab_size + 4 * -(-max_model_len // config.block_size))
    return largest + largest_alone + kept


def _peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Most that `work` takes beside what is allocated before; compiled kernels come first, apart."""
    work()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - int(before)


def _free_and_total(device: torch.device, num_sharers: int) -> tuple[int, int]:
    """Of this worker's part of the device's memory, with nothing kept for reuse."""
    torch.cuda.empty_cache()
    free, total = (int(number) for number in torch.cuda.mem_get_info(device))
    held = int(torch.cuda.memory_reserved(device))
    return free_of_part(free, total, held, num_sharers), total // num_sharers
