"""The model's vocabulary as grammars need it: read on a thread while the router starts."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from cluster.errors import InvalidRequest, ModelError
from cluster.grammar import Grammars
from cluster.tokenizer import Tokenizer


class GrammarsAhead:
    """Call it for the grammars; waits while the vocabulary is still being read. Safe from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pool = ThreadPoolExecutor(1, thread_name_prefix="vocabulary")
        self._grammars: Future[Grammars] = pool.submit(Grammars, tokenizer)
        pool.shutdown(wait=False)

    def __call__(self) -> Grammars:
        """Raises:
        InvalidRequest: this model cannot be held to a format, so nothing that needs one is served.
        """
        try:
            return self._grammars.result()
        except ModelError as error:
            raise InvalidRequest(f"Formats and tools are not served: {error}.") from error
