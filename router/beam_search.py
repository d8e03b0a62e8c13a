"""Beam search as decisions: which prefixes are computed on, which are let go, and what wins. Pure.

A *stream* is a request like any other: it starts from the prompt and a prefix and goes on greedily, each
token with the most probable alternatives. A *beam* is a live hypothesis; it rides on the stream whose tokens
are its own so far.

1. `start` forks the first stream, from the prompt alone.
2. `take` brings tokens of a stream. Once every beam's next token is there, the level is decided: each beam
   has its `2 * width` most probable continuations; those that end are finished, and of the others the
   `width` most probable are the next beams, the earlier of equals first.
3. A beam whose token is the one its stream went on with stays on it. Every other needs a `Fork`: prefix
   caches have all but the last partial block of it. Streams without a beam are dropped.
4. It is over when beams have all their tokens, none is left, or none can overtake `width` finished ones.

Streams run ahead of the decisions by at most `AHEAD_TOKENS`; then they end, and a beam that is still there
forks anew. The outcome depends on log-probabilities alone, not on which stream brought them or when: they are
the same bits wherever and however often they are computed, so neither a hand-off nor a failure changes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.sampling import FinishReason, TokenOutput

AHEAD_TOKENS = 32  # a stream without a beam has computed no more than this for nothing


@dataclass(frozen=True, slots=True)
class BeamRules:
    """What is searched for: the `width` best of all hypotheses by `score`."""

    width: int
    max_tokens: int
    end_ids: frozenset[int] = frozenset()
    min_tokens: int = 0  # as of sampling: so many come before one that ends it
    length_penalty: float = 1.0
    early_stopping: bool = False  # over as soon as `width` hypotheses have ended

    @property
    def num_logprobs(self) -> int:
        """Alternatives that every token of a stream needs."""
        return 2 * self.width

    def score(self, cumulative_logprob: float, num_tokens: int) -> float:
        """`sum of log-probabilities / num_tokens ** length_penalty`; the token that ends it counts."""
        return cumulative_logprob / math.pow(num_tokens, self.length_penalty)

    def best_possible(self, cumulative_logprob: float, num_tokens: int) -> float:
        """No hypothesis that a beam grows into has a higher score: its sum can only fall."""
        longest = self.max_tokens if self.length_penalty >= 0 else num_tokens + 1
        return self.score(cumulative_logprob, longest)


@dataclass(frozen=True, slots=True)
class Fork:
    """Begin a stream of at most `max_tokens` tokens after the prompt and `prefix`."""

    stream: int
    prefix: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Drop:
    """No beam is on this stream any more."""

    stream: int


Action = Fork | Drop


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished answer: its tokens, with the one that ended it."""

    outputs: tuple[TokenOutput, ...]
    score: float
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class _Node:
    """The last token of a hypothesis, and the hypothesis before it."""

    parent: _Node | None
    output: TokenOutput
    cumulative_logprob: float

    def path(self) -> tuple[TokenOutput, ...]:
        outputs: list[TokenOutput] = []
        node: _Node | None = self
        while node is not None:
            outputs.append(node.output)
            node = node.parent
        return tuple(reversed(outputs))


@dataclass(frozen=True, slots=True)
class _Beam:
    node: _Node | None  # None: nothing but the prompt
    stream: int

    @property
    def cumulative_logprob(self) -> float:
        return 0.0 if self.node is None else self.node.cumulative_logprob


@dataclass(slots=True)
class _Stream:
    base: int  # tokens of its prefix
    max_tokens: int
    outputs: list[TokenOutput] = field(default_factory=list)

    def has(self, depth: int) -> bool:
        return len(self.outputs) > depth - self.base

    def at(self, depth: int) -> TokenOutput:
        return self.outputs[depth - self.base]

    def reaches(self, depth: int) -> bool:
        """Whether token number `depth` is, or will be, one of its own."""
        return depth - self.base < self.max_tokens


