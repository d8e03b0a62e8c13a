"""`python -m bench.step_overhead`: what Python and sampling add to a decode step, by batch and by request.

1. A decode worker's core with sequences of its own drives the real runner and model. `planned`: each step is
   planned by the core when the one before is booked. `changes`: so it is, and each time a row rests or comes
   back, with blocks and parameters that are known (what a request's begin and end cost beside is in nothing
   here); where a batch has one row only, there is no such step. `goes on`: the runner goes on by itself
   (`cluster.engine.following`) as far as the core gives leave, and the core books a step, and tells of it,
   while the next one computes: on the loop's thread, which goes on when the engine's drops the GIL. Here that
   is when the library is called. All tokens end in encoded messages.
2. Time inside the compiled library is taken apart: the forward pass is left out, the sampler has its own
   column, except where both are one call. The rest is Python, with caches cold: the model's weights have just
   gone through them.
3. `between` is what delays the next forward pass: all of it, but booking and messages only where a step is
   planned. What the two threads of a worker cost one another (a wake-up, a lock) is in nothing here.
4. Sequences are of different lengths, so each step some begin a block. Of all steps the fastest share of each
   part counts: other work on the machine only ever adds time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from cluster.engine.batch import StepPlan
from cluster.engine.following import following_plan
from cluster.engine.model_spec import Dtype
from cluster.engine.prepare import prepare_model
from cluster.engine.runner import ModelRunner
from cluster.engine.sequence import Sequence
from cluster.engine.weights import TORCH_DTYPES
from cluster.ids import Attempt, RequestId, RouterId
from cluster.kv.block_manager import BlockManager
from cluster.sampling import SamplingParams
from cluster.wire.codec import encode
from cluster.worker_io import Action, RunStep, StepDone, ToRouter
from decode_worker.core import DecodeConfig, DecodeCore
from kernels.cpu.backend import CpuBackend
from kernels.cpu.native import NativeKernels

BLOCK_SIZE, CONTEXT = 64, 512
MOST_STEPS = 100  # of three kinds, in the blocks that a sequence gets beside its context's
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
PARTS = ("plan", "pack", "rest of run", "account", "message", "python", "between", "sampler")


class Timed:
    """A function, the seconds spent in it, and what is done when it is called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.spent_s = 0.0
        self.first: Callable[[], None] | None = None

    def call(self, *arguments: Any) -> Any:
        """For the function's place: a bound method costs less than an object's own call."""
        if self.first is not None:
            self.first()
        began_s = time.perf_counter()
        result = self._function(*arguments)
        self.spent_s += time.perf_counter() - began_s
        return result


