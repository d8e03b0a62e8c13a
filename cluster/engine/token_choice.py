"""The tokens of a step: by the backend's own sampler where it has one, by the definition otherwise.

Both give the same bits (`cluster.engine.sampler` is the definition): a token does not tell which one ran.
Grammars come first (`cluster.engine.grammar_masks`); log-probabilities are of the row before that, too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from cluster.engine.batch import PlainOutputs, SampleSpec
from cluster.engine.grammar_masks import GrammarMasks, MaskedRows
from cluster.engine.processors import make_finite
from cluster.engine.sampler import sample, with_logprobs
from cluster.sampling import BROKEN_TOKEN_ID, TokenOutput
from kernels.ops import Backend, FusedForward, FusedSteps, Positions, StepResult

logger = logging.getLogger(__name__)


class TokenChooser:
    """Keeps what a step can reuse of the one before; one thread at a time."""

    def __init__(self, backend: Backend, vocab_size: int, grammars: GrammarMasks | None = None) -> None:
        """`grammars` None: no request may have one."""
        sampler = backend.make_sampler()
        fits = sampler is not None and vocab_size <= sampler.largest_vocabulary
        self._sampler = sampler if fits else None
        self._sample = None if self._sampler is None else self._sampler.__call__  # bound, as in the runner
        self._grammars = grammars
        self._specs: Sequence[SampleSpec] = ()  # the list that was looked over last
        self._has_grammar = False  # one of those

    def steps_with(self, forward: FusedForward | None) -> FusedSteps | None:
        """Those of `forward` and of the backend's sampler, if there are such: they follow no grammar."""
        return None if forward is None or self._sampler is None else forward.steps_with(self._sampler)

    def prepare(self, specs: Sequence[SampleSpec]) -> None:
        """Begin what choosing the tokens of these requests needs, before their step is computed."""
        self._specs, self._has_grammar = specs, any([spec.params.grammar for spec in specs])
        if self._has_grammar and self._grammars is not None:
            for spec in specs:
                if spec.params.grammar:
                    self._grammars.prepare(spec)

    def __call__(
        self, result: StepResult, specs: Sequence[SampleSpec], positions: Positions
    ) -> Sequence[TokenOutput]:
        """One token per row of logits; `positions` are those of the tokens to choose. A row whose grammar
        gave up gets `BROKEN_TOKEN_ID`. What is in `specs` does not change: the same list is not looked over
        twice. Where one has a grammar, they are no `PlainOutputs`.

        Raises:
            ValueError: a request has a grammar, but this chooser takes none.
        """
        if specs is not self._specs:
            self._specs, self._has_grammar = specs, any([spec.params.grammar for spec in specs])
        masked = self._mask(result, specs) if self._has_grammar else None
        if self._sample is None:
            outputs: Sequence[TokenOutput] = sample(
                result.logits, specs, np.asarray(positions).tolist(), result.best.tolist()
            )
        else:
            tokens, details, num_broken = self._sample(result, specs, positions)
            if num_broken:
                warn_of_broken(num_broken, len(specs))
            outputs = PlainOutputs(tokens)
            if details:
                outputs = list(outputs)
                for row, logprob, top_logprobs in details:
                    outputs[row] = TokenOutput(tokens[row], logprob, top_logprobs)
        return outputs if masked is None else _behind_masks(outputs, masked, specs)

    def _mask(self, result: StepResult, specs: Sequence[SampleSpec]) -> MaskedRows:
        if self._grammars is None:
            raise ValueError("a request has a grammar, and there is no vocabulary to follow it with")
        return self._grammars.apply(result, specs)


def warn_of_broken(num_broken: int, num_rows: int) -> None:
    logger.error("NaN or +inf in the logits of %d of %d rows", num_broken, num_rows)


def _behind_masks(
    chosen: Sequence[TokenOutput], masked: MaskedRows, specs: Sequence[SampleSpec]
) -> Sequence[TokenOutput]:
    outputs = list(chosen)
    for row, raw in masked.raw.items():
        num_logprobs = specs[row].params.num_logprobs
        assert num_logprobs is not None
        logits = np.array(raw.float().cpu().numpy())
        make_finite(logits)
        outputs[row] = with_logprobs(logits, outputs[row].token_id, num_logprobs)
    for row in masked.failed:
        outputs[row] = TokenOutput(BROKEN_TOKEN_ID)
    return outputs
