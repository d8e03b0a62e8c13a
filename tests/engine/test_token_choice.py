"""The backend's sampler and the NumPy definition give the same tokens and log-probabilities, bit for bit."""

from __future__ import annotations

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
from cluster.engine.sampler import sample
from cluster.engine.token_choice import TokenChooser
from cluster.sampling import SamplingParams, TokenOutput, looks_back
from kernels.cpu.backend import CpuBackend
from kernels.ops import MAXIMA_BLOCK, StepResult
from kernels.reference import ReferenceBackend

NONE = torch.empty(0)


@pytest.fixture(scope="module", params=[1, 2])
def choose(request):
    backend = CpuBackend(request.param)
    assert backend.is_native, "the C++ kernels did not compile here: see the log"
    return TokenChooser(backend, 49_152)


def result_of(logits, with_maxima=False):
    """As a forward pass hands it over."""
    size = logits.shape[1]
    padding = -size % MAXIMA_BLOCK
    padded = torch.nn.functional.pad(logits, (0, padding), value=-math.inf)
    maxima = padded.view(len(logits), -1, MAXIMA_BLOCK).amax(dim=2)
    best = torch.from_numpy(logits.numpy().argmax(axis=1))
    return StepResult(NONE, logits, best, maxima if with_maxima else None)


def both(choose, logits, specs, positions):
    """The tokens, after checking that all ways agree."""
    logits = torch.as_tensor(np.asarray(logits, np.float32))
    expected = sample(logits, specs, positions)
    for with_maxima in (False, True):
        actual = choose(result_of(logits, with_maxima), specs, positions)
        assert actual == expected
        assert [repr(out) for out in actual] == [repr(out) for out in expected]  # -0.0 is not 0.0
    return expected


def spec(prompt=(), output=(), **params):
    return SampleSpec(SamplingParams(max_tokens=99, **params), tuple(prompt), tuple(output))


VOCAB = 150  # two blocks and a part of one
ids = st.integers(-2, VOCAB + 5)
numbers = st.one_of(
    st.integers(-6, 6).map(lambda n: n / 2),  # ties
    st.floats(-30, 30, width=32),
    st.floats(width=32),  # NaN, infinities, denormals, largest
    st.sampled_from([-math.inf, 0.0, -0.0]),
)
parameters = st.fixed_dictionaries(
    {"seed": st.integers(-(2**70), 2**70)},
    optional={
        "temperature": st.sampled_from([0.0, 1e-6, 1e-5, 0.01, 0.5, 0.8, 1.3, 2.0, 1e30, 1e39]),
        "top_k": st.integers(-1, VOCAB + 10),
        "top_p": st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 2**-53, 1.0]),
        "min_p": st.sampled_from([0.0, 1e-12, 1e-7, 1e-3, 0.2, 1.0]),
        "repetition_penalty": st.sampled_from([0.01, 0.5, 1.2, 1e38]),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2),
        "logit_bias": st.lists(st.tuples(ids, st.floats(-100, 100) | st.just(1e39))).map(tuple),
        "bad_words_ids": st.lists(st.lists(st.integers(-1, 4), max_size=4).map(tuple), max_size=4).map(tuple),
        "allowed_token_ids": st.lists(ids, max_size=4).map(tuple),
        "min_tokens": st.integers(0, 6),
        "eos_token_ids": st.lists(ids, max_size=3).map(tuple),
        "stop_token_ids": st.lists(ids, max_size=3).map(tuple),
        "num_logprobs": st.sampled_from([0, 1, 5, VOCAB, VOCAB + 9]),
    },
)
history = st.lists(st.integers(0, 5) | st.integers(0, VOCAB + 5), max_size=8)


@settings(max_examples=150)
@given(
    rows=st.lists(
        st.tuples(st.lists(numbers, min_size=1, max_size=VOCAB), parameters, history, history),
        min_size=1,
        max_size=7,
    ),
    size=st.integers(1, VOCAB),
    position=st.integers(0, 2**40),
)
def test_equal_on_anything(choose, rows, size, position):
    logits = np.array([(values * VOCAB)[:size] for values, *_ in rows], np.float32).reshape(-1, size)
    specs = [spec(prompt, output, **params) for _, params, prompt, output in rows]
    with np.errstate(over="ignore"):
        both(choose, logits, specs, [position + i for i in range(len(rows))])


