"""`/tokenize` and `/detokenize`: the same ids that a generation request would run with, in vLLM's shape."""

from __future__ import annotations

import asyncio
from typing import Any

from cluster.errors import InvalidRequest
from router.endpoint import Gateway
from router.reply import token_text
from router.schema import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
    parse_json,
    parse_request,
)


async def tokenize(gateway: Gateway, body: bytes) -> dict[str, Any]:
    """`{"prompt": text}` or `{"messages": […]}` → `{"count", "max_model_len", "tokens", "token_strs"}`.

    Raises:
        RequestError: the request is not valid.
    """
    return await _maybe_on_thread(gateway, _tokenize, body)


async def detokenize(gateway: Gateway, body: bytes) -> dict[str, Any]:
    """`{"tokens": ids}` → `{"prompt": text}`.

    Raises:
        RequestError: the request is not valid.
    """
    return await _maybe_on_thread(gateway, _detokenize, body)


async def _maybe_on_thread(gateway: Gateway, work: Any, body: bytes) -> dict[str, Any]:
    if len(body) > gateway.limits.offload_bytes:
        result: dict[str, Any] = await asyncio.to_thread(work, gateway, body)
        return result
    result = work(gateway, body)
    return result


def _tokenize(gateway: Gateway, body: bytes) -> dict[str, Any]:
    raw = parse_json(body)
    gateway.check_model(raw.get("model"))
    builder = gateway.job_builder()
    if raw.get("messages") is not None:
        chat, _ = parse_request(TokenizeChatRequest, raw, builder.limits)
        token_ids = builder.render(chat, chat.add_special_tokens, builder.plan_tools(chat))
        with_texts = chat.return_token_strs
    else:
        text, _ = parse_request(TokenizeTextRequest, raw, builder.limits)
        token_ids = builder.encode(text.prompt, "prompt", text.add_special_tokens)
        with_texts = text.return_token_strs
    texts = [token_text(gateway.tokenizer, token_id) for token_id in token_ids] if with_texts else None
    return {
        "count": len(token_ids),
        "max_model_len": builder.max_model_len,
        "tokens": token_ids,
        "token_strs": texts,
    }


def _detokenize(gateway: Gateway, body: bytes) -> dict[str, Any]:
    raw = parse_json(body)
    gateway.check_model(raw.get("model"))
    request, _ = parse_request(DetokenizeRequest, raw, gateway.limits.request)
    for index, token_id in enumerate(request.tokens):
        if token_id >= gateway.model.vocab_size:
            raise InvalidRequest(
                f"`tokens[{index}]` is not a token id: the vocabulary has {gateway.model.vocab_size} tokens.",
                param=f"tokens[{index}]",
            )
    return {"prompt": gateway.tokenizer.decode(request.tokens, skip_special_tokens=False)}
