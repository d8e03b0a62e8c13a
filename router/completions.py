"""The wire format of `/v1/completions` replies: a choice with `text` per answer, logprobs in columns.

With `echo` a choice begins with its prompt: its text, and in the columns its tokens, of which the first has
no log-probability. In a stream the prompt is a chunk of its own, before the first delta.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from cluster.detokenizer import Detokenizer, TokenSource
from cluster.sampling import FinishReason, PromptScore
from router.delivery import RequestSummary
from router.output import Piece, TokenEntry
from router.reply import (
    Choice,
    ChoicePlan,
    ChunkFrame,
    ReplyOptions,
    Usage,
    add_timings,
    finite,
    obfuscation_field,
    prompt_logprobs_json,
    token_text,
    usage_field,
)


@dataclass(frozen=True, slots=True)
class _Column:
    """One token of the columns. `logprob` None: there is none, as for the first token of a prompt."""

    token_id: int
    logprob: float | None
    best: tuple[tuple[int, float], ...]
    text_offset: int


class CompletionFormat:
    """One text reply; implements `router.reply.ReplyFormat`."""

    def __init__(
        self,
        reply_id: str,
        created: int,
        model: str,
        tokenizer: TokenSource,
        options: ReplyOptions,
        plans: Sequence[ChoicePlan],
    ) -> None:
        self._fields = {"id": reply_id, "object": "text_completion", "created": created, "model": model}
        self._frame = ChunkFrame.of(reply_id, "text_completion", created, model)
        self._tokenizer = tokenizer
        self._options = options
        self._plans = plans
        self._is_plain = options.is_plain
        after = b',"logprobs":null,"finish_reason":null'
        self._around_text = [self._frame.around(plan.index, b'"text":', after) for plan in plans]
        self._unsent_prompts = {plan.index for plan in plans} if options.return_token_ids else set()

    def opening(self, index: int, prompt_scores: Sequence[PromptScore]) -> bytes:
        if not self._options.echo:
            return b""
        plan = self._plans[index]
        logprobs = b"null"
        if self._options.num_logprobs is not None:
            logprobs = orjson.dumps(self._logprobs(self._prompt_columns(plan, prompt_scores)))
        return self._chunk(index, plan.lead, logprobs, [])

    def delta(self, index: int, piece: Piece, usage: Usage | None) -> bytes:
        if self._is_plain:
            before, after = self._around_text[index]
            return before + orjson.dumps(piece.text) + after
        logprobs = b"null"
        if self._options.num_logprobs is not None:
            logprobs = orjson.dumps(self._logprobs(self._columns(piece.entries, self._plans[index])))
        token_ids = [entry.output.token_id for entry in piece.entries]
        return self._chunk(index, piece.text, logprobs, token_ids, usage)

    def finish(self, index: int, reason: FinishReason, usage: Usage | None, timings: bytes) -> bytes:
        fields = b'"text":"","logprobs":null,"finish_reason":"%b"' % reason.value.encode()
        return self._frame.choice(index, fields, usage_field(usage) + timings)

    def ending(self, usage: Usage, timings: bytes) -> bytes:
        return self._frame.ending(self._options, usage, timings)

    def body(self, choices: Sequence[Choice], usage: Usage, summaries: Sequence[RequestSummary]) -> bytes:
        reply: dict[str, Any] = {
            **self._fields,
            "choices": [self._choice(choice) for choice in choices],
            "usage": usage.as_json(),
        }
        if self._options.timings:
            add_timings(reply, summaries)
        return orjson.dumps(reply)

    # ---- parts -----------------------------------------------------------------------------------

    def _chunk(
        self, index: int, text: str, logprobs: bytes, token_ids: Sequence[int], usage: Usage | None = None
    ) -> bytes:
        extra = b""
        if self._options.return_token_ids:
            extra = b',"token_ids":' + orjson.dumps(token_ids)
            if index in self._unsent_prompts:  # with the first chunk only
                self._unsent_prompts.discard(index)
                extra += b',"prompt_token_ids":' + orjson.dumps(self._plans[index].prompt_ids)
        shown = orjson.dumps(text)
        fields = b'"text":%b,"logprobs":%b,"finish_reason":null%b' % (shown, logprobs, extra)
        padding = obfuscation_field(self._options, len(shown) + len(logprobs) + len(extra))
        return self._frame.choice(index, fields, usage_field(usage) + padding)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        whole, plan = choice.whole, choice.plan
        fields: dict[str, Any] = {
            "index": plan.index,
            "text": plan.lead + whole.text,
            "logprobs": None,
            "finish_reason": whole.finish_reason.value if whole.finish_reason else None,
        }
        if self._options.num_logprobs is not None:
            columns = self._columns(whole.entries, plan)
            if self._options.echo:
                columns = [*self._prompt_columns(plan, choice.prompt_scores), *columns]
            fields["logprobs"] = self._logprobs(columns)
        if self._options.num_prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs_json(
                self._tokenizer, plan.prompt_ids, choice.prompt_scores
            )
        if self._options.return_token_ids:
            fields["token_ids"] = [entry.output.token_id for entry in whole.entries]
            fields["prompt_token_ids"] = plan.prompt_ids
        return fields

    def _columns(self, entries: Sequence[TokenEntry], plan: ChoicePlan) -> list[_Column]:
        start = len(plan.lead)
        return [
            _Column(
                entry.output.token_id,
                finite(entry.output.logprob),
                entry.output.top_logprobs,
                start + entry.text_offset,
            )
            for entry in entries
        ]

    def _prompt_columns(self, plan: ChoicePlan, scores: Sequence[PromptScore]) -> list[_Column]:
        detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=self._options.skip_special_tokens)
        columns: list[_Column] = []
        offset = 0
        for token_id, score in zip(plan.prompt_ids, [None, *scores], strict=True):
            if score is None:
                columns.append(_Column(token_id, None, (), offset))
            else:
                columns.append(_Column(token_id, finite(score.logprob), score.best, offset))
            offset += len(detokenizer.push((token_id,)))
        return columns

    def _logprobs(self, columns: Sequence[_Column]) -> dict[str, Any]:
        """`top_logprobs` is null when no alternatives were asked for; else the chosen token is in it."""
        alternatives = None
        if self._options.num_logprobs:
            alternatives = [None if c.logprob is None else self._alternatives(c) for c in columns]
        return {
            "tokens": [token_text(self._tokenizer, column.token_id) for column in columns],
            "token_logprobs": [column.logprob for column in columns],
            "top_logprobs": alternatives,
            "text_offset": [column.text_offset for column in columns],
        }

    def _alternatives(self, column: _Column) -> dict[str, float]:
        """Different tokens with the same text keep an entry each, under `token_id:<id>`."""
        logprobs: dict[str, float] = {}
        candidates = list(column.best)
        if all(token_id != column.token_id for token_id, _ in candidates):
            candidates.append((column.token_id, finite(column.logprob)))
        for token_id, logprob in candidates:
            text = token_text(self._tokenizer, token_id)
            logprobs[text if text not in logprobs else f"token_id:{token_id}"] = finite(logprob)
        return logprobs
