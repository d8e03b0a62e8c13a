"""Where the requests of a worker stand in their grammars, and the masks that follow from it.

1. The vocabulary is read on a thread of its own while the worker starts: requests without a grammar, which is
   most of them, never wait for it.
2. A grammar is compiled there too, while the step that needs it first is being computed.
3. Before the tokens of a step are chosen, `apply` lays each grammar's mask on its row of logits: what may not
   come next is -inf. What a row's own parameters do to it comes after that.
4. A state follows its request's `output_ids`, which only grow. On another worker it is made anew from the
   whole history, and is the same.

Grammars give up by counts, not by clocks (`cluster.grammar`). Such a row has no token to choose.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.engine.batch import SampleSpec
from cluster.errors import BatonError
from kernels.ops import MAXIMA_BLOCK, StepResult

if TYPE_CHECKING:
    from cluster.grammar import Grammars, GrammarState

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class MaskedRows:
    """`raw`: logits before the mask, where log-probabilities are asked for. `failed`: rows without token."""

    raw: dict[int, torch.Tensor]
    failed: list[int]


class GrammarMasks:
    """One thread at a time."""

    def __init__(self, open_grammars: Callable[[], Grammars]) -> None:
        """`open_grammars` runs on another thread, at once."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._grammars: Future[Grammars] = self._pool.submit(open_grammars)

    def prepare(self, spec: SampleSpec) -> None:
        """Compile what this request needs, on another thread, while its step is computed."""
        if spec.notes.opening is None:
            spec.notes.opening = self._pool.submit(self._open, spec.params.grammar)

    def apply(self, result: StepResult, specs: Sequence[SampleSpec]) -> MaskedRows:
        """Mask the rows of `result`, in place, `best` and `maxima` included."""
        masked = MaskedRows({}, [])
        vocab_size = result.logits.shape[1]
        for row, spec in enumerate(specs):
            if not spec.params.grammar:
                continue
            allowed = self._allowed(spec, vocab_size)
            if allowed is None:
                masked.failed.append(row)
                continue
            if spec.params.num_logprobs is not None:
                masked.raw[row] = result.logits[row].clone()
            with torch.inference_mode():  # as the tensors may be, whatever mode the caller is in
                _lay(result, row, torch.from_numpy(~allowed))
        return masked

    def _allowed(self, spec: SampleSpec, vocab_size: int) -> NDArray[np.bool_] | None:
        self.prepare(spec)
        assert spec.notes.opening is not None
        try:
            state = spec.notes.opening.result()
        except (BatonError, ImportError) as error:  # this row's trouble, not that of the whole step
            logger.error("no grammar can be followed here: %s", error)
            return None
        state.follow(spec.output_ids)
        allowed = state.allowed(vocab_size)
        if allowed is None:
            logger.warning("a grammar gave up after %d tokens", len(spec.output_ids))
        return allowed

    def _open(self, grammar: str) -> GrammarState:
        return self._grammars.result().open(grammar)  # read before, on this thread


def _lay(result: StepResult, row: int, forbidden: torch.Tensor) -> None:
    """A row as the forward pass would have left it, had it given these tokens -inf."""
    logits = result.logits[row]
    logits.masked_fill_(forbidden.to(logits.device), -torch.inf)
    result.best[row] = logits.argmax()
    if result.maxima is not None:
        num_blocks = result.maxima.shape[1]
        padded = torch.full((num_blocks * MAXIMA_BLOCK,), -torch.inf)
        padded[: len(logits)] = logits
        result.maxima[row] = padded.view(num_blocks, MAXIMA_BLOCK).amax(dim=1)