LOOKING_BACK = {
    "min_tokens",
    "bad_words_ids",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
}


@pytest.mark.parametrize(
    "params",
    [
        {"min_tokens": 2, "eos_token_ids": (5,)},
        {"bad_words_ids": ((3, 5),)},
        {"repetition_penalty": 4.0},
        {"frequency_penalty": 1.5},
        {"presence_penalty": 1.5},
    ],
    ids=lambda one: next(iter(one)),
)
def test_who_looks_back_chooses_by_its_history(choose, params):
    """Token 5 leads, unless this is its second time, after a 3; or too early for an end."""
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 5], logits[0, 9] = 2.0, 1.0
    with_history, without = (spec((), output, temperature=0.0, **params) for output in ((5, 3), ()))
    assert looks_back(with_history.params)
    chosen = [both(choose, logits, [one], [7])[0].token_id for one in (with_history, without)]
    assert sorted(chosen) == [5, 9]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.1, "seed": 3},
        {"logit_bias": ((1, 2.0),)},
        {"allowed_token_ids": (1, 2)},
        {"num_logprobs": 5},
        {"eos_token_ids": (1,), "stop_token_ids": (2,)},
    ],
    ids=lambda one: next(iter(one), "nothing"),
)
def test_who_does_not_look_back(params):
    assert not looks_back(SamplingParams(max_tokens=9, **params))
    assert looks_back(SamplingParams(max_tokens=9, grammar="one", **params))


@settings(max_examples=100)
@given(
    values=st.lists(numbers, min_size=1, max_size=VOCAB),
    params=st.one_of(
        parameters,
        parameters.map(lambda one: {name: one[name] for name in one.keys() - LOOKING_BACK}),
    ),
    prompt=history,
    output=history,
)
def test_who_does_not_look_back_needs_no_history(choose, values, params, prompt, output):
    logits = np.array([values], np.float32)
    whole, empty = spec(prompt, output, **params), spec(prompt, (), **params)
    if not looks_back(whole.params):
        with np.errstate(over="ignore"):
            assert both(choose, logits, [whole], [7]) == both(choose, logits, [empty], [7])


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
@pytest.mark.parametrize("stride", [1, 2])
def test_positions_in_an_array_are_read_anew_in_each_step(choose, dtype, stride):
    """Whatever is the very object of the step before."""
    logits = torch.from_numpy(make_rows("flat", 9, VOCAB))
    specs, result = [spec(seed=i) for i in range(9)], result_of(logits)
    positions = np.arange(9 * stride, dtype=dtype)[::stride]
    chosen = []
    for _ in range(5):
        chosen.append(choose(result, specs, positions))
        assert chosen[-1] == sample(logits, specs, positions.tolist())
        positions += 1
    assert chosen[0] != chosen[1]
    others = positions[:]
    assert choose(result, specs, others) == choose(result, specs, positions.tolist())


KINDS = ["normal", "peaked", "flat", "ties", "constant", "masked", "bad numbers", "far apart"]


def make_rows(kind, num_rows, size, seed=0):
    rng = np.random.default_rng(seed)
    rows = rng.normal(0, 3, (num_rows, size)).astype(np.float32)
    match kind:
        case "peaked":
            rows *= 4
        case "flat":
            rows *= 0.01
        case "ties":
            rows = np.round(rows)
        case "constant":
            rows[:] = 1.5
        case "masked":
            rows[rng.random(rows.shape) < 0.99] = -np.inf
        case "bad numbers":
            rows[rng.random(rows.shape) < 0.001] = np.nan
            rows[rng.random(rows.shape) < 0.001] = np.inf
        case "far apart":
            rows *= np.float32(1e37)
    return rows


RULES = [
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    {"top_k": 1},
    {"top_k": 700, "top_p": 0.99, "min_p": 0.01},
    {"top_k": 40_000, "temperature": 1.5},
    {"top_k": 60_000, "top_p": 0.4},
    {"top_p": 0.95},
    {"top_p": 0.9999, "temperature": 1.7},
    {"top_p": 1e-9},
    {},
    {"temperature": 0.3},
    {"min_p": 0.05},
    {"min_p": 1e-8},
    {"num_logprobs": 20, "temperature": 0.0},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "num_logprobs": 0, "top_k": 20},
    {"allowed_token_ids": (0, 3, 700), "top_p": 0.9},
]


