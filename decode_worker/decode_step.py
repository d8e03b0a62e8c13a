"""The step in flight on a decode worker: its rows, what was cancelled meanwhile, and how far it may go on.

1. `DecodeScheduler.plan` makes one for each step that it plans; while steps follow one another with the same
   rows, it stays.
2. `has_room` says whether all rows can go on by one more token: looked up once, then counted down.
3. `go_on` is the end of a step after which the same rows are in flight again, each with its new token: that
   is booked, and comes out as one message per router, of which mostly the tokens alone are new.
4. Of the sequences themselves only the histories take their tokens then, which the engine reads. The rest,
   and what the step took, follows when somebody is about to look (`behind`, `settle`): what is cold costs far
   more than what is done there.
"""

from __future__ import annotations

import msgspec

from cluster.engine.batch import StepOutput
from cluster.engine.sequence import Sequence, SequenceKey
from cluster.ids import RouterId
from cluster.sampling import FinishReason, TokenOutput
from cluster.wire.messages import NextTokens, TokenRun, pack_run
from cluster.worker_io import Action, ToRouter


class Generated(msgspec.Struct, frozen=True):
    """What a step gave a sequence, at least one token. `token_index` counts this attempt's tokens before."""

    sequence: Sequence
    token_index: int
    outputs: list[TokenOutput]
    finish_reason: FinishReason | None


class DecodeStep:
    """Its scheduler is the only writer."""

    __slots__ = (
        "_columns",
        "_histories",
        "_room",
        "_sequences",
        "behind",
        "cancelled",
        "context",
        "is_pure_decode",
        "num_decode_rows",
        "rows",
    )

    def __init__(self, rows: list[tuple[Sequence, int]], num_decode_rows: int, context: int) -> None:
        self.rows = rows  # each with as many tokens
        self.num_decode_rows = num_decode_rows  # the first of them
        self.is_pure_decode = len(rows) == num_decode_rows
        self.context = context  # keys that these read
        self.cancelled: set[SequenceKey] = set()  # gone, but in the step
        self._room: int | None = None  # tokens for which every row has a place; None: to be looked up
        self._columns: list[_Columns] | None = None  # of the rows, by router; None: to be made
        self._sequences = [sequence for sequence, _ in rows]
        self._histories = [sequence.output_ids for sequence in self._sequences]
        self.behind: list[tuple[StepOutput, float]] = []  # steps whose tokens are in the histories alone, ends

    @property
    def num_tokens(self) -> int:
        return sum([num_tokens for _, num_tokens in self.rows])

    def has(self, sequence: Sequence) -> bool:
        return any(other is sequence for other in self._sequences)

    def has_room(self, block_size: int) -> bool:
        """Whether every row, all of which decode, has a place for the token it is about to get, and none may
        have to stand back. Blocks come between steps that are planned, so there is one place less after each
        step that goes on."""
        if self._room is None:
            rows = self._sequences
            room = min([len(one.block_ids) * block_size - len(one.token_ids) for one in rows])
            room -= len(self.behind)
            self._room = 0 if any([one.pace.yields for one in rows]) else room
        return self._room > 0

    def go_on(self, token_ids: list[int]) -> list[Action]:
        """Every row has got its token, none has ended, and none was cancelled."""
        if self._columns is None:
            self._columns = _columns_of(self._sequences)
        for history, token_id in zip(self._histories, token_ids, strict=True):
            history.append(token_id)
        if self._room is not None:
            self._room -= 1
        return [columns.next(token_ids) for columns in self._columns]

    def settle(self) -> list[tuple[StepOutput, float]]:
        """Sequences are as their histories say: before anybody else reads or writes them. The steps that were
        `behind`."""
        settled, self.behind = self.behind, []
        for sequence in self._sequences:
            sequence.catch_up(len(settled))
        return settled

    def went_on(self, num_tokens: int) -> None:
        """Rows got `num_tokens` together, perhaps some of them more than one; booked elsewhere."""
        self.context += num_tokens
        self._room = self._columns = None


class _Columns:
    """The rows of one router: all of the step's, or those at `places`."""

    __slots__ = ("_num_on", "_places", "_router", "_run")

    def __init__(self, router: RouterId, sequences: list[Sequence], places: list[int] | None) -> None:
        self._router = router
        self._run = pack_run(
            TokenRun(
                [one.request for one in sequences],
                [one.attempt for one in sequences],
                [one.num_generated for one in sequences],
            )
        )
        self._num_on = 0
        self._places = places

    def next(self, token_ids: list[int]) -> ToRouter:
        num_on, places = self._num_on, self._places
        self._num_on += 1
        return ToRouter(
            self._router,
            NextTokens(
                run=self._run,
                num_on=num_on,
                token_ids=token_ids if places is None else [token_ids[place] for place in places],
            ),
        )


def _columns_of(rows: list[Sequence]) -> list[_Columns]:
    places: dict[RouterId, list[int]] = {}
    for place, sequence in enumerate(rows):
        places.setdefault(sequence.router, []).append(place)
    return [
        _Columns(router, [rows[place] for place in own], own if len(places) > 1 else None)
        for router, own in places.items()
    ]
