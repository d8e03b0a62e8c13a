"""Where a request goes while somebody is idle, in a pool of equals: what `router.elastic.place` would say, at
a fifth of the price.

In such a pool all workers cost the same, so placement takes the worker with the soonest first token and, of
those within `tie` of it, the one that was placed on longest ago; a prompt stays where it is computed. An idle
worker computes

    own / 0.95 + fixed + floor

from now, and one that decodes, or soon will, needs at least half a step and has at most the share

    1 - (fixed + per_token + per_context * prompt) / step

of a step for it. If that is later by more than the tie, nobody but idle workers is chosen from. Where it is
not, or anything else is in doubt, there is no answer here, and `place` decides.
"""

from __future__ import annotations

from cluster.slo_classes import Targets
from cluster.step_model import StepModel, StepWork
from router.choosing import is_any
from router.elastic import Ask, ElasticSettings
from router.fleet import Fleet

_IDLE_SHARE = 0.95  # of a step, for prompts on an idle worker: as `router.elastic` has it
_ROUNDING = 1e-9


def idle_worker(
    fleet: Fleet, ask: Ask, model: StepModel, targets: Targets, settings: ElasticSettings
) -> int | None:
    """The row that `place` would choose as P and D; None: ask it.

    Args:
        fleet: workers of one kind, `model`, who do everything and have no measured edges.
        ask: without a known prefix, session or choice of workers.
    """
    if not _are_idle_ones_best(fleet, ask, model, targets, settings):
        return None
    idle = ((fleet.rows + fleet.queued_load_s) == 0).nonzero()[0]
    if not len(idle):
        return None
    more = fleet.kv_used + fleet.kv_promised
    more += fleet.work_s
    more += fleet.context
    more += fleet.coming_rows
    if is_any(more[idle] != 0):
        return None  # somebody is about to have something to do, and is as soon as who has not
    return int(idle[fleet.last_placed[idle].argmin()])


def _are_idle_ones_best(
    fleet: Fleet, ask: Ask, model: StepModel, targets: Targets, settings: ElasticSettings
) -> bool:
    """An idle worker is well in time, has room, and is sooner than any other by more than the tie."""
    limit_s = min(targets.tpot_s, targets.gap_s) * settings.safety
    own_s = model.per_token_s + model.per_attention_s * ((ask.num_tokens + 1) / 2)
    own_s *= ask.num_tokens
    ttft_s = own_s / _IDLE_SHARE + model.fixed_s + model.floor_s
    share = 1 - (model.fixed_s + model.per_token_s + model.per_context_s * ask.num_tokens) / limit_s
    others_s = own_s / max(share, settings.min_share) + limit_s / 2
    return (
        ttft_s * (1 + _ROUNDING) <= settings.early * targets.ttft_s
        and ttft_s * (1 + settings.tie) * (1 + _ROUNDING) < others_s
        and model.step_s(StepWork(1, ask.num_tokens)) * (1 + _ROUNDING) <= limit_s * settings.local_bonus
        and ask.num_tokens + 1 <= fleet.kv_tokens.item(0)
    )
