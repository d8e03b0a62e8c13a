"""The wire format of `/v1/completions` replies: a choice with `text` per prompt, logprobs in columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from cluster.detokenizer import TokenSource
from cluster.sampling import FinishReason, TokenOutput
from router.delivery import RequestSummary
from router.output import Piece, TokenEntry
from router.reply import (
    Choice,
    ChunkFrame,
    ReplyOptions,
    Usage,
    finite,
    timings_field,
    timings_json,
    token_text,
)


class CompletionFormat:
    """One text reply; implements `router.reply.ReplyFormat`."""

    def __init__(
        self,
        reply_id: str,
        created: int,
        model: str,
        tokenizer: TokenSource,
        options: ReplyOptions,
        prompt_ids: tuple[int, ...],
    ) -> None:
        self._fields = {"id": reply_id, "object": "text_completion", "created": created, "model": model}
        self._frame = ChunkFrame.of(reply_id, "text_completion", created, model)
        self._tokenizer = tokenizer
        self._options = options
        self._unsent_prompt_ids: tuple[int, ...] | None = prompt_ids if options.return_token_ids else None

    def opening(self) -> bytes:
        return b""

    def delta(self, piece: Piece, usage: Usage | None) -> bytes:
        logprobs = b"null"
        extra = b""
        if self._options.num_logprobs is not None:
            logprobs = orjson.dumps(self._logprobs(piece.entries))
        if self._options.return_token_ids:
            extra = b',"token_ids":' + orjson.dumps([entry.output.token_id for entry in piece.entries])
            if self._unsent_prompt_ids is not None:  # with the first chunk only
                extra += b',"prompt_token_ids":' + orjson.dumps(self._unsent_prompt_ids)
                self._unsent_prompt_ids = None
        fields = b'"text":%b,"logprobs":%b,"finish_reason":null%b' % (
            orjson.dumps(piece.text),
            logprobs,
            extra,
        )
        return self._frame.choice(fields, b',"usage":' + orjson.dumps(usage.as_json()) if usage else b"")

    def closing(self, reason: FinishReason, usage: Usage, summary: RequestSummary) -> bytes:
        fields = b'"text":"","logprobs":null,"finish_reason":"%b"' % reason.value.encode()
        return self._frame.closing(fields, self._options, usage, timings_field(self._options, summary))

    def body(self, choices: Sequence[Choice], usage: Usage, summaries: Sequence[RequestSummary]) -> bytes:
        """With several prompts, `timings` are in each choice."""
        reply: dict[str, Any] = {
            **self._fields,
            "choices": [self._choice(choice) for choice in choices],
            "usage": usage.as_json(),
        }
        if self._options.timings:
            if len(summaries) == 1:
                reply["timings"] = timings_json(summaries[0])
            else:
                for choice, summary in zip(reply["choices"], summaries, strict=True):
                    choice["timings"] = timings_json(summary)
        return orjson.dumps(reply)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        whole = choice.whole
        fields: dict[str, Any] = {
            "index": choice.index,
            "text": whole.text,
            "logprobs": None,
            "finish_reason": whole.finish_reason.value if whole.finish_reason else None,
        }
        if self._options.num_logprobs is not None:
            fields["logprobs"] = self._logprobs(whole.entries)
        if self._options.return_token_ids:
            fields["token_ids"] = [entry.output.token_id for entry in whole.entries]
            fields["prompt_token_ids"] = choice.prompt_ids
        return fields

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        """`top_logprobs` is null when no alternatives were asked for; else the chosen token is in it."""
        alternatives = None
        if self._options.num_logprobs:
            alternatives = [self._alternatives(entry.output) for entry in entries]
        return {
            "tokens": [token_text(self._tokenizer, entry.output.token_id) for entry in entries],
            "token_logprobs": [finite(entry.output.logprob) for entry in entries],
            "top_logprobs": alternatives,
            "text_offset": [entry.text_offset for entry in entries],
        }

    def _alternatives(self, output: TokenOutput) -> dict[str, float]:
        """Different tokens with the same text keep an entry each, under `token_id:<id>`."""
        logprobs: dict[str, float] = {}
        candidates = list(output.top_logprobs)
        if all(token_id != output.token_id for token_id, _ in candidates):
            candidates.append((output.token_id, finite(output.logprob)))
        for token_id, logprob in candidates:
            text = token_text(self._tokenizer, token_id)
            logprobs[text if text not in logprobs else f"token_id:{token_id}"] = finite(logprob)
        return logprobs
