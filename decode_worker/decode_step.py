"""The step in flight on a decode worker: its rows, what was cancelled meanwhile, and how far it may go on.

1. `DecodeScheduler.plan` makes one for each step that it plans; while steps follow one another with the same
   rows, it stays.
2. `room` says how many tokens all rows can go on by: looked up once, then counted down.
3. `go_on` is the end of a step after which the same rows are in flight again, each with its new token: that
   comes out as one message per router, of which mostly the tokens alone are new.
4. Of the sequences themselves only those histories take their tokens then that the engine looks at. The rest,
   and what the step took, follows when somebody is about to look (`behind`, `settle`): what is cold costs far
   more than what is done there.
"""

from __future__ import annotations

import msgspec

from cluster.engine.batch import PlainOutputs, StepOutput
from cluster.engine.sequence import Sequence, SequenceKey
from cluster.ids import RouterId
from cluster.sampling import FinishReason, TokenOutput
from cluster.wire.messages import LARGEST_RUN_BYTES, NextTokens, TokenRun, pack_run
from cluster.worker_io import Action, ToRouter

# of one router: which, its rows as they are told, and their places if there are others
_Run = tuple[RouterId, bytes, list[int] | None]


class Generated(msgspec.Struct, frozen=True):
    """What a step gave a sequence, at least one token. `token_index` counts this attempt's tokens before."""

    sequence: Sequence
    token_index: int
    outputs: list[TokenOutput]
    finish_reason: FinishReason | None


class DecodeStep:
    """Its scheduler is the only writer."""

    __slots__ = (
        "_histories",
        "_may_draft",
        "_num_on",
        "_runs",
        "_sequences",
        "behind",
        "cancelled",
        "context",
        "is_pure_decode",
        "num_decode_rows",
        "room",
        "rows",
    )

    def __init__(
        self, rows: list[tuple[Sequence, int]], num_decode_rows: int, context: int, may_draft: bool = False
    ) -> None:
        self.rows = rows  # each with as many tokens
        self.num_decode_rows = num_decode_rows  # the first of them
        self.is_pure_decode = len(rows) == num_decode_rows
        self.context = context  # keys that these read, as of the last step that is settled
        self.cancelled: set[SequenceKey] = set()  # gone, but in the step
        # Tokens for which every row, all of which decode, has a place; None: to be looked up. Blocks come
        # between steps that are planned, so it is one less after each step that goes on.
        self.room: int | None = None
        self._runs: list[_Run] | None = None  # the rows, by router; None: to be made
        self._num_on = 0  # steps that these have been told of
        self._sequences = [sequence for sequence, _ in rows]
        self._may_draft = may_draft  # rows may bring drafts, which come of their histories
        self._histories: list[tuple[int, list[int]]] = []  # that the engine looks at, and whose; as `_runs`
        # steps that are told and not booked: tokens, what they took, when each ended
        self.behind: list[tuple[list[int], StepOutput, float]] = []

    @property
    def num_tokens(self) -> int:
        return sum([num_tokens for _, num_tokens in self.rows])

    def has(self, sequence: Sequence) -> bool:
        return any(other is sequence for other in self._sequences)

    def look_for_room(self, block_size: int) -> int:
        """`room`: 0 where a row may have to stand back."""
        rows = self._sequences
        room = min([len(one.block_ids) * block_size - len(one.token_ids) for one in rows]) - len(self.behind)
        self.room = 0 if any([one.pace.yields for one in rows]) else room
        return self.room

    def go_on(self, output: StepOutput, now: float) -> list[Action] | None:
        """Every row goes on with its token of `output`: what to tell of that. None, and nothing is changed:
        there is more in it than a token each, a row was cancelled, or who they are is too long for a run."""
        outputs = output.outputs
        if self.cancelled or output.further or not isinstance(outputs, PlainOutputs):
            return None
        token_ids = outputs.token_ids
        if self._runs is None:
            runs = _runs_of(self._sequences)
            if any(len(packed) > LARGEST_RUN_BYTES for _, packed, _ in runs):
                return None
            self._runs, self._num_on = runs, 0
            self._histories = [
                (place, sequence.output_ids)
                for place, sequence in enumerate(self._sequences)
                if sequence.looks_back or self._may_draft
            ]
        for place, history in self._histories:
            history.append(token_ids[place])
        self.behind.append((token_ids, output, now))
        if self.room is not None:
            self.room -= 1
        num_on = self._num_on
        self._num_on += 1
        told: list[Action] = []
        for router, run, places in self._runs:
            own = token_ids if places is None else [token_ids[place] for place in places]
            told.append(ToRouter(router, NextTokens(run=run, num_on=num_on, token_ids=own)))
        return told

    def settle(self) -> list[tuple[StepOutput, float]]:
        """Sequences take the tokens of the steps `behind`: before anybody else reads or writes them. What
        these steps told, and when."""
        if not self.behind:
            return []
        settled, self.behind = self.behind, []
        columns = zip(*[token_ids for token_ids, _, _ in settled], strict=True)
        for sequence, token_ids in zip(self._sequences, columns, strict=True):
            sequence.catch_up(token_ids)
        return [(output, now) for _, output, now in settled]

    def went_on(self, num_tokens: int) -> None:
        """Rows got `num_tokens` together, perhaps some of them more than one; booked elsewhere."""
        self.context += num_tokens
        self.room = self._runs = None


def _runs_of(rows: list[Sequence]) -> list[_Run]:
    places: dict[RouterId, list[int]] = {}
    for place, sequence in enumerate(rows):
        places.setdefault(sequence.router, []).append(place)
    return [
        (router, _packed([rows[place] for place in own]), own if len(places) > 1 else None)
        for router, own in places.items()
    ]


def _packed(rows: list[Sequence]) -> bytes:
    run = TokenRun([x.request for x in rows], [x.attempt for x in rows], [x.num_generated for x in rows])
    return pack_run(run)
