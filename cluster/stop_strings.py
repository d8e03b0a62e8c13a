"""Stop strings over streamed text.

1. `push` takes text as it is decoded and returns what may be shown now.
2. Text that could still be the beginning of a stop string is held back: exactly the longest suffix of what
   was seen that is a proper prefix of a stop string. It is released as soon as it cannot be one any more.
3. The stop string that completes first, reading character by character, wins; among several completing at
   the same character, the one that starts first. Everything from its start on is dropped (or, with
   `include_stop`, everything after its end). How the text was cut into pushes does not matter.
4. `finish` releases what is still held when generation ends for another reason.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """One text being watched. `stops` must not contain the empty string; with none, text passes through."""

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._automata = [_Automaton(stop) for stop in dict.fromkeys(stops)]
        self._include_stop = include_stop
        self._held = ""
        self._over = False

    @property
    def num_held(self) -> int:
        """Characters seen and not yet emitted."""
        return len(self._held)

    @property
    def matched(self) -> bool:
        return self._over

    def push(self, text: str) -> tuple[str, bool]:
        """(text to show now, whether a stop string has matched). After a match nothing more is shown."""
        if self._over:
            return "", True
        if not self._automata:
            return text, False
        seen = self._held + text
        start = len(self._held)
        for index in range(start, len(seen)):
            completed = 0  # length of the longest stop string that ends at this character
            for automaton in self._automata:
                if automaton.step(seen[index]):
                    completed = max(completed, len(automaton.stop))
            if completed:
                self._over = True
                self._held = ""
                end = index + 1
                return seen[: end if self._include_stop else end - completed], True
        num_held = max(automaton.num_matched for automaton in self._automata)
        cut = len(seen) - num_held
        self._held = seen[cut:]
        return seen[:cut], False

    def finish(self) -> str:
        """What was held back, now that no more text comes; empty after a match."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Knuth–Morris–Pratt for one stop string: how much of it the text seen so far ends with."""

    __slots__ = ("_fallback", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._fallback = [0]  # length of a prefix |-> length of its longest proper border
        border = 0
        for char in stop[1:]:
            while border and char != stop[border]:
                border = self._fallback[border - 1]
            border += char == stop[border]
            self._fallback.append(border)

    def step(self, char: str) -> bool:
        """Take one character; whether the stop string ends with it."""
        while self.num_matched and char != self.stop[self.num_matched]:
            self.num_matched = self._fallback[self.num_matched - 1]
        self.num_matched += char == self.stop[self.num_matched]
        return self.num_matched == len(self.stop)