@pytest.mark.parametrize("size", [1, 7, 8, 63, 64, 65, 1000, 49_152])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_on_every_route_and_size(choose, kind, size):
    num_rows = len(RULES)
    logits = make_rows(kind, num_rows, size, seed=size)
    rng = random.Random(size)
    output = [rng.randrange(size) for _ in range(40)]
    specs = [spec([0, size - 1], output, seed=i, **rule) for i, rule in enumerate(RULES)]
    both(choose, logits, specs, range(num_rows))


def test_rows_do_not_meet(choose):
    """64 rows together, some of them, and each alone; one chooser throughout, so nothing is left behind."""
    logits = torch.from_numpy(make_rows("normal", 64, 4099, seed=3))
    rng = random.Random(5)
    specs = [
        spec(
            [1, 2, 3], [rng.randrange(4099) for _ in range(i)], seed=rng.getrandbits(64), **rng.choice(RULES)
        )
        for i in range(64)
    ]
    positions = [rng.randrange(10_000) for _ in range(64)]
    alone = [choose(result_of(logits[i : i + 1]), [specs[i]], [positions[i]])[0] for i in range(64)]
    assert alone == sample(logits, specs, positions)
    for num_rows in (64, 1, 2, 3, 31, 64, 8):
        rows = rng.sample(range(64), num_rows)
        together = choose(result_of(logits[rows]), [specs[i] for i in rows], [positions[i] for i in rows])
        assert together == [alone[i] for i in rows]


def test_histories_are_followed_as_they_grow(choose):
    """Lists grow, requests come and go, and some return; each step is what the definition says."""
    rng = random.Random(9)
    logits = torch.from_numpy(make_rows("normal", 12, 300, seed=4))
    outputs = [[] for _ in range(300)]
    rule = {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "bad_words_ids": ((1, 2), (5,))}
    specs = [
        SampleSpec(
            SamplingParams(max_tokens=99, seed=i, min_tokens=i % 7, eos_token_ids=(3,), **rule),
            [1, i],
            outputs[i],
        )
        for i in range(300)
    ]
    for step in range(150):
        running = rng.sample(range(step, step + 40), 12)
        expected = sample(logits, [specs[i] for i in running], range(12))
        assert choose(result_of(logits), [specs[i] for i in running], range(12)) == expected
        for i, out in zip(running, expected, strict=True):
            outputs[i].append(out.token_id)
            outputs[i].extend(rng.choices(range(300), k=step % 5))


def test_requests_with_equal_parameters_keep_their_own_histories(choose):
    logits = torch.zeros(2, 10)
    logits[:, 7] = 1.0
    for _ in range(2):  # the second time with parameters that are equal, not the same
        specs = [
            spec([], [7], temperature=0.0, presence_penalty=2.0),
            spec([], [1], temperature=0.0, presence_penalty=2.0),
        ]
        assert [out.token_id for out in choose(result_of(logits), specs, [0, 0])] == [0, 7]


@settings(max_examples=50)
@given(seed=st.integers(-(2**65), 2**65), position=st.integers(0, 2**63 - 1))
def test_philox_is_the_same(choose, seed, position):
    """A flat row of 2^14 logits tells the first 14 bits of the random number."""
    size = 1 << 14
    row = torch.zeros(1, size)
    result = StepResult(NONE, row, torch.zeros(1, dtype=torch.int64))
    (out,) = choose(result, [spec(seed=seed)], [position])
    assert out.token_id == int(uniform(seed, position) * size)


def test_draws_follow_the_distribution(choose):
    size, num_draws = 40, 4000
    row = torch.from_numpy(make_rows("normal", 1, size, seed=8)) / 2
    logits = row.expand(num_draws, -1).contiguous()
    outputs = choose(result_of(logits), [spec(seed=77)] * num_draws, range(num_draws))
    expected = torch.softmax(row[0].double(), 0).numpy() * num_draws
    observed = np.bincount([out.token_id for out in outputs], minlength=size)
    common = expected >= 5
    observed = np.append(observed[common], observed[~common].sum())
    expected = np.append(expected[common], expected[~common].sum() + 1e-9)
    chi_square = ((observed - expected) ** 2 / expected).sum()
    degrees = len(expected) - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)


