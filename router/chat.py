"""The wire format of `/v1/chat/completions` replies.

A stream is, for each choice: the role chunk, sent together with the first token (so a client's time to first
chunk is its time to first token); one chunk per delivery of tokens; the finish chunk. Then the usage chunk if
asked for, and `[DONE]`. Where tools are offered, the text goes through a `ToolParser` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from cluster.detokenizer import TokenSource
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
from router.tool_formats import ToolFormat
from router.tool_parser import CallDelta, ParsedText, ToolParser


@dataclass(frozen=True, slots=True)
class ToolReading:
    """How calls are found in an answer: the model's format, and the names that are offered. `calls_only`:
    calls are required, so there is nothing else. `most_calls`: further ones are left out; None: none is."""

    style: ToolFormat
    names: frozenset[str]
    calls_only: bool = False
    most_calls: int | None = None

    def parser(self) -> ToolParser:
        return ToolParser(self.style, self.names, calls_only=self.calls_only, most_calls=self.most_calls)


class ChatFormat:
    """One chat reply; implements `router.reply.ReplyFormat`."""

    def __init__(
        self,
        reply_id: str,
        created: int,
        model: str,
        tokenizer: TokenSource,
        options: ReplyOptions,
        plans: Sequence[ChoicePlan],
        tools: ToolReading | None = None,
    ) -> None:
        self._id = reply_id
        self._fields = {"id": reply_id, "object": "chat.completion", "created": created, "model": model}
        self._frame = ChunkFrame.of(reply_id, "chat.completion.chunk", created, model)
        self._tokenizer = tokenizer
        self._options = options
        self._plans = plans
        self._tools = tools
        self._parsers = [tools.parser() for _ in plans] if tools is not None else []
        before, after = b'"delta":{"content":', b'},"logprobs":null,"finish_reason":null'
        self._around_text = [self._frame.around(plan.index, before, after) for plan in plans]
        self._is_plain = options.is_plain and tools is None

    def opening(self, index: int, prompt_scores: Sequence[PromptScore]) -> bytes:
        extra = b""
        if self._options.return_token_ids:
            extra = b',"prompt_token_ids":' + orjson.dumps(self._plans[index].prompt_ids)
        role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        chunk = self._frame.choice(index, role, extra)
        lead = self._plans[index].lead
        return chunk if not lead else chunk + self._chunk(index, b'{"content":%b}' % orjson.dumps(lead))

    def delta(self, index: int, piece: Piece, usage: Usage | None) -> bytes:
        if self._is_plain:
            before, after = self._around_text[index]
            return before + orjson.dumps(piece.text) + after
        shown = b'{"content":%b}'
        if self._parsers:
            parsed = self._parsers[index].push(piece.text)
            shown = self._parsed(index, parsed)
            if shown == b"{}" and not piece.entries:
                return b""
        else:
            shown %= orjson.dumps(piece.text)
        logprobs = b"null"
        extra = b""
        if self._options.num_logprobs is not None:
            logprobs = orjson.dumps(self._logprobs(piece.entries))
        if self._options.return_token_ids:
            extra = b',"token_ids":' + orjson.dumps([entry.output.token_id for entry in piece.entries])
        fields = b'"delta":%b,"logprobs":%b,"finish_reason":null%b' % (shown, logprobs, extra)
        padding = obfuscation_field(self._options, len(shown) + len(logprobs) + len(extra))
        return self._frame.choice(index, fields, usage_field(usage) + padding)

    def finish(self, index: int, reason: FinishReason, usage: Usage | None, timings: bytes) -> bytes:
        last, name = b"", reason.value
        if self._parsers:
            parser = self._parsers[index]
            shown = self._parsed(index, parser.finish())
            last = self._chunk(index, shown) if shown != b"{}" else b""
            name = _finish_name(reason, parser)
        fields = b'"delta":{},"logprobs":null,"finish_reason":"%b"' % name.encode()
        return last + self._frame.choice(index, fields, usage_field(usage) + timings)

    def ending(self, usage: Usage, timings: bytes) -> bytes:
        return self._frame.ending(self._options, usage, timings)

    def body(self, choices: Sequence[Choice], usage: Usage, summaries: Sequence[RequestSummary]) -> bytes:
        reply: dict[str, Any] = {
            **self._fields,
            "choices": [self._choice(choice) for choice in choices],
            "usage": usage.as_json(),
        }
        if self._options.return_token_ids:
            reply["prompt_token_ids"] = choices[0].plan.prompt_ids
        if self._options.num_prompt_logprobs is not None:
            first = choices[0]
            reply["prompt_logprobs"] = prompt_logprobs_json(
                self._tokenizer, first.plan.prompt_ids, first.prompt_scores
            )
        if self._options.timings:
            add_timings(reply, summaries)
        return orjson.dumps(reply)

    # ---- parts -----------------------------------------------------------------------------------

    def _choice(self, choice: Choice) -> dict[str, Any]:
        whole, index = choice.whole, choice.plan.index
        assert whole.finish_reason is not None
        message: dict[str, Any] = {"role": "assistant", "content": whole.text, "refusal": None}
        name = whole.finish_reason.value
        if self._tools is not None:
            parser = self._tools.parser()
            pushed, rest = parser.push(whole.text), parser.finish()
            content, calls = pushed.content + rest.content, [*pushed.calls, *rest.calls]
            name = _finish_name(whole.finish_reason, parser)
            if calls or self._tools.calls_only:
                message["content"] = content or None
                message["tool_calls"] = self._whole_calls(index, calls)
        if choice.plan.lead:
            message["content"] = choice.plan.lead + (message["content"] or "")
        fields: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": name,
        }
        if self._options.num_logprobs is not None:
            fields["logprobs"] = self._logprobs(whole.entries)
        if self._options.return_token_ids:
            fields["token_ids"] = [entry.output.token_id for entry in whole.entries]
        return fields

    def _chunk(self, index: int, delta: bytes) -> bytes:
        fields = b'"delta":%b,"logprobs":null,"finish_reason":null' % delta
        return self._frame.choice(index, fields, obfuscation_field(self._options, len(delta)))

    def _parsed(self, index: int, parsed: ParsedText) -> bytes:
        delta: dict[str, Any] = {}
        if parsed.content:
            delta["content"] = parsed.content
        if parsed.calls:
            delta["tool_calls"] = [self._call_delta(index, call) for call in parsed.calls]
        return orjson.dumps(delta)

    def _call_delta(self, index: int, call: CallDelta) -> dict[str, Any]:
        function: dict[str, str] = {"arguments": call.arguments}
        if call.name is None:
            return {"index": call.index, "function": function}
        function = {"name": call.name, **function}
        return {
            "index": call.index,
            "id": self._call_id(index, call.index),
            "type": "function",
            "function": function,
        }

    def _whole_calls(self, index: int, deltas: Sequence[CallDelta]) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []
        for delta in deltas:
            if delta.name is not None:
                calls.append(
                    {
                        "id": self._call_id(index, delta.index),
                        "type": "function",
                        "function": {"name": delta.name, "arguments": ""},
                    }
                )
            calls[-1]["function"]["arguments"] += delta.arguments
        return calls

    def _call_id(self, index: int, call: int) -> str:
        """The same however the reply is sent."""
        digest = blake2b(f"{self._id}/{index}/{call}".encode(), digest_size=12).hexdigest()
        num_chars = 0 if self._tools is None else self._tools.style.id_chars
        return digest[:num_chars] if num_chars else f"call_{digest}"

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


def _finish_name(reason: FinishReason, parser: ToolParser) -> str:
    """An answer that ends by itself after whole calls ends for the sake of the calls."""
    if reason is FinishReason.STOP and parser.has_whole_calls:
        return "tool_calls"
    return reason.value
