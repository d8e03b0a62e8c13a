import itertools
import logging
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.batch import SampleSpec
from cluster.engine.philox import uniform
from cluster.engine.sampler import LOGPROB_FLOOR, sample
from cluster.sampling import SamplingParams


def spec(prompt=(), output=(), **params):
    return SampleSpec(SamplingParams(max_tokens=99, **params), tuple(prompt), tuple(output))


def one(row, position=0, **params):
    logits = torch.as_tensor(np.asarray(row, np.float32))[None]
    return sample(logits, [spec(**params)], [position])[0]


def random_logits(num_rows, vocab_size, scale=3.0, seed=0):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


# ---- the kept set, against brute force -----------------------------------------------------------


def kept_by_brute_force(row, temperature, top_k, top_p, min_p, slack):
    """Ids left by temperature → top-k → top-p → min-p, straight from the definition. `slack` moves the two
    mass comparisons, to tell ids that are in or out whatever the rounding."""
    peak = max(row)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    probability = {i: math.exp((row[i] - peak) / temperature) for i in order}
    kept = order[:top_k] if top_k else order
    if top_p < 1:
        mass = math.fsum(probability[i] for i in kept)
        upto, head = 0.0, []
        for i in kept:
            if head and upto >= top_p * mass * (1 - slack):
                break
            head.append(i)
            upto += probability[i]
        kept = head
    return {i for i in kept if probability[i] >= min_p * (1 - slack) and probability[i] > 0}


@settings(max_examples=150, deadline=None)
@given(
    row=st.lists(st.integers(-8, 8).map(lambda n: n / 2), min_size=1, max_size=12),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.5]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)
def test_top_k_top_p_min_p_against_brute_force(row, temperature, top_k, top_p, min_p):
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    positions = range(50)
    outputs = sample(torch.tensor([row] * 50), [spec(seed=9, **params)] * 50, positions)
    seen = {out.token_id for out in outputs}
    widest = kept_by_brute_force(row, temperature, top_k, top_p, min_p, slack=-1e-5) | kept_by_brute_force(
        row, temperature, top_k, top_p, min_p, slack=1e-5
    )
    assert seen <= widest
    # and the draw over the kept ids is the inverse CDF in id order
    kept = sorted(kept_by_brute_force(row, temperature, top_k, top_p, min_p, slack=1e-5))
    if set(kept) == kept_by_brute_force(row, temperature, top_k, top_p, min_p, slack=-1e-5):
        weights = [math.exp((row[i] - max(row)) / temperature) for i in kept]
        for position, out in zip(positions, outputs, strict=True):
            target = uniform(9, position) * math.fsum(weights)
            sums = list(itertools.accumulate(weights))
            if min(abs(target - s) for s in (0.0, *sums)) < 1e-5:
                continue
            assert out.token_id == kept[next(n for n, s in enumerate(sums) if s > target)]


# ---- distribution --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
    ],
)
def test_draws_follow_the_distribution(params):
    vocab_size, num_draws = 40, 4000
    row = random_logits(1, vocab_size, 1.5, seed=4)
    kept = kept_by_brute_force(
        row[0].tolist(),
        params.get("temperature", 1.0),
        params.get("top_k", 0),
        params.get("top_p", 1.0),
        params.get("min_p", 0.0),
        slack=0.0,
    )
    outputs = sample(row.expand(num_draws, -1), [spec(seed=77, **params)] * num_draws, range(num_draws))
    counts = np.bincount([out.token_id for out in outputs], minlength=vocab_size)
    probability = np.zeros(vocab_size)
    ids = sorted(kept)
    probability[ids] = torch.softmax(row[0, ids].double() / params.get("temperature", 1.0), 0).numpy()
    assert counts[probability == 0].sum() == 0
    expected = probability[ids] * num_draws
    common = expected >= 5
    observed = np.append(counts[ids][common], counts[ids][~common].sum())
    expected = np.append(expected[common], expected[~common].sum() + 1e-9)
    chi_square = ((observed - expected) ** 2 / expected).sum()
    degrees = max(len(expected) - 1, 1)
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)


# ---- a row is a function of itself ---------------------------------------------------------------


def random_spec(rng, vocab_size):
    def ids(most):
        return tuple(rng.randrange(vocab_size) for _ in range(rng.randrange(most)))

    params = {
        "seed": rng.getrandbits(64),
        "temperature": rng.choice([0.0, 0.3, 1.0, 2.0]),
        "top_k": rng.choice([0, 0, 1, 5, 50, 1000]),
        "top_p": rng.choice([1.0, 0.5, 0.95]),
        "min_p": rng.choice([0.0, 0.1]),
        "presence_penalty": rng.choice([0.0, 1.0]),
        "frequency_penalty": rng.choice([0.0, -1.0]),
        "repetition_penalty": rng.choice([1.0, 1.3]),
        "logit_bias": tuple((token_id, rng.uniform(-100, 100)) for token_id in ids(3)),
        "bad_words_ids": tuple((token_id,) for token_id in ids(3)),
        "allowed_token_ids": ids(20) if rng.random() < 0.2 else (),
        "min_tokens": rng.choice([0, 5]),
        "eos_token_ids": (2,),
        "num_logprobs": rng.choice([None, 0, 5, 20]),
    }
    return spec(ids(30), ids(30), **params)


