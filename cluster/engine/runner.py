"""Run one step: a plan in, tokens out. The only writer of the KV pool on its worker.

1. Copies of the plan (copy-on-write) are made in order.
2. `pack` lays the rows out as one batch; the decoder computes it and writes its keys and values.
3. Logits are taken only for rows that sample; the sampler chooses by each row's own parameters and history.
   Prompts whose own log-probabilities are wanted are scored as they pass. Of drafts, what is right is kept.
4. Of rows that go on (`cluster.engine.following`) all that is known already: they have neither. Where their
   tokens hang on logits and positions alone, and the backend can, all of it is one call, in memory that moves
   on by itself (`kernels.ops.FusedSteps`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from operator import is_
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from cluster.engine.batch import PlainOutputs, Row, SampleSpec, StepOutput, StepPlan
from cluster.engine.decoder import Decoder
from cluster.engine.drafts import Further, asked_of, sort_out
from cluster.engine.following import FollowingRows
from cluster.engine.grammar_masks import GrammarMasks
from cluster.engine.load import load_decoder
from cluster.engine.packed_batch import PackedBatch, Packer
from cluster.engine.parallel import SINGLE_RANK, ParallelConfig
from cluster.engine.prepared_model import PreparedModel
from cluster.engine.prompt_scores import score_prompts
from cluster.engine.token_choice import TokenChooser, warn_of_broken
from cluster.engine.weights import TORCH_DTYPES
from cluster.ids import Attempt, BlockId, RequestId
from cluster.sampling import SamplingParams, TokenOutput
from kernels.ops import Backend, Positions, StepResult, row_size

if TYPE_CHECKING:
    from cluster.grammar import Grammars


class ModelRunner:
    """Implements `cluster.engine.batch.Runner`. One thread at a time."""

    def __init__(
        self,
        prepared: PreparedModel,
        pool: Tensor,
        backend: Backend,
        max_model_len: int | None = None,
        parallel: ParallelConfig = SINGLE_RANK,
        decoder: Decoder | None = None,
    ) -> None:
        """`pool`: as `kernels.ops` lays it out, of the prepared dtype or int8, on the backend's device.
        `decoder`: one whose weights are there already; None: mapped from the prepared files.

        Raises:
            ModelError: see `load_decoder`.
            ValueError: the pool does not fit the model.
        """
        spec = prepared.spec
        self.decoder = decoder or load_decoder(prepared, backend, max_model_len, parallel)
        self.max_model_len = self.decoder.max_model_len
        expected = (spec.num_layers, 2, spec.num_kv_heads, row_size(spec.head_dim, pool.dtype))
        dtypes = (TORCH_DTYPES[prepared.dtype], torch.int8)
        if (*pool.shape[1:3], *pool.shape[4:]) != expected or pool.dtype not in dtypes:
            raise ValueError(f"KV pool of {list(pool.shape)} {pool.dtype} does not fit {prepared.name}")
        if pool.device != backend.device:
            raise ValueError(f"KV pool on {pool.device} does not fit a backend on {backend.device}")
        self._pool = pool
        self._fused = self.decoder.fused
        self._needs_no_mode = self._fused is not None and self._fused.needs_no_mode
        # bound methods of what is called in each step: an object's own call takes a longer way
        self._forward = self.decoder.forward if self._fused is None else self._fused.__call__
        self._num_borrowed = 0  # pieces of all steps so far
        self._packer = Packer(pool.shape[3], self.max_model_len, backend.device)
        self._chooser = TokenChooser(
            backend, spec.vocab_size, GrammarMasks(lambda: _open_grammars(prepared.directory))
        )
        self._choose = self._chooser.__call__
        steps = self._chooser.steps_with(self._fused)
        self._may_follow = None if steps is None else steps.may_follow
        self._step_on = None if steps is None else steps.__call__
        self._brought: list[int] | None = None  # tokens of the last step, if one call might go on with them
        self._num_on = self._most_on = 0  # steps that were such a call since the packer knew, and may be
        self._specs: list[SampleSpec] = []  # of the step that was computed last; one of those wants ...
        self._may_score = False  # ... its prompt scored

    def run(self, plan: StepPlan, await_history: Callable[[], object] | None = None) -> StepOutput:
        """Compute one step, as `cluster.engine.batch.Runner` says.

        Raises:
            ValueError: a row is empty, too long, or not covered by its block table; nothing was written.
        """
        started_s = time.perf_counter()
        fused, rows = self._fused, plan.rows
        outputs: Sequence[TokenOutput | None]
        further: Further = {}
        if (
            type(rows) is FollowingRows
            and rows.token_ids is self._brought
            and (0 < self._num_on < self._most_on or self._can_begin())
        ):
            outputs = self._go_on()
            if await_history is not None:  # nobody in it looked back
                await_history()
        elif torch.is_inference_mode_enabled() or (self._needs_no_mode and type(rows) is FollowingRows):
            outputs, further = self._run(plan, await_history)
        else:
            with torch.inference_mode():  # a thread that lives in it need not enter it each time
                return self.run(plan, await_history)
        before = self._num_borrowed
        self._num_borrowed = 0 if fused is None else fused.num_borrowed
        num_borrowed = self._num_borrowed - before
        return StepOutput(outputs, time.perf_counter() - started_s, num_borrowed, further)

    def warm_up(self) -> float:
        """Compute a prefill and a decode step before anyone waits for one; returns seconds.

        Writes to block 0, so call it before the pool is handed out.
        """
        params = SamplingParams(max_tokens=1, temperature=0.0)
        elapsed_s = 0.0
        for num_tokens in (min(self._pool.shape[3], self.max_model_len), 1):
            tokens = [0] * num_tokens
            row = Row(
                request=RequestId("warm-up"),
                attempt=Attempt(1),
                token_ids=tokens,
                start=0,
                block_ids=[BlockId(0)],
                sample=SampleSpec(params=params, prompt_ids=tokens, output_ids=()),
            )
            elapsed_s += self.run(StepPlan(rows=(row,))).compute_s
        return elapsed_s

    def _can_begin(self) -> bool:
        """Whether steps of one call can follow the last one, which was none."""
        if self._num_on or self._may_follow is None:
            return False
        self._most_on = self._packer.num_more
        return self._most_on > 0 and self._may_follow()

    def _go_on(self) -> PlainOutputs:
        """The step after the last one, in one call."""
        assert self._step_on is not None
        try:
            tokens, num_broken = self._step_on()
        except BaseException:  # did the batch move?
            self._brought, self._num_on = None, 0
            self._packer.forget()
            raise
        self._brought = tokens
        self._num_on += 1
        if num_broken:
            warn_of_broken(num_broken, len(tokens))
        return PlainOutputs(tokens)

    def _run(
        self, plan: StepPlan, await_history: Callable[[], object] | None
    ) -> tuple[Sequence[TokenOutput | None], Further]:
        rows, packer = plan.rows, self._packer
        self._brought = None
        if self._num_on:
            packer.gone_on(self._num_on)
            self._num_on = 0
        outputs: Sequence[TokenOutput | None]
        further: Further = {}
        if type(rows) is FollowingRows:
            result = self._forward(packer.pack(rows), self._pool, False)
            if await_history is not None:
                await_history()
            outputs = self._choose(result, rows.run.specs, packer.next_positions)
        else:
            if not rows:
                copy_blocks(self._pool, plan)
                return (), {}
            batch = packer.pack(rows)
            copy_blocks(self._pool, plan)
            outputs, further = self._compute(batch, rows, await_history)
        if type(outputs) is PlainOutputs:
            self._brought = outputs.token_ids
        return outputs, further

    def _compute(
        self, batch: PackedBatch, rows: Sequence[Row], await_history: Callable[[], object] | None
    ) -> tuple[Sequence[TokenOutput | None], Further]:
        specs: list[SampleSpec] = []
        has_scores = has_drafts = False
        for row in rows:
            if row.sample is not None:
                specs.append(row.sample)
            if row.score is not None:
                has_scores = True
            if row.num_drafts:
                has_drafts = True
        if len(specs) == len(self._specs) and all(map(is_, specs, self._specs)):
            specs = self._specs  # the same list: who has looked it over need not do so again
        else:
            self._specs = specs
            self._may_score = any([spec.params.prompt_logprobs is not None for spec in specs])
            self._chooser.prepare(specs)
        result = self._forward(batch, self._pool, keep_hidden=has_scores)
        if await_history is not None:
            await_history()
        if has_scores:
            score_prompts(result.hidden, rows, self.decoder.logits)
        if has_drafts:
            return sort_out(rows, self.choose(result, rows))
        choose = self._tokens if self._may_score else self._choose
        outputs = choose(result, specs, self._packer.next_positions) if specs else []
        return (outputs, {}) if len(specs) == len(rows) else sort_out(rows, outputs)

    def choose(self, result: StepResult, rows: Sequence[Row]) -> Sequence[TokenOutput]:
        """The tokens of the rows that sample, and those after their drafts; `result` has a row of logits for
        each. Those whose grammars are not prepared wait for them here."""
        return self._tokens(result, *asked_of(rows))

    def _tokens(
        self, result: StepResult, specs: list[SampleSpec], positions: Positions
    ) -> Sequence[TokenOutput]:
        outputs = self._choose(result, specs, positions)
        scored = [index for index, spec in enumerate(specs) if spec.notes.scores]
        if not scored:
            return outputs
        told = list(outputs)
        for index in scored:
            notes = specs[index].notes
            scores, notes.scores = tuple(notes.scores), []
            told[index] = msgspec.structs.replace(told[index], prompt_scores=scores)
        return told


def copy_blocks(pool: Tensor, plan: StepPlan) -> None:
    """The plan's copies, in order: what a step does first."""
    for source, destination in plan.copies:
        pool[destination].copy_(pool[source])


def _open_grammars(directory: Path) -> Grammars:
    from cluster.grammar import Grammars
    from cluster.tokenizer import Tokenizer

    return Grammars(Tokenizer.load(directory))