def test_bad_numbers_are_counted_and_logits_left_alone(choose, caplog):
    logits = torch.from_numpy(make_rows("normal", 6, 100))
    logits[1, 3], logits[2] = math.nan, -math.inf
    logits[4, 9] = math.inf
    before = logits.clone()
    with caplog.at_level(logging.ERROR):
        outputs = choose(
            result_of(logits), [spec(seed=2, num_logprobs=2, logit_bias=((1, 3.0),))] * 6, range(6)
        )
    assert "2 of 6 rows" in caplog.text
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    assert all(math.isfinite(value) for out in outputs for _, value in out.top_logprobs)


def test_no_rows(choose):
    result = StepResult(NONE, torch.empty(0, 5), torch.empty(0, dtype=torch.int64))
    assert choose(result, [], []) == []


def test_rows_that_come_and_go_leave_nothing_behind(choose):
    """Numbers of rows, results and positions that come again; histories of others where there are none."""
    generator = np.random.default_rng(3)
    logits = torch.from_numpy(generator.normal(size=(3, VOCAB)).astype(np.float32))
    results = [result_of(logits[:count], with_maxima=True) for count in (1, 2, 3)]
    places = [np.arange(count) for count in (1, 2, 3)]
    back = [
        spec((1, 2), range(i, VOCAB, 3), seed=i, repetition_penalty=1.4, num_logprobs=i) for i in range(3)
    ]
    plain = [spec((5,), (6,), seed=i, logit_bias=((9, 4.0),), bad_words_ids=((i,),)) for i in range(3)]
    some = [*plain[:1], *back[:1], *plain[1:2]]
    for specs in (back, plain, some, plain[:2], back[:1], plain, back[:2], some[::-1], plain[:1], back):
        position = places[len(specs) - 1]
        position += 1
        actual = choose(results[len(specs) - 1], specs, position)
        assert actual == sample(logits[: len(specs)], specs, position.tolist())


@pytest.mark.parametrize("backend", [ReferenceBackend(), None])
def test_without_a_sampler_of_the_backend_the_definition_serves(backend):
    """A backend that has none; and a vocabulary whose sums would not be exact."""
    size = 50 if backend is not None else (1 << 19) + 1
    chooser = TokenChooser(backend or CpuBackend(1), size)
    row = torch.zeros(1, size)
    row[0, 20] = 30.0
    assert chooser(result_of(row), [spec(temperature=0.0)], [0]) == [TokenOutput(20)]


class TestRefuses:
    """What would read memory that is not the caller's."""

    @pytest.fixture
    def sampler(self):
        return CpuBackend(1).make_sampler()

    @pytest.mark.parametrize("best", [-1, 10])
    def test_best_ids_outside(self, sampler, best):
        result = StepResult(NONE, torch.zeros(2, 10), torch.tensor([0, best]))
        with pytest.raises(IndexError, match=f"row 1: {best} of 10"):
            sampler(result, [spec()] * 2, [0, 0])

    @pytest.mark.parametrize(
        ("changes", "error"),
        [
            ({"logits": torch.zeros(2, 10, dtype=torch.bfloat16)}, TypeError),
            ({"logits": torch.zeros(3, 10)}, ValueError),
            ({"logits": torch.zeros(10, 2).t()}, ValueError),
            ({"logits": torch.zeros(2, 0)}, ValueError),
            ({"best": torch.zeros(3, dtype=torch.int64)}, ValueError),
            ({"best": torch.zeros(2, dtype=torch.int32)}, ValueError),
            ({"maxima": torch.zeros(2, 2)}, ValueError),
        ],
    )
    def test_other_tensors(self, sampler, changes, error):
        tensors = {
            "logits": torch.zeros(2, 10),
            "best": torch.zeros(2, dtype=torch.int64),
            "maxima": torch.zeros(2, 1),
        }
        result = StepResult(NONE, **tensors)
        tokens, _, _ = sampler(result, [spec()] * 2, [0, 0])
        assert len(tokens) == 2
        with pytest.raises(error):
            sampler(StepResult(NONE, **(tensors | changes)), [spec()] * 2, [0, 0])
