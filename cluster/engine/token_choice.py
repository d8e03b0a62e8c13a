"""The tokens of a step: by the backend's own sampler where it has one, by the definition otherwise.

Both give the same bits (`cluster.engine.sampler` is the definition): a token does not tell which one ran.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from cluster.engine.batch import SampleSpec
from cluster.engine.sampler import sample
from cluster.sampling import TokenOutput
from kernels.ops import Backend, StepResult

logger = logging.getLogger(__name__)


class TokenChooser:
    """Keeps what a step can reuse of the one before; one thread at a time."""

    def __init__(self, backend: Backend, vocab_size: int) -> None:
        sampler = backend.make_sampler()
        fits = sampler is not None and vocab_size <= sampler.largest_vocabulary
        self._sampler = sampler if fits else None

    def __call__(
        self, result: StepResult, specs: Sequence[SampleSpec], positions: Sequence[int]
    ) -> list[TokenOutput]:
        """One token per row of logits; `positions` are those of the tokens to choose."""
        if self._sampler is None:
            return sample(result.logits, specs, positions, result.best.tolist())
        tokens, details, num_broken = self._sampler(result, specs, positions)
        outputs = [TokenOutput(token) for token in tokens]
        for row, logprob, top_logprobs in details:
            outputs[row] = TokenOutput(tokens[row], logprob, top_logprobs)
        if num_broken:
            logger.error("NaN or +inf in the logits of %d of %d rows", num_broken, len(specs))
        return outputs
