"""Questions to the oracle and to the pair, and what of their answers must be equal."""

from __future__ import annotations

import itertools
import random
from typing import Any

from tests.support.local_cluster import LocalCluster
from tests.support.sse import strict_json

_salts = itertools.count()


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * seed + num_tokens)
    return [rng.randrange(32, 127) for _ in range(num_tokens)]


def body(num_prompt: int = 20, max_tokens: int = 12, which: int = 0, **fields: Any) -> dict[str, Any]:
    """A greedy completion that runs to its cap, unless `fields` say otherwise; `which` chooses the prompt."""
    return {
        "prompt": prompt(num_prompt, which),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    } | fields


def essence(answer: dict[str, Any]) -> tuple[Any, ...]:
    """Ids, text, reason, log-probabilities, usage: bit for bit."""
    choices = [
        (choice["token_ids"], choice["text"], choice["finish_reason"], choice["logprobs"])
        for choice in answer["choices"]
    ]
    return choices, answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]


def asked(cluster: LocalCluster, request: dict[str, Any]) -> tuple[Any, ...]:
    return essence(cluster.complete(**request))


def alone(oracle: LocalCluster, request: dict[str, Any]) -> tuple[Any, ...]:
    """The answer that is right: one engine, no company, no cache hit."""
    return asked(oracle, request | {"cache_salt": f"oracle-{next(_salts)}"})


def fresh() -> dict[str, str]:
    """A salt that no request has used: nothing of this prompt is cached anywhere."""
    return {"cache_salt": f"pair-{next(_salts)}"}


def streamed(cluster: LocalCluster, request: dict[str, Any]) -> tuple[Any, ...]:
    """As `asked`, put together from a stream, whose usage comes last."""
    request = request | {"stream": True, "stream_options": {"include_usage": True}}
    ids: list[int] = []
    text, reasons, usage = "", [], {}
    columns: dict[str, list[Any] | None] = {}
    with cluster.client() as client, client.stream("POST", "/v1/completions", json=request) as reply:
        assert reply.status_code == 200
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    for event in map(strict_json, lines):
        assert "error" not in event, event
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            ids += choice.get("token_ids") or []
            text += choice["text"]
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            for name, column in (choice["logprobs"] or {}).items():
                columns[name] = column if column is None else [*(columns.get(name) or ()), *column]
    [reason] = reasons
    return [(ids, text, reason, columns or None)], usage["prompt_tokens"], usage["completion_tokens"]
