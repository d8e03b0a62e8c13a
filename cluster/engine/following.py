"""The step after a step, where nothing is to be decided for it: every row goes on with the tokens it has got.

A worker's core gives leave for it while a step runs (`WorkerCore.may_go_on`); the engine's thread then begins
the next step at once, and the core hears of both together. Pure.
"""

from __future__ import annotations

from cluster.engine.batch import Row, StepOutput, StepPlan
from cluster.sampling import finish_reason_at


def following_plan(plan: StepPlan, output: StepOutput) -> StepPlan | None:
    """The plan in which each row of `plan`, which has no drafts itself, brings its last token of `output`,
    and samples again. None: a row has no token, ends with it, or drafts have filled its blocks.

    The histories of `plan` do not hold the tokens of `output` yet. Its block tables must have room for one.
    """
    rows = []
    for index, (row, token) in enumerate(zip(plan.rows, output.outputs, strict=True)):
        spec = row.sample
        if spec is None or token is None:
            return None
        num_new, start = 1, row.start + len(row.token_ids)
        if further := output.further.get(index):
            num_new += len(further)
            start += len(further)
            token = further[-1]
            if start >= row.end:
                return None
        if finish_reason_at(spec.params, token.token_id, len(spec.output_ids) + num_new) is not None:
            return None
        rows.append(
            Row(row.request, row.attempt, (token.token_id,), start, row.block_ids, spec, None, row.end)
        )
    return StepPlan(tuple(rows), longest_s=plan.longest_s)
