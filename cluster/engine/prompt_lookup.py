"""Drafts by looking back: what followed the last time a request's latest tokens stood in its own history.

1. `PromptLookup` keeps prompt and answer, and where each pair and each triple of tokens was last followed by
   something. `append` and `find` take the same time however long the history is. `catch_up` takes in what was
   there at first, a part at a time: a long prompt at once would hold up a step. Of a very long one, only the
   newest part.
2. `find` says what the latest tokens repeat: the passage that is being copied already, as long as it goes on
   matching; else what the latest triple repeats, else the latest pair. A longer match is a better one.
3. `draft` continues that passage. One that reaches the end of the history is a loop, and goes on as one.

Whoever drafts finds out whether the tokens are right (`cluster.engine.drafts`): nothing here decides a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

MOST_MATCHED: Final = 8  # longer matches are not told apart
MOST_INDEXED: Final = 32_768  # of the tokens that are there at first: some 9 MB


class Match(NamedTuple):
    source: int  # where in the history the passage goes on
    length: int  # how many of the latest tokens it repeats, 2 to `MOST_MATCHED`


class PromptLookup:
    """Of one request."""

    __slots__ = ("_copied", "_end", "_pairs", "_source", "_triples", "tokens")

    def __init__(self, tokens: Iterable[int]) -> None:
        """Nothing is found before `catch_up`."""
        self.tokens = history = list(tokens)
        self._pairs: dict[tuple[int, int], int] = {}  # the end of a pair that something follows, its last one
        self._triples: dict[tuple[int, int, int], int] = {}
        self._end = max(2, len(history) - MOST_INDEXED)  # the next end to take in
        self._source = -1  # the token that was copied last came from before it; -1: none was
        self._copied = 0  # so many in a row

    def catch_up(self, most: int) -> bool:
        """Take in `most` more tokens of the history at most; whether all of it is."""
        history, begin = self.tokens, self._end
        end = min(len(history), begin + most)
        if begin < end:
            ends = range(begin, end)
            one, two = history[begin - 2 : end - 2], history[begin - 1 : end - 1]
            self._pairs.update(zip(zip(one, two, strict=True), ends, strict=True))
            begin = max(begin, 3)
            parts = [history[begin - back : end - back] for back in (3, 2, 1)]
            self._triples.update(zip(zip(*parts, strict=True), ends[begin - self._end :], strict=True))
            self._end = end
        return self._end >= len(history)

    def append(self, token: int) -> None:
        history = self.tokens
        end = len(history)
        if end == self._end:  # else `catch_up` takes it in
            self._end += 1
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
