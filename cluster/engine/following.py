"""The step after a step, where nothing is to be decided for it: every row goes on with the token it has got.

A worker's core gives leave for it while a step runs (`WorkerCore.may_go_on`); the engine's thread then begins
the next step at once, and the core hears of both together. Pure.
"""

from __future__ import annotations

from cluster.engine.batch import Row, StepOutput, StepPlan
from cluster.sampling import finish_reason_at


def following_plan(plan: StepPlan, output: StepOutput) -> StepPlan | None:
    """The plan in which each row of `plan` brings its token of `output`, and samples again. None: a row has
    no token, or ends with it.

    The histories of `plan` do not hold the tokens of `output` yet. Its block tables must have room for them.
    """
    rows = []
    for row, token in zip(plan.rows, output.outputs, strict=True):
        spec = row.sample
        if spec is None or token is None:
            return None
        if finish_reason_at(spec.params, token.token_id, len(spec.output_ids) + 1) is not None:
            return None
        start = row.start + len(row.token_ids)
        rows.append(Row(row.request, row.attempt, (token.token_id,), start, row.block_ids, spec))
    return StepPlan(tuple(rows))