@pytest.mark.parametrize("vocab_size", [300, 4099])
def test_b064_b022_rows_do_not_meet(vocab_size):
    rng = random.Random(vocab_size)
    logits = random_logits(64, vocab_size, seed=vocab_size)
    specs = [random_spec(rng, vocab_size) for _ in range(64)]
    positions = [rng.randrange(10_000) for _ in range(64)]
    alone = [sample(logits[i : i + 1].clone(), [specs[i]], [positions[i]])[0] for i in range(64)]
    num_threads = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for num_rows in (1, 2, 3, 7, 8, 31, 32, 64):
                rows = rng.sample(range(64), num_rows)
                together = sample(logits[rows], [specs[i] for i in rows], [positions[i] for i in rows])
                assert together == [alone[i] for i in rows]
    finally:
        torch.set_num_threads(num_threads)


def test_memory_layout_does_not_matter():
    logits = random_logits(8, 1003)
    specs = [spec(seed=i, top_p=0.9, num_logprobs=3) for i in range(8)]
    expected = sample(logits, specs, range(8))
    shifted = torch.empty(8 * 1003 + 1)[1:].view(8, 1003).copy_(logits)
    assert sample(shifted, specs, range(8)) == expected
    assert sample(logits.t().contiguous().t(), specs, range(8)) == expected
    assert sample(torch.cat([logits, logits], dim=1)[:, :1003], specs, range(8)) == expected


def test_logits_are_left_alone():
    logits = random_logits(4, 500)
    logits[0, 0] = math.nan
    before = logits.clone()
    sample(logits, [spec(output=[1], repetition_penalty=2.0, num_logprobs=2)] * 4, range(4))
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())


def test_b022_seed_and_position_decide():
    row = np.zeros(1000)
    tokens = [one(row, position, seed=42).token_id for position in range(32)]
    assert tokens == [one(row, position, seed=42).token_id for position in range(32)]
    assert tokens != [one(row, position, seed=43).token_id for position in range(32)]
    assert len(set(tokens)) > 20
    torch.manual_seed(0)
    assert one(row, 7, seed=42).token_id == tokens[7]


# ---- greedy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-300])
def test_greedy_takes_the_lowest_of_equals(temperature):
    row = np.zeros(200)
    row[[50, 150]] = 3.0
    assert one(row, temperature=temperature).token_id == 50


def test_greedy_is_argmax_with_or_without_other_parameters():
    logits = random_logits(16, 5000)
    expected = logits.argmax(dim=1).tolist()
    for params in ({}, {"top_k": 3, "top_p": 0.1, "min_p": 0.5}, {"logit_bias": ((1, 0.0),)}):
        outputs = sample(logits, [spec(temperature=0.0, **params)] * 16, range(16))
        assert [out.token_id for out in outputs] == expected


def test_top_k_1_is_greedy():
    logits = random_logits(16, 5000)
    outputs = sample(logits, [spec(top_k=1, temperature=2.0)] * 16, range(16))
    assert [out.token_id for out in outputs] == logits.argmax(dim=1).tolist()


# ---- parameters end to end -----------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b014_logit_bias_forces_and_forbids(temperature):
    row = random_logits(1, 1000)[0].numpy()
    best = int(row.argmax())
    assert one(row, temperature=temperature, logit_bias=((17, 100.0),)).token_id == 17
    tokens = {one(row, i, temperature=temperature, logit_bias=((best, -100.0),)).token_id for i in range(50)}
    assert best not in tokens


def test_b072d_min_tokens_keeps_eos_out_of_the_first_token():
    row = np.zeros(50)
    row[2] = 50.0
    assert one(row, eos_token_ids=(2,), min_tokens=3).token_id != 2
    assert one(row, eos_token_ids=(2,), min_tokens=3, output=[5, 5, 5]).token_id == 2


# ---- log-probabilities ---------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_distribution():
    logits = random_logits(8, 3000)
    expected = torch.log_softmax(logits.double(), dim=1)
    params = {
        "temperature": 0.5,
        "top_k": 50,
        "logit_bias": ((7, 50.0),),
        "output": [7],
        "presence_penalty": 1,
    }
    outputs = sample(logits, [spec(num_logprobs=5, seed=3, **params)] * 8, range(8))
    for row, out in zip(expected, outputs, strict=True):
        assert out.token_id == 7
        assert out.logprob == pytest.approx(float(row[7]), abs=1e-5)
        values, ids = row.topk(5)
        assert [token_id for token_id, _ in out.top_logprobs] == ids.tolist()
        assert [value for _, value in out.top_logprobs] == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_off_chosen_only_and_ties():
    row = np.zeros(100)
    assert one(row, temperature=0.0).logprob is None
    chosen = one(row, temperature=0.0, num_logprobs=0)
    assert (chosen.logprob, chosen.top_logprobs) == (pytest.approx(-math.log(100)), ())
    top = one(row, temperature=0.0, num_logprobs=3).top_logprobs
    assert [token_id for token_id, _ in top] == [0, 1, 2]


