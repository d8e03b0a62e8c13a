import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.batch import SampleSpec
from cluster.engine.processors import is_neutral, process
from cluster.sampling import SamplingParams

VOCAB = 20


def spec(prompt=(), output=(), **params):
    return SampleSpec(SamplingParams(max_tokens=99, **params), tuple(prompt), tuple(output))


def processed(row, one):
    scores = np.array(row, np.float32)
    process(scores, one)
    return scores


def flat(value=1.0):
    return np.full(VOCAB, value, np.float32)


def masked(scores):
    return set(np.flatnonzero(np.isneginf(scores)).tolist())


def test_defaults_are_neutral():
    assert is_neutral(spec(eos_token_ids=(3,)).params, 0)
    assert processed(flat(), spec(prompt=[1, 2], output=[3])).tolist() == flat().tolist()


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.1},
        {"frequency_penalty": -0.1},
        {"presence_penalty": 0.1},
        {"logit_bias": ((1, 1.0),)},
        {"allowed_token_ids": (1,)},
        {"bad_words_ids": ((1,),)},
        {"min_tokens": 1, "eos_token_ids": (1,)},
        {"min_tokens": 1, "stop_token_ids": (1,)},
    ],
)
def test_every_parameter_counts(params):
    one = spec(prompt=[1], output=[], **params) if "min_tokens" in params else spec([1], [1], **params)
    assert not is_neutral(one.params, len(one.output_ids))
    assert (processed(flat(), one) != flat()).any()


@pytest.mark.parametrize("frequency", [2.0, -2.0, 0.0])
@pytest.mark.parametrize("presence", [2.0, 0.5, 0.0])
@pytest.mark.parametrize("repetition", [1.0, 1.2, 0.5])
def test_b034_penalties_by_formula(frequency, presence, repetition):
    row = np.linspace(-3, 3, VOCAB).astype(np.float32)
    prompt, output = [0, 1, 1, 19], [19, 5, 5, 5, 18]
    scores = processed(
        row,
        spec(
            prompt,
            output,
            frequency_penalty=frequency,
            presence_penalty=presence,
            repetition_penalty=repetition,
        ),
    )
    for token_id in range(VOCAB):
        expected = float(row[token_id])
        if token_id in prompt + output:
            expected = expected / repetition if expected > 0 else expected * repetition
        count = output.count(token_id)
        expected -= frequency * count + presence * (count > 0)
        assert scores[token_id] == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_b034_repetition_penalty_counts_the_prompt_before_the_first_token():
    scores = processed(flat(), spec(prompt=[4], output=[], repetition_penalty=2.0))
    assert scores[4] == 0.5
    assert scores[5] == 1.0


def test_bias_is_added_after_penalties():
    scores = processed(flat(2.0), spec([7], [], repetition_penalty=2.0, logit_bias=((7, 1.5), (8, -100.0))))
    assert scores[7] == 2.5
    assert scores[8] == -98.0


def test_allowed_ids_mask_all_others():
    assert masked(processed(flat(), spec(allowed_token_ids=(3, 9, 3)))) == set(range(VOCAB)) - {3, 9}


@pytest.mark.parametrize("num_generated", [0, 1, 2, 3, 4])
def test_b072d_min_tokens_masks_eos_and_stop_ids(num_generated):
    one = spec(output=[1] * num_generated, min_tokens=3, eos_token_ids=(5,), stop_token_ids=(6,))
    assert masked(processed(flat(), one)) == ({5, 6} if num_generated < 3 else set())


@pytest.mark.parametrize(
    ("prompt", "output", "words", "banned"),
    [
        ((), (), ((4,),), {4}),
        ((), (1, 2), ((1, 2, 3),), {3}),
        ((), (2, 1), ((1, 2, 3),), set()),
        ((), (1, 2, 9), ((1, 2, 3),), set()),
        ((7, 1), (2,), ((1, 2, 3),), {3}),  # begun in the prompt
        ((7, 1, 2), (), ((1, 2, 3),), {3}),
        ((2,), (), ((1, 2, 3),), set()),  # history shorter than the word
        ((), (), ((1, 2, 3),), set()),
        ((), (1, 1), ((1, 1, 1), (1, 4), (8,)), {1, 4, 8}),
        ((), (1,), ((),), set()),
    ],
)
def test_bad_words(prompt, output, words, banned):
    assert masked(processed(flat(), spec(prompt, output, bad_words_ids=words))) == banned


def test_a_mask_that_would_leave_nothing_gives_way_but_allowed_ids_hold():
    eos_only = spec(allowed_token_ids=(5,), min_tokens=3, eos_token_ids=(5,))
    assert masked(processed(flat(), eos_only)) == set(range(VOCAB)) - {5}
    both_bad = spec(allowed_token_ids=(5, 6), bad_words_ids=((5,), (6,)))
    assert masked(processed(flat(), both_bad)) == set(range(VOCAB)) - {5, 6}
    one_left = spec(allowed_token_ids=(5, 6), min_tokens=1, eos_token_ids=(5,), bad_words_ids=((6,),))
    assert masked(processed(flat(), one_left)) == set(range(VOCAB)) - {6}


ids = st.integers(-2, VOCAB + 5)


@given(
    row=st.lists(st.floats(-50, 50, width=32), min_size=VOCAB, max_size=VOCAB),
    prompt=st.lists(st.integers(0, VOCAB + 5), max_size=6),
    output=st.lists(st.integers(0, VOCAB + 5), max_size=6),
    params=st.fixed_dictionaries(
        {},
        optional={
            "repetition_penalty": st.sampled_from([0.01, 0.5, 1.2, 10.0]),
            "frequency_penalty": st.floats(-2, 2),
            "presence_penalty": st.floats(-2, 2),
            "logit_bias": st.lists(st.tuples(ids, st.floats(-100, 100))).map(tuple),
            "bad_words_ids": st.lists(st.lists(ids, max_size=3).map(tuple), max_size=4).map(tuple),
            "allowed_token_ids": st.lists(ids, max_size=4).map(tuple),
            "min_tokens": st.integers(0, 8),
            "eos_token_ids": st.lists(ids, max_size=3).map(tuple),
        },
    ),
)
def test_something_finite_is_always_left(row, prompt, output, params):
    one = spec(prompt, output, **params)
    scores = processed(row, one)
    assert not np.isnan(scores).any()
    allowed = [i for i in one.params.allowed_token_ids if 0 <= i < VOCAB]
    if allowed or not one.params.allowed_token_ids:
        assert np.isfinite(scores.max())
        assert int(scores.argmax()) in (allowed or range(VOCAB))
    neutral = is_neutral(one.params, len(output))
    assert not neutral or scores.tolist() == np.array(row, np.float32).tolist()
