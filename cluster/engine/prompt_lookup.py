"""Drafts by looking back: what followed the last time a request's latest tokens stood in its own history.

1. `PromptLookup` keeps prompt and answer, and where each pair and each triple of tokens was last followed by
   something. `append` and `find` take the same time however long the history is.
2. `find` says what the latest tokens repeat: the passage that is being copied already, as long as it goes on
   matching; else what the latest triple repeats, else the latest pair. A longer match is a better one.
3. `draft` continues that passage. One that reaches the end of the history is a loop, and goes on as one.

Whoever drafts finds out whether the tokens are right (`cluster.engine.drafts`): nothing here decides a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Final, NamedTuple

MOST_MATCHED: Final = 8  # longer matches are not told apart


class Match(NamedTuple):
    source: int  # where in the history the passage goes on
    length: int  # how many of the latest tokens it repeats, 2 to `MOST_MATCHED`


class PromptLookup:
    """Of one request."""

    __slots__ = ("_copied", "_pairs", "_source", "_triples", "tokens")

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens = history = list(tokens)
        ends = range(2, len(history))  # of a pair that something follows; a later one replaces an earlier
        self._pairs = dict(zip(pairwise(history), ends, strict=False))
        self._triples = dict(
            zip(zip(history, history[1:], history[2:-1], strict=False), ends[1:], strict=False)
        )
        self._source = -1  # the token that was copied last came from before it; -1: none was
        self._copied = 0  # so many in a row

    def append(self, token: int) -> None:
        history = self.tokens
        end = len(history)
        if end >= 2:
            self._pairs[history[-2], history[-1]] = end
        if end >= 3:
            self._triples[history[-3], history[-2], history[-1]] = end
        if self._source >= 0:
            if history[self._source] == token:
                self._source += 1
                self._copied += 1
            else:
                self._source = -1
        history.append(token)

    def find(self) -> Match | None:
        """What the latest tokens repeat; the passage is followed from now on."""
        copied = min(self._copied, MOST_MATCHED) if self._source >= 0 else 0
        if copied == MOST_MATCHED:
            return Match(self._source, copied)
        found = self._look_up()
        if found is not None and found.length > copied:
            self._source, self._copied = found
            return found
        return Match(self._source, copied) if copied >= 2 else None

    def draft(self, match: Match, count: int) -> list[int]:
        """The `count` tokens that would follow."""
        source = match.source
        found = self.tokens[source : source + count]
        while len(found) < count:
            found += found[: count - len(found)]
        return found

    def _look_up(self) -> Match | None:
        history = self.tokens
        if len(history) < 2:
            return None
        source = self._triples.get((history[-3], history[-2], history[-1])) if len(history) >= 3 else None
        if source is None:
            source = self._pairs.get((history[-2], history[-1]))
            return None if source is None else Match(source, 2)
        length, most = 3, min(MOST_MATCHED, source)
        while length < most and history[source - length - 1] == history[-length - 1]:
            length += 1
        return Match(source, length)
