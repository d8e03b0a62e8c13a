"""Field faults of schedulers and KV caches, one test per case, on live processes. The oracle is one engine
without cache hits or company; equality is to the last bit. The table in `tests/README.md` says where the
cases are that need exact moments."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.faults.asking import alone, asked, body, essence, fresh, prompt
from tests.faults.conftest import BLOCK
from tests.support.local_cluster import LocalCluster

pytestmark = [pytest.mark.timeout(240)]


def test_b052_a_cache_hit_changes_nothing(oracle: LocalCluster, pair: LocalCluster) -> None:
    """An answer from cached KV against a computed one: the same prompt again and again, as the head of a
    longer one, and after part of it was evicted."""
    rng = random.Random(52)
    hits = 0
    requests = [body(rng.randrange(2, 150), 8, which=index) for index in range(8)]
    longer = [request | {"prompt": request["prompt"] + prompt(40, 99)} for request in requests]
    right = [alone(oracle, request) for request in (*requests, *longer)]
    for _ in range(2):
        assert [asked(pair, request) for request in (*requests, *longer)] == right
    for index in range(5):  # fills both pools: heads of what is cached are evicted
        pair.complete(**body(1900, 2, which=index))
    for request, expected in zip((*requests, *longer), right, strict=True):
        answer = pair.complete(**request)
        hits += answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert asked(pair, request) == expected
    assert hits > 0, "the test needs hits"


@pytest.mark.parametrize("max_tokens", [1, 2 * BLOCK + 1])
def test_b054_prompts_of_whole_blocks(oracle: LocalCluster, pair: LocalCluster, max_tokens: int) -> None:
    """A prompt of exactly so many blocks, wholly cached, leaves nothing to compute and nothing to sample."""
    for num_blocks in range(1, 5):
        for num_prompt in (num_blocks * BLOCK - 1, num_blocks * BLOCK, num_blocks * BLOCK + 1):
            request = body(num_prompt, max_tokens, which=54, logprobs=2)
            expected = alone(oracle, request)
            for _ in range(3):
                answer = pair.complete(**request)
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] <= num_prompt - 1
                assert asked(pair, request) == expected


def test_b055_chunks_that_end_within_a_block(oracle: LocalCluster, pair: LocalCluster) -> None:
    """Chunks of one and a half blocks, and a second request whose shared head ends inside a chunk."""
    chunk = BLOCK + BLOCK // 2
    for num_prompt in (chunk - 1, chunk, chunk + 1, 2 * chunk, 3 * chunk + 1, 5 * chunk):
        request = body(num_prompt, 6, which=55)
        assert asked(pair, request) == alone(oracle, request)
        shared = request | {"prompt": request["prompt"][: num_prompt - 3] + prompt(30, 7)}
        assert asked(pair, shared) == alone(oracle, shared)


def test_b057_a_salt_separates_what_is_cached(oracle: LocalCluster, pair: LocalCluster) -> None:
    """Two tenants with the same prompt: neither finds the other's blocks, both get the same tokens."""
    request = body(5 * BLOCK, 6, which=57)
    expected = alone(oracle, request)
    for salt in ("tenant-a", "tenant-b"):
        first = pair.complete(**request, cache_salt=salt)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert asked(pair, request | {"cache_salt": salt}) == expected


def _mixed(rng: random.Random, index: int) -> dict[str, Any]:
    """Some sampling parameters, drawn at random; the tokens are still the request's own."""
    fields: dict[str, Any] = {"temperature": rng.choice([0, 0, 0.7, 1.0]), "seed": index}
    if rng.random() < 0.5:
        fields |= {"top_k": rng.choice([1, 5, 40]), "top_p": rng.choice([0.5, 0.9, 1.0])}
    if rng.random() < 0.3:
        fields |= {"min_p": 0.05}
    if rng.random() < 0.4:
        fields |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    if rng.random() < 0.3:
        fields |= {"logit_bias": {str(rng.randrange(32, 127)): rng.choice([-100, 4.0])}}
    if rng.random() < 0.4:
        fields |= {"logprobs": rng.choice([0, 1, 5])}
    if rng.random() < 0.2:
        fields |= {"stop": [chr(rng.randrange(97, 123))]}
    return body(rng.randrange(1, 90), rng.randrange(1, 40), which=index, **fields)


def test_b064_rows_of_a_batch_do_not_share_parameters(oracle: LocalCluster, pair: LocalCluster) -> None:
    """64 requests at once, each with another mix of parameters, coming and going: each is as alone."""
    rng = random.Random(64)
    requests = [_mixed(rng, index) for index in range(64)]
    expected = [alone(oracle, request) for request in requests]
    answers = pair.complete_all([request | fresh() for request in requests])
    assert [essence(answer) for answer in answers] == expected


def test_b065_greedy_output_with_companions(oracle: LocalCluster, pair: LocalCluster) -> None:
    """One probe with 1, 3, 7 and 31 companions of other lengths, cold and with its prompt cached."""
    probe = body(70, 24, which=65, logprobs=3)
    expected = alone(oracle, probe)
    for num in (1, 3, 7, 31):
        for salt in (fresh(), {}):
            companions = [body(3 + 5 * index, 4 + index, which=index) for index in range(num)]
            half = num // 2
            answers = pair.complete_all([*companions[:half], probe | salt, *companions[half:]])
            assert essence(answers[half]) == expected
