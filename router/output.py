"""Generated tokens of one choice as text to show: the same pieces whether they are streamed or collected.

1. `push` takes what one delivery brought, token by token: its text through the detokenizer (never half a
   character), then through the stop matcher (never the head of a stop string).
2. A stop string that completes ends the choice at that token; later tokens of the delivery do not count.
   Stop strings count only from the `min_tokens`-th token on, like EOS and stop ids.
3. The token that ended generation (EOS or a stop id) is counted but not shown, unless the stop is included.
4. Log-probabilities and ids are kept per token when asked for, and let go together with the text they
   belong to: what is held back for a stop string is held back there too. One entry per counted token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from cluster.detokenizer import Detokenizer, TokenSource
from cluster.sampling import FinishReason, TokenOutput
from cluster.stop_strings import StopMatcher


@dataclass(frozen=True, slots=True)
class TextRules:
    """How the tokens of a choice become text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    prompt_only: bool = False  # the one token that was generated is not wanted


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """`text_offset`: characters of the choice's text before this token. `shown`: it contributes text."""

    output: TokenOutput
    text_offset: int
    shown: bool


class Piece(msgspec.Struct, frozen=True, gc=False):
    """What may be shown now; `finish_reason` is set on the last piece."""

    text: str
    entries: tuple[TokenEntry, ...]
    finish_reason: FinishReason | None


class ChoiceOutput:
    """The text of one choice as it grows. `keep_entries`: log-probabilities or ids are wanted."""

    def __init__(self, tokenizer: TokenSource, rules: TextRules, *, keep_entries: bool) -> None:
        self._tokenizer = tokenizer
        self._rules = rules
        self._keep_entries = keep_entries
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=rules.skip_special_tokens, at_start=False
        )
        self._matcher = StopMatcher(rules.stop, rules.include_stop)
        self._plain = not rules.stop and not keep_entries
        self._held: deque[tuple[TokenEntry, int]] = deque()  # entry, characters decided with it
        self._num_decoded = 0  # characters out of the detokenizer
        self._num_shown = 0  # characters out of the stop matcher
        self.num_tokens = 0

    def push(self, outputs: Sequence[TokenOutput], finish_reason: FinishReason | None) -> Piece:
        """The next tokens, in order; `finish_reason` if the last of them ends generation."""
        if self._rules.prompt_only:
            return Piece("", (), FinishReason.LENGTH)
        if self._plain and finish_reason is None:
            self.num_tokens += len(outputs)
            if len(outputs) == 1:
                return Piece(self._detokenizer.push_one(outputs[0].token_id), (), None)
            return Piece(self._detokenizer.push([output.token_id for output in outputs]), (), None)
        parts: list[str] = []
        reason: FinishReason | None = None
        for index, output in enumerate(outputs):
            is_last = index == len(outputs) - 1
            hidden = is_last and finish_reason is FinishReason.STOP and not self._rules.include_stop
            if self._push_token(output, hidden, parts):
                reason = FinishReason.STOP
                break
        if reason is None and finish_reason is not None:
            reason = self._finish(finish_reason, parts)
        text = "".join(parts)
        self._num_shown += len(text)
        return Piece(text, self._decided(everything=reason is not None), reason)

    def _push_token(self, output: TokenOutput, hidden: bool, parts: list[str]) -> bool:
        """Add one token's text to `parts`; whether it completed a stop string."""
        self.num_tokens += 1
        offset = self._num_decoded
        text = "" if hidden else self._detokenizer.push_one(output.token_id)
        self._num_decoded += len(text)
        if self._keep_entries:
            special = self._rules.skip_special_tokens and self._tokenizer.is_special(output.token_id)
            shown = not hidden and not special
            # A token that completes no character is decided together with the one that does.
            end = self._num_decoded if text or not shown else offset + 1
            self._held.append((TokenEntry(output, offset, shown), end))
        if self.num_tokens < self._rules.min_tokens:
            parts.append(text)
            return False
        visible, matched = self._matcher.push(text)
        parts.append(visible)
        return matched

    def _finish(self, reason: FinishReason, parts: list[str]) -> FinishReason:
        visible, matched = self._matcher.push(self._detokenizer.finish())
        parts.append(visible)
        parts.append(self._matcher.finish())
        return FinishReason.STOP if matched else reason

    def _decided(self, *, everything: bool) -> tuple[TokenEntry, ...]:
        entries: list[TokenEntry] = []
        while self._held and (everything or self._held[0][1] <= self._num_shown):
            entries.append(self._held.popleft()[0])
        return tuple(entries)
