"""Writes what a workload drafted: a `Draft` becomes the request's prompt or messages, of exactly the length
meant.

1. Token ids need nobody: the prompt is the segments' numbers within the id range.
2. Text is one word per token (`words`), less what the server adds; the server counts it, and the last words
   are added or removed until its count is the one meant. Segments still begin alike, since only the end
   changes.
3. A draft with text of its own (a real conversation) is taken as it is and counted.

A prompt too short for what the server adds (a template of 30 tokens, a prompt of 10) gets one word; its
`Written.input_tokens` then exceeds the draft's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from bench.load.tokenize_client import Messages, TokenizeClient
from bench.load.tokens import Segment, TokenStream, num_tokens, resize
from bench.load.words import Words, find_words
from cluster.errors import ConfigError

MAX_TRIES = 8  # counts of one text before it is given up; one or two is the rule
_SAMPLE = "time and place"


@dataclass(frozen=True, slots=True)
class Draft:
    """One request without its words. `prompt` is the whole prompt, or the message of one turn of a chat."""

    prompt: tuple[Segment, ...] | str
    output_tokens: int
    system: tuple[Segment, ...] | str | None = None  # first turn of a chat
    session: int | None = None
    turn: int = 0
    think_s: float = 0.0
    prefix_group: int | None = None


@dataclass(frozen=True, slots=True)
class Written:
    body: dict[str, Any]
    input_tokens: int | None  # as the server will count; None: known only when the chat is there


class Writer(Protocol):
    def write(self, draft: Draft) -> Written:
        """The body and the length of `draft`.

        Raises:
            ConfigError: no text of that length could be written.
            TokenizeError: the server did not count.
        """
        ...


class IdsWriter:
    """Ids in [`first`, `end`). The lists share their int objects, so a token costs 8 bytes."""

    def __init__(self, stream: TokenStream, first: int, end: int) -> None:
        self._stream = stream
        self._ids = np.array(range(first, end), dtype=object)

    def write(self, draft: Draft) -> Written:
        assert not isinstance(draft.prompt, str), "a text has no ids before the server made them"
        assert draft.system is None, "chats go to the chat endpoint"
        numbers = self._stream.numbers(draft.prompt, len(self._ids))
        return Written({"prompt": self._ids[numbers].tolist()}, len(numbers))


class TextWriter:
    """Text prompts for the completions endpoint."""

    def __init__(self, stream: TokenStream, server: TokenizeClient) -> None:
        self._server = server
        self._text = _WordText(stream, find_words(server.count_text))

    def write(self, draft: Draft) -> Written:
        if isinstance(draft.prompt, str):
            return Written({"prompt": draft.prompt}, self._server.count_text(draft.prompt))
        text, count = self._text.exact(
            draft.prompt, num_tokens(draft.prompt), self._text.overhead, self._server.count_text
        )
        return Written({"prompt": text}, count)


class ChatWriter:
    """Messages for the chat endpoint.

    `template_tokens`: what the template adds to a first message; `turn_tokens`: to each later exchange.
    """

    def __init__(self, stream: TokenStream, server: TokenizeClient) -> None:
        self._server = server
        words = find_words(lambda text: server.count_messages([_message("user", text)]))
        self._text = _WordText(stream, words)
        self.template_tokens = words.overhead
        user, assistant = _message("user", _SAMPLE), _message("assistant", _SAMPLE)
        first = server.count_messages([user])
        self._sample_tokens = first - self.template_tokens
        self.turn_tokens = server.count_messages([user, assistant, user]) - first - 2 * self._sample_tokens
        self._system_tokens: int | None = None
        self._system: dict[tuple[Segment, ...], str] = {}

    def write(self, draft: Draft) -> Written:
        if draft.turn > 0:
            text = draft.prompt if isinstance(draft.prompt, str) else self._text.text(draft.prompt)
            return Written({"messages": [_message("user", text)]}, None)
        before = self._before(draft)
        if isinstance(draft.prompt, str):
            messages = [*before, _message("user", draft.prompt)]
            return Written({"messages": messages}, self._server.count_messages(messages))
        # a chat's lengths are those of its messages, another prompt's is that of the whole
        added = self.template_tokens
        if draft.system is not None:
            assert not isinstance(draft.system, str), "a real system message goes with a real question"
            added = self.system_overhead() + num_tokens(draft.system)
        total = num_tokens(draft.prompt) + (0 if draft.session is None else added)
        text, count = self._text.exact(
            draft.prompt,
            total,
            added,
            lambda text: self._server.count_messages([*before, _message("user", text)]),
        )
        return Written({"messages": [*before, _message("user", text)]}, count)

    def system_overhead(self) -> int:
        """What the template adds to a system message and a first message."""
        if self._system_tokens is None:
            pair = [_message("system", _SAMPLE), _message("user", _SAMPLE)]
            self._system_tokens = self._server.count_messages(pair) - 2 * self._sample_tokens
        return self._system_tokens

    def _before(self, draft: Draft) -> Messages:
        if not draft.system:
            return []
        if isinstance(draft.system, str):
            return [_message("system", draft.system)]
        if draft.system not in self._system:
            self._system[draft.system] = self._text.text(draft.system)
        return [_message("system", self._system[draft.system])]


class LiteralWriter:
    """Texts as they are, for a server that counts nothing: lengths stay unknown."""

    def __init__(self, *, is_chat: bool) -> None:
        self._is_chat = is_chat

    def write(self, draft: Draft) -> Written:
        assert isinstance(draft.prompt, str)
        if not self._is_chat:
            return Written({"prompt": draft.prompt}, None)
        before = [_message("system", draft.system)] if isinstance(draft.system, str) else []
        return Written({"messages": [*before, _message("user", draft.prompt)]}, None)


class _WordText:
    """Segments as words."""

    def __init__(self, stream: TokenStream, words: Words) -> None:
        self.overhead = words.overhead
        self._stream = stream
        self._words = np.array(words.words, dtype=object)

    def text(self, segments: tuple[Segment, ...]) -> str:
        return " ".join(self._words[self._stream.numbers(segments, len(self._words))])

    def exact(
        self, segments: tuple[Segment, ...], total: int, added: int, count: Callable[[str], int]
    ) -> tuple[str, int]:
        """A text that begins as `segments` do and is `total` tokens by `count`, `added` of them not its
        own.
        """
        num_words = max(1, total - added)
        total = added + num_words
        counted = 0
        for _ in range(MAX_TRIES):
            text = self.text(resize(segments, num_words))
            counted = count(text)
            if counted == total:
                return text, counted
            num_words = max(1, num_words + total - counted)
        raise ConfigError(
            f"No text of {total} tokens could be written: after {MAX_TRIES} tries the server counts "
            f"{counted}; offer token ids on the completions endpoint instead."
        )


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}
