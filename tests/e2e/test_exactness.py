"""The one idea, through real processes and the real model: a request's tokens and log-probabilities are
bit-identical whatever happens around it.

The oracle is each request alone on a colocated server: no transfer, no companions, no prefix cache hit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.local_cluster import LocalCluster, local_cluster

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(400)]


def _prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 40000) for _ in range(num_tokens)]


def _body(**fields: Any) -> dict[str, Any]:
    return {"temperature": 0, "logprobs": 3, "ignore_eos": True, "return_token_ids": True} | fields


PROBES = [
    _body(prompt=_prompt(1, 5), max_tokens=40),
    _body(prompt=_prompt(2, 64), max_tokens=24),  # a whole number of blocks
    _body(prompt=_prompt(3, 65), max_tokens=24, temperature=1.0, seed=7),
    _body(prompt=_prompt(4, 300), max_tokens=16, temperature=1.0, seed=8, top_p=0.9, top_k=50, min_p=0.01),
    _body(
        prompt=_prompt(5, 130),
        max_tokens=32,
        temperature=0.7,
        seed=9,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
    ),
    _body(prompt="The capital of France is", max_tokens=32),
]
COMPANIONS = [
    {
        "prompt": _prompt(100 + index, 3 + 9 * index % 150),
        "max_tokens": 8 + index % 24,
        "temperature": index % 2,
        "seed": index,
        "ignore_eos": True,
    }
    for index in range(32)
]


def answer(body: dict[str, Any]) -> dict[str, Any]:
    """What must not change: text, ids, log-probabilities to the last bit, why it ended."""
    (choice,) = body["choices"]
    return {key: choice[key] for key in ("text", "token_ids", "logprobs", "finish_reason")}


def answers(cluster: LocalCluster) -> list[dict[str, Any]]:
    return [answer(cluster.complete(**probe)) for probe in PROBES]


@pytest.fixture(scope="module", params=["bf16", "fp32"])
def oracle(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    with local_cluster(dtype=request.param, prefill=0) as cluster:
        result = answers(cluster)
        assert all(len(entry["token_ids"]) > 0 for entry in result)
        yield request.param, result


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_edge": "shm", "prefill_chunk": 512},
        {"kv_edge": "shm", "prefill_chunk": 16},
        {"kv_edge": "gloo", "prefill_chunk": 64},
    ],
    ids=["shm-512", "shm-16", "gloo-64"],
)
def test_disaggregated_alone_again_and_in_company(
    oracle: tuple[str, list[dict[str, Any]]], settings: dict[str, Any]
) -> None:
    """b052, b065, b022, b055: alone, with a prefix hit, and among 32 others."""
    dtype, expected = oracle
    with local_cluster(dtype=dtype, **settings) as cluster:
        first = cluster.complete(**PROBES[3], timings=True)
        assert first["timings"]["prefill_worker"] == "prefill-0"
        assert first["timings"]["decode_worker"] == "decode-0"
        assert answer(first) == expected[3]
        assert answers(cluster) == expected
        again = cluster.complete(**PROBES[3])
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "the test needs a prefix hit"
        assert answer(again) == expected[3]
        together = cluster.complete_all(COMPANIONS[:16] + PROBES + COMPANIONS[16:])
        assert [answer(body) for body in together[16 : 16 + len(PROBES)]] == expected
        cluster.wait_quiet()


def test_colocated_in_company_and_preempted(oracle: tuple[str, list[dict[str, Any]]]) -> None:
    """b050, b064: a pool too small for everyone forces preemption by recompute."""
    dtype, expected = oracle
    block_bytes = 30 * 2 * 16 * 3 * 64 * (2 if dtype == "bf16" else 4)
    settings = {"block_size": 16, "decode_kv_bytes": 28 * block_bytes, "local_chunk": 48}
    with local_cluster(dtype=dtype, prefill=0, **settings) as cluster:
        growing = [
            {"prompt": _prompt(200 + index, 4), "max_tokens": 160, "temperature": 0, "ignore_eos": True}
            for index in range(4)
        ]
        together = cluster.complete_all(growing + PROBES)
        assert [answer(body) for body in together[4:]] == expected
        cluster.wait_quiet()
        assert cluster.worker("decode-0")["preemptions"] > 0, "the test needs preemptions"
