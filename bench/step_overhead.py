"""`python -m bench.step_overhead`: what Python and sampling add to a decode step, by batch and by request.

1. A decode scheduler with sequences of its own drives the real runner and model, as on a decode worker; the
   tokens go through its bookkeeping into the encoded message.
2. Time inside the compiled library is taken apart: the forward pass is left out, the sampler has its own
   column. The rest is Python, with caches cold: the model's weights have just gone through them.
3. Of all steps the fastest share of each part counts: other work on the machine only ever adds time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from cluster.engine.batch import StepOutput, StepPlan
from cluster.engine.model_spec import Dtype
from cluster.engine.prepare import prepare_model
from cluster.engine.runner import ModelRunner
from cluster.engine.sequence import Sequence
from cluster.engine.weights import TORCH_DTYPES
from cluster.ids import Attempt, RequestId, RouterId
from cluster.kv.block_manager import BlockManager
from cluster.sampling import SamplingParams
from cluster.wire.codec import encode
from cluster.wire.messages import TokenRow, Tokens
from decode_worker.scheduler import DecodeScheduler, DecodeSchedulerConfig, Generated
from kernels.cpu.backend import CpuBackend
from kernels.cpu.native import NativeKernels

BLOCK_SIZE, CONTEXT = 64, 512
BATCH_SIZES = (1, 8, 32, 64)
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-k 50, top-p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "temperature 1": {},
    "penalties, 5 logprobs": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "num_logprobs": 5,
    },
}
PARTS = ("plan", "pack", "rest of run", "account", "message", "python", "sampler")


class Timed:
    """A function of the library, and the seconds spent in it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.spent_s = 0.0

    def __call__(self, *arguments: Any) -> Any:
        started_s = time.perf_counter()
        result = self._function(*arguments)
        self.spent_s += time.perf_counter() - started_s
        return result


def message(generated: list[Generated]) -> bytes:
    rows = [
        TokenRow(new.sequence.request, new.sequence.attempt, new.token_index, [new.output], new.finish_reason)
        for new in generated
    ]
    return encode(Tokens(rows=rows))


def make_scheduler(num_seqs: int, vocab_size: int, request: dict[str, Any]) -> DecodeScheduler:
    """With sequences that have their prompt's KV and one token to go on from."""
    blocks = BlockManager(num_seqs * (CONTEXT // BLOCK_SIZE + 4) + 1, BLOCK_SIZE, "overhead")
    scheduler = DecodeScheduler(DecodeSchedulerConfig(), blocks)
    for index in range(num_seqs):
        tokens = [(7919 * index + 31 * i) % (vocab_size - 9) + 5 for i in range(CONTEXT)]
        params = SamplingParams(max_tokens=CONTEXT, seed=index, min_tokens=0, eos_token_ids=(), **request)
        sequence = Sequence(
            RouterId("r"), RequestId(str(index)), Attempt(1), tokens, CONTEXT, params, "", index, 0.0
        )
        assert sequence.reserve(blocks, CONTEXT // BLOCK_SIZE + 1)
        sequence.num_computed = CONTEXT
        sequence.append(5)
        sequence.pace.first_token(0.0)
        scheduler.add(sequence)
    return scheduler


class Bench:
    def __init__(self, model: str, dtype: Dtype, num_threads: int) -> None:
        self._backend = CpuBackend(num_threads)
        kernels = self._backend._kernels
        if not isinstance(kernels, NativeKernels):
            raise SystemExit("the C++ kernels did not compile here: nothing to measure (see the log)")
        library = kernels._library
        self._forward = library.baton_forward = Timed(library.baton_forward)
        self._choose = library.baton_sample = Timed(library.baton_sample)
        self._prepared = prepare_model(model, dtype, self._backend)
        self._dtype = dtype

    def measure(self, num_seqs: int, request: dict[str, Any], num_steps: int) -> dict[str, float]:
        """Microseconds of each of `PARTS` in a decode step."""
        spec = self._prepared.spec
        scheduler = make_scheduler(num_seqs, spec.vocab_size, request)
        num_blocks = num_seqs * (CONTEXT // BLOCK_SIZE + 4) + 1
        shape = (num_blocks, spec.num_layers, 2, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
        pool = torch.full(shape, 0.01, dtype=TORCH_DTYPES[self._dtype])
        runner = ModelRunner(self._prepared, pool, self._backend)
        pack = Timed(runner._packer.pack)
        runner._packer.pack = pack  # type: ignore[assignment]
        with torch.inference_mode():  # as an engine's thread, which lives in it
            steps = [self._step(scheduler, runner, pack) for _ in range(num_steps)]
        return {part: min(step[part] for step in steps) * 1e6 for part in PARTS}

    def _step(self, scheduler: DecodeScheduler, runner: ModelRunner, pack: Timed) -> dict[str, float]:
        for timed in (pack, self._forward, self._choose):
            timed.spent_s = 0.0
        clock = [time.perf_counter()]

        def lap() -> float:
            clock.append(time.perf_counter())
            return clock[-1] - clock[-2]

        plan = scheduler.plan(0.0)
        assert isinstance(plan, StepPlan)
        part = {"plan": lap()}
        output: StepOutput = runner.run(plan)
        part["rest of run"] = lap() - pack.spent_s - self._forward.spent_s - self._choose.spent_s
        generated = scheduler.account(output, 0.0)
        part["account"] = lap()
        message(generated)
        part["message"] = lap()
        part["pack"], part["sampler"] = pack.spent_s, self._choose.spent_s
        part["python"] = sum(part[name] for name in PARTS[:5])
        return part


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.step_overhead", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo", help="as `baton serve --model`")
    parser.add_argument("--dtype", default="bf16", choices=[dtype.value for dtype in Dtype])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12, help="per case; of each part the least counts")
    parser.add_argument("--batch", type=int, nargs="*", default=BATCH_SIZES)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    bench = Bench(arguments.model, Dtype(arguments.dtype), arguments.threads)
    print(f"{'µs per decode step':<24}{'batch':>6}" + "".join(f"{part:>13}" for part in PARTS))
    for name, request in REQUESTS.items():
        for num_seqs in arguments.batch:
            us = bench.measure(num_seqs, request, arguments.steps)
            print(f"{name:<24}{num_seqs:>6}" + "".join(f"{us[part]:>13.0f}" for part in PARTS), flush=True)


if __name__ == "__main__":
    main()