class Worker:
    """A decode worker's core with sequences that have their prompt's KV and one token to go on from, and its
    engine."""

    def __init__(self, num_seqs: int, vocab_size: int, request: dict[str, Any], runner: ModelRunner) -> None:
        blocks = BlockManager(num_blocks(num_seqs), BLOCK_SIZE, "overhead")
        self._actions: list[Action] = []
        core = self._core = DecodeCore(DecodeConfig(block_bytes=1, max_num_seqs=num_seqs), blocks)
        for index in range(num_seqs):
            length = CONTEXT - 7 * index % BLOCK_SIZE
            tokens = [(7919 * index + 31 * i) % (vocab_size - 9) + 5 for i in range(length)]
            params = SamplingParams(max_tokens=CONTEXT, seed=index, eos_token_ids=(vocab_size,), **request)
            sequence = Sequence(
                RouterId("r"),
                RequestId(f"request-{index}"),
                Attempt(1),
                tokens,
                length,
                params,
                "",
                index,
                0.0,
            )
            assert sequence.reserve(blocks, CONTEXT // BLOCK_SIZE + 1)
            sequence.num_computed = length
            sequence.append(5)
            sequence.pace.first_token(0.0)
            core._scheduler.add(sequence)
        self._run = runner.run
        self.pack, self.core_plan = Timed(runner._packer.pack), Timed(core._scheduler.plan)
        runner._packer.pack, core._scheduler.plan = self.pack.call, self.core_plan.call  # type: ignore
        plan = core._scheduler.plan(0.0)
        assert plan is not None
        self._plan: StepPlan = plan
        self._now_s = 0.0
        self._left_out: list[Sequence] = []
        self._is_untold = False
        self.followed_s = self.began_s = self.accounted_s = self.told_s = 0.0
        self._output = self._run(plan)
        self._may_go_on = core.may_go_on()

    def planned_step(self) -> None:
        self._tell(went_on=False)
        step = self._actions[-1]
        assert isinstance(step, RunStep)
        self._plan = step.plan
        self._output = self._run(self._plan)

    def changed_step(self) -> None:
        """A planned one, without the youngest row if that was in the one before."""
        rows = self._core._scheduler._decoding
        if self._left_out:
            rows.append(self._left_out.pop())
        else:
            self._left_out.append(rows.pop())
        self.planned_step()

    def step_that_goes_on(self) -> bool:
        """Where the core gives no leave, or a request ends, it is a planned one."""
        following = following_plan(self._plan, self._output) if self._may_go_on else None
        self.followed_s = time.perf_counter()
        if following is None:
            self.planned_step()
            return False
        self._plan, self._is_untold = following, True
        self._output = self._run(following, self.tell_meanwhile)
        return True

    def tell_meanwhile(self) -> None:
        """Of the step before the one that runs, if that went on by itself."""
        if self._is_untold:
            self._is_untold = False
            self._tell()

    def _tell(self, went_on: bool = True) -> None:
        """The core of the end of a step, and routers of its tokens."""
        self.began_s = time.perf_counter()
        self._now_s += 0.05
        self._actions = self._core.handle(StepDone(self._output, went_on), self._now_s)
        self._may_go_on = self._core.may_go_on()
        self.accounted_s = time.perf_counter()
        for action in self._actions:
            if isinstance(action, ToRouter):
                encode(action.message)
        self.told_s = time.perf_counter()


class Bench:
    def __init__(self, model: str, dtype: Dtype, num_threads: int) -> None:
        self._backend = CpuBackend(num_threads)
        kernels = self._backend._kernels
        if not isinstance(kernels, NativeKernels):
            raise SystemExit("the C++ kernels did not compile here: nothing to measure (see the log)")
        library = kernels._library
        self._forward, self._choose = Timed(library.baton_forward), Timed(library.baton_sample)
        self._step_on = Timed(library.baton_step_on)
        library.baton_forward, library.baton_sample = self._forward.call, self._choose.call
        library.baton_step_on = self._step_on.call
        self._prepared = prepare_model(model, dtype, self._backend)
        self._dtype = dtype

    def measure(self, num_seqs: int, request: dict[str, Any], num_steps: int) -> dict[str, dict[str, float]]:
        """Microseconds of each of `PARTS` in a decode step, by the kind of step."""
        spec = self._prepared.spec
        shape = (num_blocks(num_seqs), spec.num_layers, 2, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
        pool = torch.full(shape, 0.01, dtype=TORCH_DTYPES[self._dtype])
        with torch.inference_mode():  # as an engine's thread, which lives in it
            runner = ModelRunner(self._prepared, pool, self._backend)
            worker = Worker(num_seqs, spec.vocab_size, request, runner)
            self._forward.first = self._step_on.first = worker.tell_meanwhile
            planned = [self._step(worker, worker.planned_step)[0] for _ in range(num_steps)]
            steps = [self._step(worker, worker.step_that_goes_on) for _ in range(num_steps)]
            on = [part for part, went_on in steps if went_on]
            assert len(on) > 1, "no step went on"
            kinds = {"planned": planned, "goes on": on}
            if num_seqs > 1:
                kinds["changes"] = [self._step(worker, worker.changed_step)[0] for _ in range(num_steps)]
        return {kind: _least(parts[1:]) for kind, parts in kinds.items()}  # what was before the first?

    def _step(self, worker: Worker, step: Callable[[], bool | None]) -> tuple[dict[str, float], bool]:
        """The parts of one step, which begins with the end of the one before."""
        timed = (worker.pack, worker.core_plan, self._forward, self._choose, self._step_on)
        for one in timed:
            one.spent_s = 0.0
        began_s = time.perf_counter()
        went_on = bool(step())
        library_s = sum([one.spent_s for one in timed[2:]])
        python_s = time.perf_counter() - began_s - library_s
        part = {
            "plan": worker.followed_s - began_s if went_on else worker.core_plan.spent_s,
            "pack": worker.pack.spent_s,
            "account": worker.accounted_s - worker.began_s - worker.core_plan.spent_s,
            "message": worker.told_s - worker.accounted_s,
            "python": python_s,
            "sampler": self._choose.spent_s,
        }
        part["rest of run"] = python_s - sum(part[name] for name in ("plan", "pack", "account", "message"))
        part["between"] = python_s - (part["account"] + part["message"] if went_on else 0.0)
        return part, went_on


def num_blocks(num_seqs: int) -> int:
    return num_seqs * (CONTEXT // BLOCK_SIZE + 6) + 1


def _least(steps: list[dict[str, float]]) -> dict[str, float]:
    return {part: min(step[part] for step in steps) * 1e6 for part in PARTS}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.step_overhead", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo", help="as `baton serve --model`")
    parser.add_argument("--dtype", default="bf16", choices=[dtype.value for dtype in Dtype])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12, help="of each kind; of each part the least counts")
    parser.add_argument("--batch", type=int, nargs="*", default=BATCH_SIZES)
    parser.add_argument("--requests", nargs="*", default=list(REQUESTS), choices=list(REQUESTS))
    arguments = parser.parse_args()
    if arguments.steps > MOST_STEPS:
        parser.error(f"--steps: at most {MOST_STEPS}, for sequences have room for no more")
    torch.set_num_threads(arguments.threads)
    bench = Bench(arguments.model, Dtype(arguments.dtype), arguments.threads)
    head = f"{'µs per decode step':<24}{'batch':>6}  {'step':<8}"
    print(head + "".join(f"{part:>12}" for part in PARTS))
    for name in arguments.requests:
        for num_seqs in arguments.batch:
            for kind, us in bench.measure(num_seqs, REQUESTS[name], arguments.steps).items():
                line = f"{name:<24}{num_seqs:>6}  {kind:<8}"
                print(line + "".join(f"{us[part]:>12.0f}" for part in PARTS), flush=True)


if __name__ == "__main__":
    main()
