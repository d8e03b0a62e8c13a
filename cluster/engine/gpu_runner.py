"""Steps on a GPU: decode steps by graphs, all others as `ModelRunner` computes them, and what can go wrong.

1. A plan whose shape was prepared goes by `DecodeGraphs`; chunks, mixed steps and steps that want the
   prompt's log-probabilities go launch by launch. Both give the same bits.
2. A step ends when the device has, a failed one too: what it wrote can then be read by whoever sends it, on
   any stream, and its blocks can be another's.
3. Out of memory: the step's requests fail in one sentence, memory that was kept for reuse goes back, and the
   next step runs. A fault of the device ends the process, since no later step could succeed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from cluster.engine.batch import PlainOutputs, StepOutput, StepPlan
from cluster.engine.decode_graphs import DecodeGraphs
from cluster.engine.runner import ModelRunner
from cluster.errors import DeviceLost, StepError, first_line


class GpuRunner:
    """Implements `cluster.engine.batch.Runner`. One thread at a time."""

    def __init__(self, runner: ModelRunner, graphs: DecodeGraphs | None, device: torch.device) -> None:
        """`graphs` None: this worker does not decode, or cannot by graphs."""
        self._runner, self._graphs, self._device = runner, graphs, device

    def run(self, plan: StepPlan, await_history: Callable[[], object] | None = None) -> StepOutput:
        """One step, as `cluster.engine.batch.Runner` says.

        Raises:
            StepError: out of memory; the next step may be smaller.
            DeviceLost: the device faulted.
            ValueError: as `ModelRunner.run`.
        """
        try:
            return self._decode(plan, await_history) or self._compute(plan, await_history)
        except torch.OutOfMemoryError as error:
            self._finish_after(error)
            reason = first_line(error)
        except Exception as error:
            self._finish_after(error)
            raise
        # The traceback is gone by now, and with it the tensors that its frames held.
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        raise StepError(
            f"a step of {len(plan.rows)} rows, {plan.num_tokens} tokens ran out of GPU memory ({reason}): "
            "lower `--gpu-memory-share`, `--prefill-chunk`, `--local-chunk` or `--max-num-seqs`"
        )

    def _decode(self, plan: StepPlan, await_history: Callable[[], object] | None) -> StepOutput | None:
        if self._graphs is None:
            return None
        started_s = time.perf_counter()
        with torch.inference_mode():
            step = self._graphs.step(plan, await_history)
            if step is None:
                return None
            outputs = (
                self._runner.choose(step.result, plan.rows)
                if step.token_ids is None
                else PlainOutputs(step.token_ids)
            )
        return StepOutput(outputs, time.perf_counter() - started_s)

    def _compute(self, plan: StepPlan, await_history: Callable[[], object] | None) -> StepOutput:
        started_s = time.perf_counter()
        output = self._runner.run(
            plan, None if await_history is None else partial(self._await, await_history)
        )
        self._finish()
        return StepOutput(output.outputs, time.perf_counter() - started_s)

    def _await(self, await_history: Callable[[], object]) -> None:
        """The wait counts as none of the step's time, so the device must not compute meanwhile."""
        self._finish()
        await_history()

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _finish_after(self, error: Exception) -> None:
        """What was launched before `error` may still write into blocks that are about to be freed."""
        if self._device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError:
            raise DeviceLost(
                f"the GPU faulted, and this process cannot use it again: {first_line(error)}"
            ) from error
