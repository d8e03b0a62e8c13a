"""Token ids to text while they arrive.

1. Each id becomes the bytes its token stands for (special tokens none, when they are skipped).
2. Bytes go through an incremental UTF-8 decoder, which keeps an unfinished character until it is complete: a
   stream never shows half a code point, nor a U+FFFD for one that a later token completes.
3. At the end an unfinished character becomes one U+FFFD. The text of a stream and the text of the whole are
   the same by construction: `Tokenizer.decode` is this class fed once.

Work per token is constant.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class TokenSource(Protocol):
    """The part of a tokenizer that detokenizing needs."""

    @property
    def num_leading_spaces(self) -> int:
        """Spaces dropped at the start of a text (sentencepiece writes one before the first word)."""
        ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...

    def plain_text(self, token_id: int) -> str | None:
        """Of an ordinary token made of whole characters; None for every other."""
        ...


class Detokenizer:
    """One text being read. `at_start=False` says the text continues another one (a completion of a prompt),
    so a leading space that sentencepiece style tokenizers drop at the start of a text is part of it."""

    def __init__(
        self, tokenizer: TokenSource, *, skip_special_tokens: bool = True, at_start: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_between_characters = True
        self._spaces_to_drop = tokenizer.num_leading_spaces if at_start else 0

    def push_one(self, token_id: int) -> str:
        """As `push` of one token. Most are whole characters, whose text is remembered."""
        text = self._tokenizer.plain_text(token_id) if self._is_between_characters else None
        if text is None:
            return self.push((token_id,))
        return self._drop_leading_spaces(text) if self._spaces_to_drop else text

    def push(self, token_ids: Sequence[int]) -> str:
        """The text these tokens complete; empty while a character is unfinished."""
        tokenizer = self._tokenizer
        visible = (
            tokenizer.token_bytes(token_id)
            for token_id in token_ids
            if not (self._skip_special_tokens and tokenizer.is_special(token_id))
        )
        text = self._utf8.decode(b"".join(visible))
        self._is_between_characters = not self._utf8.getstate()[0]
        return self._drop_leading_spaces(text)

    def finish(self) -> str:
        """The tail: one U+FFFD if the last character never became complete, else nothing."""
        return self._drop_leading_spaces(self._utf8.decode(b"", True))

    def _drop_leading_spaces(self, text: str) -> str:
        while self._spaces_to_drop and text:
            if text[0] != " ":
                self._spaces_to_drop = 0
                break
            self._spaces_to_drop -= 1
            text = text[1:]
        return text