def test_b015_logprobs_are_finite():
    row = np.full(50, -np.inf)
    row[3] = 1.0
    out = one(row, top_k=1, num_logprobs=5)
    assert out.token_id == 3
    assert out.logprob == 0.0
    assert out.top_logprobs == ((3, 0.0), *((i, LOGPROB_FLOOR) for i in (0, 1, 2, 4)))
    far = one([0.0, 1e30], temperature=0.0, num_logprobs=2, allowed_token_ids=(0,))
    assert (far.token_id, far.logprob) == (0, LOGPROB_FLOOR)


# ---- bad numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}])
@pytest.mark.parametrize("extra", [{}, {"repetition_penalty": 1.5, "prompt": [0, 1]}])
def test_bad_numbers_fail_no_row(params, extra, caplog):
    good = random_logits(1, 100)
    logits = good.repeat(6, 1)
    logits[1] = math.nan
    logits[2, 5] = math.nan
    logits[3] = -math.inf
    logits[4, 9] = math.inf
    specs = [spec(num_logprobs=2, seed=1, **params, **extra)] * 6
    with caplog.at_level(logging.ERROR):
        outputs = sample(logits, specs, [8] * 6)
    assert outputs[0] == outputs[5] == sample(good, specs[:1], [8])[0]
    assert outputs[1].token_id == outputs[3].token_id == 0
    assert outputs[2].token_id != 5
    assert outputs[4].token_id == 9
    for out in outputs:
        assert all(math.isfinite(v) for v in (out.logprob, *(v for _, v in out.top_logprobs)))
    assert "3 of 6 rows" in caplog.text


def test_everything_masked_yields_the_lowest_allowed_id():
    row = np.full(50, -np.inf)
    row[3] = 1.0
    assert one(row, allowed_token_ids=(9, 8)).token_id == 8
    assert one(row, allowed_token_ids=(9, 8), temperature=0.0, num_logprobs=0).logprob == LOGPROB_FLOOR
    assert one(row, allowed_token_ids=(-1, 50, 999), num_logprobs=0).token_id == 0


@settings(max_examples=150, deadline=None)
@given(
    row=st.lists(st.floats(width=32), min_size=1, max_size=90),
    temperature=st.floats(0, 2) | st.sampled_from([1e-5, 1e-4, 1e30]),
    top_k=st.integers(0, 100),
    top_p=st.floats(1e-6, 1),
    min_p=st.floats(0, 1),
)
def test_any_floats_give_a_token_and_finite_logprobs(row, temperature, top_k, top_p, min_p):
    out = one(row, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, num_logprobs=3)
    assert 0 <= out.token_id < len(row)
    assert out.logprob is not None
    assert all(math.isfinite(v) for v in (out.logprob, *(v for _, v in out.top_logprobs)))


def test_bf16_logits_and_no_rows():
    logits = random_logits(3, 64).bfloat16()
    specs = [spec(num_logprobs=1)] * 3
    assert sample(logits, specs, range(3)) == sample(logits.float(), specs, range(3))
    assert sample(torch.empty(0, 64), [], []) == []


def test_best_ids_found_elsewhere_change_nothing():
    logits = random_logits(6, 300)
    logits[1, 40] = math.nan
    logits[2, 7] = math.inf
    logits[3, 5] = logits[3].max() + 1
    logits[3, 9] = logits[3, 5]  # the first of equals
    logits[4] = -math.inf
    specs = [
        spec(temperature=0.0),
        spec(temperature=0.0),
        spec(temperature=0.0),
        spec(temperature=0.0),
        spec(temperature=0.0, allowed_token_ids=(3,)),
        spec(temperature=0.8, seed=3, top_k=20, num_logprobs=2),
    ]
    best = [int(row.argmax()) for row in logits.numpy()]
    assert sample(logits, specs, range(6), best) == sample(logits, specs, range(6))


def test_greedy_with_requests_of_its_own_is_not_taken_for_plain():
    logits = random_logits(3, 50)
    best = int(logits[0].argmax())
    specs = [
        spec(temperature=0.0, num_logprobs=1),
        spec(temperature=0.0, logit_bias=((7, 100.0),)),
        spec(temperature=0.0, min_tokens=2, stop_token_ids=(best,)),
    ]
    rows = logits[:1].expand(3, -1)
    outputs = sample(rows, specs, range(3), [best] * 3)
    assert outputs[0].token_id == best
    assert outputs[0].logprob is not None
    assert outputs[1].token_id == 7
    assert outputs[2].token_id != best
