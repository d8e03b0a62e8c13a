"""The step after a step, where nothing is to be decided for it: every row goes on with the tokens it has got.

A worker's core gives leave for it while a step runs (`WorkerCore.may_go_on`); the engine's thread then begins
the next step at once, and the core hears of both together. Most steps of a worker that decodes are such, so
what they share is found out once: a `Run` is the rows of the step that was planned, and each step after it
is that, a number of steps, and a token for each row. Whoever knows the run counts on; for anybody else
`FollowingRows` are rows, made when they are looked at. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from cluster.engine.batch import PlainOutputs, Row, SampleSpec, StepOutput, StepPlan
from cluster.sampling import BROKEN_TOKEN_ID, finish_reason_at


class Run:
    """Rows that go on together, a token each per step, and when that can end. Its fields do not change."""

    __slots__ = ("ends", "num_steps", "rows", "specs")

    def __init__(self, rows: Sequence[Row], specs: list[SampleSpec]) -> None:
        """`rows` are those of a step that has just been computed; `specs` what each samples by."""
        self.rows = rows
        self.specs = specs
        self.num_steps = min([spec.params.max_tokens - len(spec.output_ids) for spec in specs])
        # a token among these may end a row
        self.ends = {BROKEN_TOKEN_ID}
        for spec in specs:
            self.ends.update(spec.params.eos_token_ids, spec.params.stop_token_ids)


class FollowingRows(Sequence[Row]):
    """The rows of `run`, `num_on` steps on; row i brings `token_ids[i]`."""

    __slots__ = ("_rows", "num_on", "run", "token_ids")

    def __init__(self, run: Run, num_on: int, token_ids: list[int]) -> None:
        self.run = run
        self.num_on = num_on
        self.token_ids = token_ids
        self._rows: list[Row] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self._made()[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._made())

    def _made(self) -> list[Row]:
        if self._rows is None:
            self._rows = [
                _next_row(row, row.start + len(row.token_ids) - 1 + self.num_on, token_id)
                for row, token_id in zip(self.run.rows, self.token_ids, strict=True)
            ]
        return self._rows


def following_plan(plan: StepPlan, output: StepOutput) -> StepPlan | None:
    """The plan in which each row of `plan`, which has no drafts itself, brings its last token of `output`,
    and samples again. None: a row has no token, ends with it, or drafts have filled its blocks.

    The histories of `plan` do not hold the tokens of `output` yet, but all before where the request looks
    back; others may lack more of a run, whose length is bounded by its `num_steps`. Its block tables must
    have room for one more.
    """
    if output.further:
        return _after_drafts(plan, output)
    rows, outputs = plan.rows, output.outputs
    if isinstance(rows, FollowingRows):
        run, num_on = rows.run, rows.num_on + 1
    else:
        specs = [row.sample for row in rows if row.sample is not None]
        if not rows or len(specs) < len(rows):
            return None
        run, num_on = Run(rows, specs), 1
    if num_on >= run.num_steps:
        return None
    if isinstance(outputs, PlainOutputs):
        token_ids = outputs.token_ids
    else:
        token_ids = [one.token_id for one in outputs if one is not None]
        if len(token_ids) < len(outputs):
            return None
    if not run.ends.isdisjoint(token_ids) and any(map(_ends, run.specs, token_ids)):
        return None
    return StepPlan(FollowingRows(run, num_on, token_ids), longest_s=plan.longest_s)


def _after_drafts(plan: StepPlan, output: StepOutput) -> StepPlan | None:
    """Rows that went on by one token and more."""
    rows = []
    for index, (row, token) in enumerate(zip(plan.rows, output.outputs, strict=True)):
        spec, further = row.sample, output.further.get(index, ())
        if spec is None or token is None:
            return None
        start = row.start + len(row.token_ids) + len(further)
        if further:
            token = further[-1]
            if start >= row.end:
                return None
        if _ends(spec, token.token_id, 1 + len(further)):
            return None
        rows.append(_next_row(row, start, token.token_id))
    return StepPlan(tuple(rows), longest_s=plan.longest_s)


def _ends(spec: SampleSpec, token_id: int, num_new: int = 1) -> bool:
    """Whether `token_id`, the last of at least `num_new` that are not in its history, ends a request."""
    return finish_reason_at(spec.params, token_id, len(spec.output_ids) + num_new) is not None


def _next_row(row: Row, start: int, token_id: int) -> Row:
    return Row(row.request, row.attempt, (token_id,), start, row.block_ids, row.sample, None, row.end)
