"""Decode steps that are replayed: one launch computes a batch of rows and chooses their tokens.

1. At the start `capture` records a graph for each number of rows in `decode_buckets.bucket_sizes` and each
   kind of drawing, on padding alone. All read `DecodeInputs` and write `logits`, `best` and `chosen` here.
2. `step` computes a plan if there are graphs for it. If it is the step that was expected, its inputs are
   there and the graph is started at once; otherwise they are written first.
3. Behind the graph the tokens' copy to the host is enqueued, and behind that the inputs of the next step, as
   far as it can be told. Then the host waits for the tokens: two numbers per row.
4. Rows with more wishes than a `DeviceSampler` knows, or with broken logits, get their tokens from the
   caller, who finds the logits in the result.

What the host does between two steps: read the tokens, hand them to the event loop, account and plan there,
hand over the plan, compare it with the expected one, start the graph. Nothing is packed, copied, sampled or
launched one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_

import torch
from torch import Tensor

from cluster.engine.batch import SampleSpec, StepPlan
from cluster.engine.decode_buckets import NextStep, find_bucket, is_decode
from cluster.engine.decode_inputs import DecodeInputs
from cluster.engine.decoder import Decoder
from cluster.engine.device_copies import Mark, host_zeros
from cluster.engine.graph_capture import Capture, CaptureError, Work
from cluster.engine.processors import is_neutral
from cluster.engine.runner import copy_blocks
from kernels.draw_kind import DrawKind, draw_kind
from kernels.ops import DeviceSampler, StepResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GraphStep:
    """What came of one step. `result` is overwritten by the next one."""

    result: StepResult  # of the plan's rows, in order
    token_ids: list[int] | None  # None: to be chosen from `result`


class DecodeGraphs:
    """One thread at a time; the only user of `inputs` and of `sampler`."""

    def __init__(
        self,
        decoder: Decoder,
        pool: Tensor,
        sampler: DeviceSampler,
        inputs: DecodeInputs,
        sizes: Sequence[int],
    ) -> None:
        """`pool`: with the scratch block of `inputs`. `sizes`: numbers of rows, ascending."""
        most_rows, device = sizes[-1], pool.device
        self._decoder, self._pool, self._sampler, self._inputs = decoder, pool, sampler, inputs
        self._block_size = pool.shape[3]
        self._sizes = tuple(sizes)
        self._logits = torch.zeros(most_rows, decoder.spec.vocab_size, device=device)
        self._best = torch.zeros(most_rows, dtype=torch.int64, device=device)
        self._chosen = torch.zeros(2, most_rows, dtype=torch.int64, device=device)
        self._on_host = host_zeros((2, most_rows), torch.int64, device)
        self._arrived = Mark(device)
        self._rules = RowRules(sampler)
        self._replays: dict[tuple[int, DrawKind], Work] = {}
        self._next: NextStep | None = None
        self._tokens: list[int] = []  # of the step before `_next`, as the device has them

    def capture(self, capture: Capture) -> int:
        """Record all graphs; how many there are then. Where one cannot be recorded, neither can the others:
        the log says why, and their steps are computed launch by launch."""
        for size in reversed(self._sizes):  # the largest first: they share its memory
            self._inputs.write((), size)
            for kind in DrawKind:
                try:
                    self._replays[size, kind] = capture(self._work(size, kind))
                except CaptureError as error:
                    logger.warning("decode steps of %d rows run without a CUDA graph: %s", size, error)
                    return len(self._replays)
        return len(self._replays)

    def replay(self, num_rows: int) -> Work | None:
        """The greedy step of as many rows as one of `sizes`, on the inputs that are there: to be timed. None:
        it was not recorded."""
        return self._replays.get((num_rows, DrawKind.GREEDY))

    def step(self, plan: StepPlan, await_history: Callable[[], object] | None = None) -> GraphStep | None:
        """Compute `plan`; None, and nothing is done, if there are no graphs for it. `await_history`: as
        `cluster.engine.batch.Runner.run` has it; called before histories are looked at."""
        expected, self._next = self._next, None
        size = find_bucket(self._sizes, len(plan.rows))
        if size is None or (size, DrawKind.NARROW) not in self._replays:
            return None
        if expected is None or not expected.is_plan(plan, self._tokens):
            if not is_decode(plan, self._block_size, self._decoder.max_model_len):
                return None
            copy_blocks(self._pool, plan)
            self._inputs.write(plan.rows, size)
        specs = [row.sample for row in plan.rows if row.sample is not None]
        if await_history is not None and not self._rules.know(specs):
            await_history()
        kind = self._rules.update(specs)
        self._replays[size, DrawKind.GREEDY if kind is None else kind]()
        self._on_host.copy_(self._chosen, non_blocking=True)
        self._arrived.set()
        following = NextStep.after(plan.rows, self._block_size, self._decoder.max_model_len)
        if following is not None:
            self._inputs.write_next(following, self._chosen[0], size)
        self._arrived.wait()
        if await_history is not None:
            await_history()
        count = len(plan.rows)
        token_ids, unusual = self._on_host[:, :count].tolist()
        self._next, self._tokens = following, token_ids
        result = StepResult(self._logits[:0], self._logits[:count], self._best[:count])
        return GraphStep(result, None if kind is None or any(unusual) else token_ids)

    def _work(self, size: int, kind: DrawKind) -> Callable[[], None]:
        batch = self._inputs.batch(size)
        logits, best, chosen = self._logits[:size], self._best[:size], self._chosen[:, :size]

        def work() -> None:
            result = self._decoder.forward(batch, self._pool)
            logits.copy_(result.logits)
            best.copy_(result.best)
            self._sampler.choose(logits, best, batch.positions + 1, kind, chosen)

        return work


class RowRules:
    """What the rows of a step want of the sampler, written to the device when it changes."""

    def __init__(self, sampler: DeviceSampler) -> None:
        self._sampler = sampler
        self._specs: list[SampleSpec] = []
        self._kind: DrawKind | None = None
        self._is_settled = False

    def know(self, specs: list[SampleSpec]) -> bool:
        """Whether these rows want what they wanted, however long their histories have become."""
        return self._is_settled and len(specs) == len(self._specs) and all(map(is_, specs, self._specs))

    def update(self, specs: list[SampleSpec]) -> DrawKind | None:
        """The kind of a step of these rows; None if the sampler does not know what one of them wants."""
        if self.know(specs):
            return self._kind
        self._kind = draw_kind(spec.params for spec in specs) if all(map(_is_plain, specs)) else None
        # later only the end of `min_tokens` changes what a request wants
        self._is_settled = all(len(spec.output_ids) >= spec.params.min_tokens for spec in specs)
        self._specs = specs
        if self._kind is not None:
            self._sampler.set_rules([spec.params for spec in specs])
        return self._kind


def _is_plain(spec: SampleSpec) -> bool:
    params = spec.params
    return params.num_logprobs is None and not params.grammar and is_neutral(params, len(spec.output_ids))
