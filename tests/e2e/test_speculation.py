"""The real model with and without speculation: the same answers to the last bit of their log-probabilities,
in fewer steps where a request repeats its own history.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.local_cluster import LocalCluster, local_cluster

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

CODE = """def total(items):
    result = 0
    for item in items:
        result = result + item.price * item.count
    return result
"""
COPY = f"Here is some code, twice:\n```\n{CODE}```\n```\n{CODE[:40]}"
LIST = "1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3,"
STORY = "The old man and the sea. The old man and the boat. The old man and the"
BODIES: list[dict[str, Any]] = [
    {"prompt": COPY, "logprobs": 2},
    {"prompt": LIST, "logprobs": 0, "stop": ["4, 1, 2, 3, 4, 1"]},
    {"prompt": STORY, "temperature": 0.7, "seed": 3, "logprobs": 3},
    {"prompt": STORY, "temperature": 1.0, "seed": 4, "top_p": 0.9, "top_k": 40, "n": 2},
    {"prompt": COPY, "repetition_penalty": 1.05, "presence_penalty": 0.1, "logprobs": 1},
    {"prompt": LIST, "temperature": 0.5, "seed": 5, "frequency_penalty": 0.2, "ignore_eos": True},
    {"prompt": COPY, "max_tokens": 7},
    {"prompt": LIST, "response_format": {"type": "json_object"}, "max_tokens": 20},
]
FIELDS = {"temperature": 0, "max_tokens": 48, "return_token_ids": True}


def choices(body: dict[str, Any]) -> Any:
    return [
        {key: choice.get(key) for key in ("text", "token_ids", "logprobs", "finish_reason")}
        for choice in body["choices"]
    ], body["usage"]["completion_tokens"]


def answers(cluster: LocalCluster, at_once: int) -> list[Any]:
    bodies = [FIELDS | body for body in BODIES]
    found = []
    for start in range(0, len(bodies), at_once):
        found += [choices(body) for body in cluster.complete_all(bodies[start : start + at_once])]
    return found


def streamed(cluster: LocalCluster, body: dict[str, Any]) -> tuple[str, list[int], int, str]:
    """Text, ids, tokens by the usage that comes last, and why it ended."""
    text, ids, usage, reason = "", [], 0, ""
    fields = FIELDS | body | {"stream": True, "stream_options": {"include_usage": True}}
    with cluster.client() as client, client.stream("POST", "/v1/completions", json=fields) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk["choices"]:
                text += choice["text"]
                ids += choice.get("token_ids") or []
                reason = choice["finish_reason"] or reason
            if chunk.get("usage"):
                usage = chunk["usage"]["completion_tokens"]
    return text, ids, usage, reason


@pytest.mark.parametrize(
    ("formats", "prefill"),
    [
        ({"dtype": "bf16"}, 1),
        ({"dtype": "fp32"}, 0),
        ({"dtype": "bf16", "quantization": "int8", "kv_dtype": "int8"}, 0),
    ],
    ids=["bf16-1+1", "fp32-colocated", "int8-colocated"],
)
def test_answers_are_those_without_speculation(formats: dict[str, Any], prefill: int) -> None:
    with local_cluster(prefill=0, speculation="off", **formats) as cluster:
        expected = answers(cluster, len(BODIES))
        assert cluster.metric("baton_spec_decode_num_draft_tokens_total") == 0
        plain = streamed(cluster, BODIES[0])
    with local_cluster(prefill=prefill, **formats) as cluster:
        assert answers(cluster, 1) == expected
        assert answers(cluster, len(BODIES)) == expected
        assert streamed(cluster, BODIES[0]) == plain
        cluster.wait_quiet()
        drafted = cluster.metric("baton_spec_decode_num_draft_tokens_total")
        right = cluster.metric("baton_spec_decode_num_accepted_tokens_total")
        assert drafted > right > 30
