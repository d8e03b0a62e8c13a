"""`/tokenize` and `/detokenize`: the same ids that a generation request would run with, in vLLM's shape.

Each counts as a request of its key, of no tokens (`within_limits`): reading a long text is work, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import orjson

from cluster.errors import InvalidRequest
from router.api_keys import API_KEY, ApiKey
from router.asgi import Receive, Scope, read_body, require_json
from router.gateway import Gateway
from router.prompt_builder import plan_tools
from router.quotas.headers import Headers
from router.quotas.limits import Demand
from router.reply import token_text
from router.schema import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
    field_names,
    parse_json,
    parse_request,
)


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """`body`: JSON. `ignored`: request fields without effect; `served`: those that would have one. `limits`:
    headers that tell where its key's limits stand."""

    body: bytes
    ignored: tuple[str, ...]
    served: frozenset[str]
    limits: Headers = ()


async def within_limits(
    gateway: Gateway, scope: Scope, receive: Receive, work: Callable[[Gateway, bytes], Awaitable[TextAnswer]]
) -> TextAnswer:
    """`work` on the request's body, if its key may send a request now. One that is not valid costs nothing.

    Raises:
        UnsupportedMediaType: it is not declared as JSON.
        RequestError: it is not valid, or beyond its key's limits.
    """
    require_json(scope)
    key: ApiKey | None = scope.get(API_KEY)
    gateway.quotas.look(key)
    with gateway.bodies.hold() as held:
        body = await read_body(scope, receive, gateway.limits.max_body_bytes, held.add)
        admission = await gateway.quotas.take(key, Demand(0, 0))
        num_tokens = None  # it counts nowhere, unless it is answered
        try:
            answer = await work(gateway, body)
            num_tokens = 0
        finally:
            admission.settle(num_tokens)
    return replace(answer, limits=admission.headers())


async def tokenize(gateway: Gateway, body: bytes) -> TextAnswer:
    """`{"prompt": text}` or `{"messages": […]}` → `{"count", "max_model_len", "tokens", "token_strs"}`.

    Raises:
        RequestError: the request is not valid.
    """
    return await _maybe_on_thread(gateway, _tokenize, body)


async def detokenize(gateway: Gateway, body: bytes) -> TextAnswer:
    """`{"tokens": ids}` → `{"prompt": text}`.

    Raises:
        RequestError: the request is not valid.
    """
    return await _maybe_on_thread(gateway, _detokenize, body)


async def _maybe_on_thread(
    gateway: Gateway, work: Callable[[Gateway, bytes], TextAnswer], body: bytes
) -> TextAnswer:
    if len(body) > gateway.limits.offload_bytes:
        return await gateway.aside.run_sized(len(body), work, gateway, body)
    return work(gateway, body)


def _tokenize(gateway: Gateway, body: bytes) -> TextAnswer:
    raw = parse_json(body, gateway.limits.request.max_json_depth)
    gateway.check_model(raw.get("model"))
    builder = gateway.job_builder()
    if raw.get("messages") is not None:
        chat, ignored = parse_request(TokenizeChatRequest, raw, builder.limits)
        token_ids = builder.prompts.render(chat, chat.add_special_tokens, plan_tools(chat))
        with_texts, served = chat.return_token_strs, field_names(TokenizeChatRequest)
    else:
        text, ignored = parse_request(TokenizeTextRequest, raw, builder.limits)
        token_ids = builder.prompts.encode(text.prompt, "prompt", text.add_special_tokens)
        with_texts, served = text.return_token_strs, field_names(TokenizeTextRequest)
    texts = [token_text(gateway.tokenizer, token_id) for token_id in token_ids] if with_texts else None
    answer = {
        "count": len(token_ids),
        "max_model_len": builder.max_model_len,
        "tokens": token_ids,
        "token_strs": texts,
    }
    return TextAnswer(orjson.dumps(answer), ignored, served)


def _detokenize(gateway: Gateway, body: bytes) -> TextAnswer:
    raw = parse_json(body, gateway.limits.request.max_json_depth)
    gateway.check_model(raw.get("model"))
    request, ignored = parse_request(DetokenizeRequest, raw, gateway.limits.request)
    for index, token_id in enumerate(request.tokens):
        if token_id >= gateway.model.vocab_size:
            raise InvalidRequest(
                f"`tokens[{index}]` is not a token id: the vocabulary has {gateway.model.vocab_size} tokens.",
                param=f"tokens[{index}]",
            )
    text = gateway.tokenizer.decode(request.tokens, skip_special_tokens=False)
    return TextAnswer(orjson.dumps({"prompt": text}), ignored, field_names(DetokenizeRequest))
