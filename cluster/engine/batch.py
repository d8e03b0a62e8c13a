"""What one step computes: the value that passes from a scheduler to a runner and back. No tensors.

A prefill chunk and a decode row differ only in how many tokens they bring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol, overload

import msgspec

from cluster.ids import Attempt, BlockId, RequestId
from cluster.sampling import PromptScore, SamplingParams, TokenOutput

if TYPE_CHECKING:
    from cluster.grammar import GrammarState


class RowNotes(msgspec.Struct):
    """What the engine remembers of a request between its steps; nobody else reads or writes it."""

    opening: Future[GrammarState] | None = None  # where the answer stands in its grammar, once it is compiled
    scores: list[PromptScore] = msgspec.field(default_factory=list)  # of the prompt's tokens 1, 2, ... so far


class SampleSpec(msgspec.Struct, frozen=True):
    """How to choose the token that follows a row; the history is the request's own."""

    params: SamplingParams
    prompt_ids: Sequence[int]  # the client's prompt
    output_ids: Sequence[int]  # tokens generated so far, see `Runner.run`; grows at its end
    notes: RowNotes = msgspec.field(default_factory=RowNotes)


class Row(msgspec.Struct, frozen=True):  # made for every row of every step: cheaper than a dataclass
    """One sequence's share of a step: tokens at positions [start, start + len(token_ids))."""

    request: RequestId
    attempt: Attempt
    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[
        BlockId
    ]  # covers at least [0, start + len(token_ids)); grows at its end, between steps
    sample: SampleSpec | None  # None: a chunk that does not reach the end of its prompt
    score: SampleSpec | None = None  # log-probabilities of the prompt's tokens are wanted
    end: int = 0  # drafts stand at positions before it; what `block_ids` cover, or less
    num_drafts: int = 0  # the last tokens of `token_ids` that are guesses (`cluster.engine.drafts`)


class StepPlan(msgspec.Struct, frozen=True):
    """A packed batch. `copies` (source, destination) blocks are copied before anything is computed.
    `longest_s`: how long the step may take with drafts in it; 0: it brings none."""

    rows: Sequence[Row]  # a tuple, or `cluster.engine.following.FollowingRows`
    copies: tuple[tuple[BlockId, BlockId], ...] = ()
    longest_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


class PlainOutputs(Sequence[TokenOutput]):
    """Tokens of which there is nothing more to say than their ids: made when they are looked at."""

    __slots__ = ("_outputs", "token_ids")

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self._outputs: tuple[TokenOutput, ...] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> TokenOutput: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TokenOutput]: ...
    def __getitem__(self, index: int | slice) -> TokenOutput | Sequence[TokenOutput]:
        return self._made()[index]

    def __iter__(self) -> Iterator[TokenOutput]:
        return iter(self._made())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def _made(self) -> tuple[TokenOutput, ...]:
        if self._outputs is None:
            self._outputs = tuple(map(TokenOutput, self.token_ids))
        return self._outputs

    def __repr__(self) -> str:
        return f"PlainOutputs({self.token_ids})"


class StepOutput(msgspec.Struct, frozen=True):
    """One entry per row of the plan: the sampled token, or None where `sample` was None. `further`: where a
    row's drafts were right, by its index, the tokens after that; none of them but the last ends the request.

    `compute_s` has no wait for histories in it once the engine's thread has handed the output over.
    `num_borrowed`: pieces of its work that were done on cores of workers that rested. `num_drafted`: drafts
    that it brought.
    """

    outputs: Sequence[TokenOutput | None]
    compute_s: float
    num_borrowed: int = 0
    further: Mapping[int, tuple[TokenOutput, ...]] = msgspec.field(default_factory=dict)
    num_drafted: int = 0


class Runner(Protocol):
    """Executes steps, one at a time, on one thread. Owns the model and writes the KV pool."""

    def run(self, plan: StepPlan, await_history: Callable[[], object] | None = None) -> StepOutput:
        """Compute the plan's tokens, write their KV, sample where asked. Deterministic per row:
        a row's bits depend on its own tokens and KV only, never on the other rows.

        `await_history`: the plan's tokens are not in its histories (`SampleSpec.output_ids`) yet. When this
        returns, they are in those that somebody looks at: of requests that look back
        (`cluster.sampling.looks_back`), of all where rows may bring drafts. In others those of a run
        (`cluster.engine.following`) may lack. It is called once, before anything is sampled that looks back.
        None: the plan's tokens are there already.
        """
        ...
