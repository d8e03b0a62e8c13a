"""The wire format of `/v1/chat/completions` replies.

A stream is: the role chunk, sent together with the first token (so a client's time to first chunk is its time
to first token); one chunk per delivery of tokens; the finish chunk; the usage chunk if asked for; `[DONE]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from cluster.detokenizer import TokenSource
from cluster.sampling import FinishReason
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


class ChatFormat:
    """One chat reply; implements `router.reply.ReplyFormat`."""

    def __init__(
        self,
        reply_id: str,
        created: int,
        model: str,
        tokenizer: TokenSource,
        options: ReplyOptions,
        prompt_ids: tuple[int, ...],
    ) -> None:
        self._fields = {"id": reply_id, "object": "chat.completion", "created": created, "model": model}
        self._frame = ChunkFrame.of(reply_id, "chat.completion.chunk", created, model)
        self._tokenizer = tokenizer
        self._options = options
        self._prompt_ids = prompt_ids

    def opening(self) -> bytes:
        extra = b""
        if self._options.return_token_ids:
            extra = b',"prompt_token_ids":' + orjson.dumps(self._prompt_ids)
        return self._frame.choice(
            b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null', extra
        )

    def delta(self, piece: Piece, usage: Usage | None) -> bytes:
        logprobs = b"null"
        extra = b""
        if self._options.num_logprobs is not None:
            logprobs = orjson.dumps(self._logprobs(piece.entries))
        if self._options.return_token_ids:
            extra = b',"token_ids":' + orjson.dumps([entry.output.token_id for entry in piece.entries])
        fields = b'"delta":{"content":%b},"logprobs":%b,"finish_reason":null%b' % (
            orjson.dumps(piece.text),
            logprobs,
            extra,
        )
        return self._frame.choice(fields, b',"usage":' + orjson.dumps(usage.as_json()) if usage else b"")

    def closing(self, reason: FinishReason, usage: Usage, summary: RequestSummary) -> bytes:
        fields = b'"delta":{},"logprobs":null,"finish_reason":"%b"' % reason.value.encode()
        return self._frame.closing(fields, self._options, usage, timings_field(self._options, summary))

    def body(self, choices: Sequence[Choice], usage: Usage, summaries: Sequence[RequestSummary]) -> bytes:
        reply: dict[str, Any] = {
            **self._fields,
            "choices": [self._choice(choice) for choice in choices],
            "usage": usage.as_json(),
        }
        if self._options.return_token_ids:
            reply["prompt_token_ids"] = self._prompt_ids
        if self._options.timings:
            reply["timings"] = timings_json(summaries[0])
        return orjson.dumps(reply)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        whole = choice.whole
        fields: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", "content": whole.text, "refusal": None},
            "logprobs": None,
            "finish_reason": whole.finish_reason.value if whole.finish_reason else None,
        }
        if self._options.num_logprobs is not None:
            fields["logprobs"] = self._logprobs(whole.entries)
        if self._options.return_token_ids:
            fields["token_ids"] = [entry.output.token_id for entry in whole.entries]
        return fields

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def _entry(self, entry: TokenEntry) -> dict[str, Any]:
        """`bytes` is null for a token that adds nothing to the content, like EOS: the `bytes` of all entries
        joined are the content's."""
        output = entry.output
        shown = self._alternative(output.token_id, output.logprob)
        if not entry.shown:
            shown["bytes"] = None
        shown["top_logprobs"] = [
            self._alternative(token_id, logprob) for token_id, logprob in output.top_logprobs
        ]
        return shown

    def _alternative(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": token_text(self._tokenizer, token_id),
            "logprob": finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }
