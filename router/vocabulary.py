"""The model's vocabulary as grammars need it: read when the first request asks, on that request's thread."""

from __future__ import annotations

import threading

from cluster.grammar import Grammars
from cluster.tokenizer import Tokenizer


class LazyGrammars:
    """Call it for the grammars; safe from several threads, of which one reads and the others wait."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._grammars: Grammars | None = None
        self._lock = threading.Lock()

    def __call__(self) -> Grammars:
        """Raises:
        ModelError: the model has no end-of-text token.
        """
        with self._lock:
            if self._grammars is None:
                self._grammars = Grammars(self._tokenizer)
            return self._grammars