class BeamSearch:
    """One search. `outcome` is best first, once it is over."""

    def __init__(self, rules: BeamRules) -> None:
        self._rules = rules
        self._depth = 0  # tokens that every beam has
        self._beams: list[_Beam] = []
        self._streams: dict[int, _Stream] = {}
        self._num_forks = 0
        self._ended: list[tuple[float, _Node, FinishReason]] = []  # the best, best first
        self.num_computed = 0  # tokens that decisions were made of
        self.is_over = False

    def start(self) -> list[Action]:
        self._beams = [_Beam(None, 0)]
        return [self._fork(())]

    def take(self, stream: int, outputs: Sequence[TokenOutput]) -> list[Action]:
        """Tokens of a stream, in order. What comes of one that was dropped is nothing."""
        if stream not in self._streams:
            return []
        self._streams[stream].outputs.extend(outputs)
        actions: list[Action] = []
        while not self.is_over and all(self._streams[beam.stream].has(self._depth) for beam in self._beams):
            actions += self._decide()
        return actions

    def outcome(self) -> list[Hypothesis]:
        return [Hypothesis(node.path(), score, reason) for score, node, reason in self._ended]

    # ---- one level

    def _decide(self) -> list[Action]:
        depth, rules = self._depth, self._rules
        grown: list[tuple[_Node, int | None]] = []  # with the stream that went on with the same token
        for beam in self._beams:
            output = self._streams[beam.stream].at(depth)
            for token_id, logprob in self._continuations(output):
                if not logprob > -math.inf:
                    continue
                chosen = TokenOutput(token_id, logprob, output.top_logprobs)
                node = _Node(beam.node, chosen, beam.cumulative_logprob + logprob)
                if token_id not in rules.end_ids:
                    grown.append((node, beam.stream if token_id == output.token_id else None))
                elif depth >= rules.min_tokens:
                    self._end(node, depth + 1, FinishReason.STOP)
        self.num_computed += len(self._beams)
        self._depth += 1
        grown.sort(key=lambda item: -item[0].cumulative_logprob)
        del grown[rules.width :]
        if self._depth == rules.max_tokens:
            for node, _ in grown:
                self._end(node, self._depth, FinishReason.LENGTH)
            grown = []
        self.is_over = not grown or self._is_decided(grown[0][0])
        return self._drop_all() if self.is_over else self._go_on(grown)

    def _continuations(self, output: TokenOutput) -> Sequence[tuple[int, float]]:
        """The most probable ones; and what the stream went on with, where it may not end yet and all of them
        would end it."""
        best = output.top_logprobs[: self._rules.num_logprobs]
        if output.logprob is None or any(token_id == output.token_id for token_id, _ in best):
            return best
        return (*best, (output.token_id, output.logprob))

    def _is_decided(self, best: _Node) -> bool:
        """Whether no beam, of which `best` is the most probable, can change the outcome."""
        if len(self._ended) < self._rules.width:
            return False
        worst_score = self._ended[-1][0]
        possible = self._rules.best_possible(best.cumulative_logprob, self._depth)
        return self._rules.early_stopping or possible <= worst_score

    def _end(self, node: _Node, num_tokens: int, reason: FinishReason) -> None:
        self._ended.append((self._rules.score(node.cumulative_logprob, num_tokens), node, reason))
        self._ended.sort(key=lambda item: -item[0])  # of equals, who came earlier
        del self._ended[self._rules.width :]

    def _go_on(self, grown: Sequence[tuple[_Node, int | None]]) -> list[Action]:
        actions: list[Action] = []
        kept: set[int] = set()
        self._beams = []
        for node, stream in grown:
            if stream is None or not self._streams[stream].reaches(self._depth):
                fork = self._fork(tuple(output.token_id for output in node.path()))
                actions.append(fork)
                stream = fork.stream
            kept.add(stream)
            self._beams.append(_Beam(node, stream))
        return [*self._drop(set(self._streams) - kept), *actions]

    def _fork(self, prefix: tuple[int, ...]) -> Fork:
        max_tokens = min(AHEAD_TOKENS, self._rules.max_tokens - len(prefix))
        fork = Fork(self._num_forks, prefix, max_tokens)
        self._streams[fork.stream] = _Stream(len(prefix), max_tokens)
        self._num_forks += 1
        return fork

    def _drop_all(self) -> list[Action]:
        self._beams = []
        return self._drop(set(self._streams))

    def _drop(self, streams: set[int]) -> list[Action]:
        for stream in streams:
            del self._streams[stream]
        return [Drop(stream) for stream in sorted(streams)]
