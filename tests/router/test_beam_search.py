"""Beam search as decisions, against searches that are too simple to be wrong."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.sampling import FinishReason, TokenOutput
from router.beam_search import AHEAD_TOKENS, Action, BeamRules, BeamSearch, Drop, Fork

Model = Callable[[tuple[int, ...]], list[tuple[int, float]]]  # prefix |-> all tokens, best first
Found = list[tuple[tuple[int, ...], FinishReason, float]]
END = 0


def table_model(seed: int, vocab_size: int, *, coarse: bool = False) -> Model:
    """Log-probabilities by prefix; `coarse`: with many equal ones."""

    def model(prefix: tuple[int, ...]) -> list[tuple[int, float]]:
        rng = random.Random(f"{seed}/{prefix}")
        weights = [float(rng.randint(1, 3)) if coarse else rng.random() + 0.01 for _ in range(vocab_size)]
        total = sum(weights)
        scored = [(token, math.log(weight / total)) for token, weight in enumerate(weights)]
        return sorted(scored, key=lambda item: (-item[1], item[0]))

    return model


def simple_search(model: Model, rules: BeamRules) -> Found:
    """The same search with whole prefixes scored anew at every step, and nothing ended early but by
    `early_stopping`."""
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    ended: Found = []
    for length in range(1, rules.max_tokens + 1):
        grown = []
        for prefix, total in beams:
            all_tokens = model(prefix)
            looked_at = all_tokens[: 2 * rules.width]
            if length <= rules.min_tokens and all(token in rules.end_ids for token, _ in looked_at):
                looked_at = [item for item in all_tokens if item[0] not in rules.end_ids][:1]
            for token, logprob in looked_at:
                path, cumulative = (*prefix, token), total + logprob
                if token not in rules.end_ids:
                    grown.append((path, cumulative))
                elif length > rules.min_tokens:
                    ended.append((path, FinishReason.STOP, rules.score(cumulative, length)))
        beams = sorted(grown, key=lambda item: -item[1])[: rules.width]
        if rules.early_stopping and len(ended) >= rules.width and length < rules.max_tokens:
            beams = []
            break
    ended += [
        (path, FinishReason.LENGTH, rules.score(total, rules.max_tokens)) for path, total in beams if path
    ]
    return sorted(ended, key=lambda item: -item[2])[: rules.width]


class Streams:
    """What the cluster would do: greedy streams, whose tokens come in any order and in pieces of any size."""

    def __init__(self, model: Model, rules: BeamRules, rng: random.Random) -> None:
        self.search = BeamSearch(rules)
        self.num_forks = 0
        self.num_tokens = 0
        self._model = model
        self._rules = rules
        self._rng = rng
        self._left: dict[int, list[TokenOutput]] = {}

    def run(self) -> Found:
        self._carry_out(self.search.start())
        while not self.search.is_over:
            number = self._rng.choice([number for number, left in self._left.items() if left])
            left = self._left[number]
            num_taken = self._rng.randint(1, min(4, len(left)))
            taken, left[:num_taken] = left[:num_taken], []
            self.num_tokens += num_taken
            self._carry_out(self.search.take(number, taken))
        assert self._left == {}, "every stream is let go"
        assert self.search.take(0, [TokenOutput(1)]) == []
        return [
            (tuple(output.token_id for output in item.outputs), item.reason, item.score)
            for item in self.search.outcome()
        ]

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Fork():
                    self.num_forks += 1
                    assert 0 < action.max_tokens <= AHEAD_TOKENS
                    assert len(action.prefix) + action.max_tokens <= self._rules.max_tokens
                    self._left[action.stream] = self._tokens(action)
                case Drop(number):
                    del self._left[number]

    def _tokens(self, fork: Fork) -> list[TokenOutput]:
        """Until an end token, as a worker does: before `min_tokens` it has none."""
        prefix, outputs = fork.prefix, []
        for _ in range(fork.max_tokens):
            best = self._model(prefix)
            may_end = len(prefix) >= self._rules.min_tokens
            token, logprob = next(item for item in best if may_end or item[0] not in self._rules.end_ids)
            outputs.append(TokenOutput(token, logprob, tuple(best[: self._rules.num_logprobs])))
            prefix = (*prefix, token)
            if token in self._rules.end_ids:
                break
        return outputs


@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.integers(3, 9),
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 12),
    num_ends=st.integers(0, 2),
    min_tokens=st.integers(0, 4),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    early_stopping=st.booleans(),
    coarse=st.booleans(),
)
def test_the_outcome_is_that_of_a_simple_search(
    seed: int,
    vocab_size: int,
    width: int,
    max_tokens: int,
    num_ends: int,
    min_tokens: int,
    length_penalty: float,
    early_stopping: bool,
    coarse: bool,
) -> None:
    """Whatever the order and the sizes in which tokens come, ties included."""
    rules = BeamRules(
        width=width,
        max_tokens=max_tokens,
        end_ids=frozenset(range(num_ends)),
        min_tokens=min(min_tokens, max_tokens),
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    model = table_model(seed, vocab_size, coarse=coarse)
    assert Streams(model, rules, random.Random(seed)).run() == simple_search(model, rules)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_wide_enough_it_finds_the_best_of_all_answers(seed: int, length_penalty: float) -> None:
    vocab_size, max_tokens = 4, 4
    rules = BeamRules(
        width=vocab_size**max_tokens,
        max_tokens=max_tokens,
        end_ids=frozenset({END}),
        length_penalty=length_penalty,
    )
    model = table_model(seed, vocab_size)
    everything: Found = []
    for length in range(1, max_tokens + 1):
        for path in itertools.product(range(vocab_size), repeat=length):
            ends = path[-1] == END
            if END in path[:-1] or not (ends or length == max_tokens):
                continue
            total = 0.0
            for position, token in enumerate(path):
                total += dict(model(path[:position]))[token]
            reason = FinishReason.STOP if ends else FinishReason.LENGTH
            everything.append((path, reason, rules.score(total, length)))
    everything.sort(key=lambda item: -item[2])
    assert Streams(model, rules, random.Random(seed)).run() == everything


def test_one_beam_is_a_greedy_answer_and_forks_only_where_a_stream_ends() -> None:
    model = table_model(1, 6)
    rules = BeamRules(width=1, max_tokens=3 * AHEAD_TOKENS)
    streams = Streams(model, rules, random.Random(0))
    ((path, reason, _),) = streams.run()
    greedy: tuple[int, ...] = ()
    while len(greedy) < rules.max_tokens:
        greedy = (*greedy, model(greedy)[0][0])
    assert (path, reason) == (greedy, FinishReason.LENGTH)
    assert streams.num_forks == 3
    assert streams.num_tokens == rules.max_tokens


def test_a_search_ends_when_no_beam_can_overtake() -> None:
    """All but certain of its end: the sum of what goes on is below what has ended, however long."""
    sure, unsure = math.log(0.98), math.log(0.01)

    def model(prefix: tuple[int, ...]) -> list[tuple[int, float]]:
        return [(END, sure), (1, unsure), (2, unsure)]

    rules = BeamRules(width=1, max_tokens=1000, end_ids=frozenset({END}), length_penalty=0.0)
    streams = Streams(model, rules, random.Random(0))
    assert streams.run() == [((END,), FinishReason.STOP, sure)]
    assert streams.search.num_computed == 1


def test_a_token_without_a_probability_is_no_candidate() -> None:
    outputs = [TokenOutput(1, -0.5, ((1, -0.5), (2, -math.inf), (3, math.nan)))]
    search = BeamSearch(BeamRules(width=2, max_tokens=1))
    search.start()
    assert search.take(0, outputs) == [Drop(0)]
    assert [[output.token_id for output in item.outputs] for item in search.outcome()] == [[1]]


def test_a_beam_that_may_not_end_yet_goes_on_though_all_its_best_tokens_would_end_it() -> None:
    """Models with several ends of text, and `min_tokens`: the stream chose the best token that is none."""
    search = BeamSearch(BeamRules(width=1, max_tokens=2, end_ids=frozenset({0, 1}), min_tokens=1))
    search.start()
    ends = ((0, -0.1), (1, -2.5))
    assert search.take(0, [TokenOutput(7, -5.0, ends)]) == []
    assert not search.is_over
    search.take(0, [TokenOutput(0, -0.1, ends)])
    [found] = search.outcome()
    assert [output.token_id for output in found.outputs] == [7, 0]
    assert found.reason is FinishReason.STOP
    assert found.score == pytest.approx(-5.1 / 2)
