"""Triton's sampler and the NumPy definition choose the same tokens and log-probabilities, bit for bit."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from cluster.engine.batch import SampleSpec
from cluster.engine.philox import uniform
from cluster.engine.sampler import sample
from cluster.engine.token_choice import TokenChooser
from cluster.sampling import SamplingParams
from kernels.ops import StepResult
from tests.engine.test_token_choice import make_rows, result_of, spec
from tests.kernels.triton_support import DEVICE, require

backend_module = require("kernels.triton.backend")
sampler_module = require("kernels.triton.sampler")
selection = require("kernels.triton.selection")

RULES = [
    {"temperature": 0.8, "top_k": 5, "top_p": 0.95},
    {"top_k": 30, "top_p": 0.6, "min_p": 0.01},
    {"top_p": 0.0},
    {"min_p": 0.2},
    {"temperature": 1e39},
    {"temperature": 0.0, "num_logprobs": 3},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.2, "top_k": 20},
    {"allowed_token_ids": (0, 3, 700), "top_p": 0.9},
    {
        "bad_words_ids": ((1, 2), (5,)),
        "min_tokens": 60,
        "eos_token_ids": (3,),
        "logit_bias": ((7, 3.0), (7, 1e-3), (2, -5.0)),
    },
]


@pytest.fixture(scope="module")
def choose():
    return TokenChooser(backend_module.TritonBackend(), 49_152)


def on_device(result: StepResult) -> StepResult:
    return StepResult(result.hidden, result.logits.to(DEVICE), result.best.to(DEVICE))


def assert_equal(choose, logits, specs, positions):
    logits = torch.as_tensor(np.asarray(logits, np.float32))
    expected = sample(logits, specs, positions)
    actual = choose(on_device(result_of(logits)), specs, positions)
    assert [repr(out) for out in actual] == [repr(out) for out in expected]  # -0.0 is not 0.0
    return expected


CASES = [
    ("normal", 530),  # two parts of a row
    ("ties", 60),
    ("masked", 65),
    ("bad numbers", 400),
    ("far apart", 7),
    ("flat", 1),
]


@pytest.mark.parametrize(("kind", "size"), CASES, ids=str)
def test_equal_to_the_definition(choose, kind, size):
    rules = RULES if kind == "normal" else [RULES[1], RULES[3], RULES[6]]
    logits = make_rows(kind, len(rules), size, seed=size)
    output = [(7 * i) % size for i in range(40)]
    specs = [spec([0, size - 1], output, seed=i, **rule) for i, rule in enumerate(rules)]
    assert_equal(choose, logits, specs, range(len(rules)))


def test_a_nucleus_that_ends_among_equals(choose):
    """Each share of the mass ends at another of 40 equal scores, of which 11 are left by top-k."""
    row = np.full(40, 1.0, np.float32)
    row[[3, 30]] = 2.0
    shares = (0.05, 0.3, 0.5, 0.77, 1.0)
    specs = [spec(seed=4, top_p=share, top_k=top_k) for share, top_k in itertools.product(shares, (0, 11))]
    assert_equal(choose, np.tile(row, (len(specs), 1)), specs, range(len(specs)))


def test_rows_do_not_meet(choose):
    logits = torch.from_numpy(make_rows("normal", 3, 70, seed=3))
    specs = [spec([1, 2], [3, 3, 4], seed=i, **RULES[i]) for i in (0, 1, 6)]
    together = choose(on_device(result_of(logits)), specs, [5, 6, 7])
    for i in range(3):
        [alone] = choose(on_device(result_of(logits[i : i + 1])), [specs[i]], [5 + i])
        assert alone == together[i]


def test_histories_are_followed_as_they_grow(choose):
    logits = torch.from_numpy(make_rows("normal", 2, 40, seed=4))
    outputs: list[list[int]] = [[], []]
    rule = {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "temperature": 0.0}
    specs = [SampleSpec(SamplingParams(max_tokens=99, **rule), [1, i, 70, -1], outputs[i]) for i in range(2)]
    for _ in range(6):
        for output, out in zip(outputs, assert_equal(choose, logits, specs, [0, 1]), strict=True):
            output.append(out.token_id)
    assert all(len(set(output)) > 2 for output in outputs)


@pytest.mark.parametrize("seed", [0, -1, 2**63, -(2**65) + 12345, 0x9E3779B97F4A7C15])
def test_philox_is_the_same(choose, seed):
    """Flat rows tell the first bits of random numbers."""
    size, positions = 512, [0, 1, 2**31, 2**32 + 5, 2**63 - 1]
    result = StepResult(
        torch.empty(0), torch.zeros(len(positions), size), torch.zeros(len(positions), dtype=torch.int64)
    )
    outputs = choose(on_device(result), [spec(seed=seed)] * len(positions), positions)
    assert [out.token_id for out in outputs] == [int(uniform(seed, p) * size) for p in positions]


def test_bad_numbers_are_counted_and_logits_left_alone():
    logits = torch.from_numpy(make_rows("normal", 4, 30)).to(DEVICE)
    logits[1, 3], logits[2], logits[3, 9] = math.nan, -math.inf, math.inf
    before = logits.clone()
    sampler = sampler_module.TritonSampler(torch.device(DEVICE))
    result = StepResult(torch.empty(0), logits, logits.argmax(dim=1))
    tokens, details, num_broken = sampler(result, [spec(seed=2, num_logprobs=2)] * 4, range(4))
    assert num_broken == 2
    assert tokens[2] == 0
    assert tokens[3] == 9
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    assert all(math.isfinite(value) for detail in details for _, value in detail.top_logprobs)


def test_the_largest_few_in_order():
    row = torch.tensor([1.0, 3.0, -0.0, 3.0, 0.0, 2.0], device=DEVICE)
    assert selection.top(row, 3) == [1, 3, 5]
    assert selection.top(row, 5) == [1, 3, 5, 0, 2]
    assert selection.top(row, 6) == [1, 3, 5, 0, 2, 4]
    assert selection.top(row, 0) == []


def test_wrong_input_is_refused():
    sampler = sampler_module.TritonSampler(torch.device(DEVICE))
    result = StepResult(torch.empty(0), torch.zeros(2, 5, device=DEVICE), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="1 positions, 1 requests, 2 rows"):
        sampler(result, [spec()], [0])
    empty = StepResult(torch.empty(0), torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))
    assert sampler(empty, [], []) == ([], [], 0)
