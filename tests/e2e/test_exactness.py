"""The one idea, through real processes and the real model: a request's tokens and log-probabilities are
bit-identical whatever happens around it.

The oracle is each request alone on a colocated server: no transfer, no companions, no prefix cache hit, no
speculation. The others speculate where it pays, as they do unless told otherwise.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
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
    _body(prompt=_prompt(1, 5), max_tokens=10),
    _body(prompt=_prompt(2, 64), max_tokens=6),  # a whole number of blocks
    _body(prompt=_prompt(3, 65), max_tokens=6, temperature=1.0, seed=7),
    _body(prompt=_prompt(4, 300), max_tokens=6, temperature=1.0, seed=8, top_p=0.9, top_k=50, min_p=0.01),
    _body(
        prompt=_prompt(5, 130),
        max_tokens=10,
        temperature=0.7,
        seed=9,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
    ),
    _body(prompt="The capital of France is", max_tokens=10),
]
COMPANIONS = [
    {
        "prompt": _prompt(100 + index, 2 + index),
        "max_tokens": 4 + index % 12,
        "temperature": index % 2,
        "seed": index,
        "ignore_eos": True,
    }
    for index in range(32)
]
GROWERS = [
    _body(prompt=_prompt(200 + index, 4 + index), max_tokens=72, temperature=index % 2, seed=index)
    for index in range(3)
]


def answer(body: dict[str, Any]) -> dict[str, Any]:
    """What must not change: text, ids, log-probabilities to the last bit, why it ended."""
    (choice,) = body["choices"]
    return {key: choice[key] for key in ("text", "token_ids", "logprobs", "finish_reason")}


def alone(cluster: LocalCluster, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [answer(cluster.complete(**body)) for body in bodies]


@dataclass(frozen=True)
class Oracle:
    """Each request alone."""

    dtype: str
    probes: list[dict[str, Any]]
    growers: list[dict[str, Any]]


def _measure(dtype: str) -> Oracle:
    with local_cluster(dtype=dtype, prefill=0, speculation="off") as cluster:
        return Oracle(dtype, alone(cluster, PROBES), alone(cluster, GROWERS))


@pytest.fixture(scope="module")
def oracle_of() -> Callable[[str], Oracle]:
    """The oracle of a dtype, measured once."""
    return functools.cache(_measure)


@pytest.mark.parametrize(
    ("dtype", "settings", "companions"),
    [
        ("bf16", {"kv_edge": "shm", "prefill_chunk": 512}, COMPANIONS),
        ("bf16", {"kv_edge": "shm", "prefill_chunk": 16}, []),
        ("bf16", {"kv_edge": "gloo", "prefill_chunk": 64}, COMPANIONS),
        ("fp32", {"kv_edge": "shm", "prefill_chunk": 128}, []),
    ],
    ids=["bf16-shm-512", "bf16-shm-16", "bf16-gloo-64", "fp32-shm-128"],
)
def test_disaggregated_alone_again_and_in_company(
    oracle_of: Callable[[str], Oracle],
    dtype: str,
    settings: dict[str, Any],
    companions: list[dict[str, Any]],
) -> None:
    """b052, b065, b022, b055: alone, with a prefix hit, and among 32 others."""
    oracle = oracle_of(dtype)
    with local_cluster(dtype=oracle.dtype, **settings) as cluster:
        first = cluster.complete(**PROBES[3], timings=True)
        assert first["timings"]["prefill_worker"] == "prefill-0"
        assert first["timings"]["decode_worker"] == "decode-0"
        assert answer(first) == oracle.probes[3]
        assert alone(cluster, PROBES) == oracle.probes
        again = cluster.complete(**PROBES[3])
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "the test needs a prefix hit"
        assert answer(again) == oracle.probes[3]
        half = len(companions) // 2
        together = cluster.complete_all(companions[:half] + PROBES + companions[half:])
        assert [answer(body) for body in together[half : half + len(PROBES)]] == oracle.probes
        cluster.wait_quiet()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_colocated_and_preempted(oracle_of: Callable[[str], Oracle], dtype: str) -> None:
    """b050, b064: a pool in which two of them cannot grow to their end forces preemption by recompute. With
    speculation one may end in time (`tests/engine/test_drafts.py` has both)."""
    oracle = oracle_of(dtype)
    block_size, num_blocks = 8, 18
    block_bytes = 30 * 2 * block_size * 3 * 64 * (2 if oracle.dtype == "bf16" else 4)
    settings = {"block_size": block_size, "decode_kv_bytes": num_blocks * block_bytes, "local_chunk": 48}
    with local_cluster(dtype=oracle.dtype, prefill=0, speculation="off", **settings) as cluster:
        together = cluster.complete_all(GROWERS)
        assert [answer(body) for body in together] == oracle.growers
        cluster.wait_quiet()
        assert cluster.worker("decode-0")["preemptions"] > 0, "the test needs preemptions"
