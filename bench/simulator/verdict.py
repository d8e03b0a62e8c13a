"""How a request may end, and when an error is one that the rules allow.

1. Without any fault injected, a request ends with its tokens, or too large, or past its own deadline.
2. With faults: its attempts are used up; or nothing could serve it just then; or it waited for a place as
   long as it may, or would have had to.
3. Never because workers that run the same protocol broke it: wrong pieces, tokens out of order.
4. No request takes more attempts than it may, or outlives its own deadline, as its router's clock has it.
5. A wanted lease does not expire unless somebody who renews or hears of it was held up (I3).
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from bench.simulator.site import Site
from bench.simulator.violation import Violation
from cluster.errors import BatonError, ContextLengthExceeded, DeadlineExceeded, Overloaded
from cluster.wire.messages import Role
from router.conductor_io import Lifecycle
from router.outcome import BACKLOG, QUEUE_TOO_SLOW

if TYPE_CHECKING:
    from bench.simulator.clients import Client

_SLACK_S = 0.001
_LATE_S = 0.5  # after its deadline a request is over
# What an attempt may never end with, and the rule it would break.
_FORBIDDEN: Final = {
    "bad_kv": "I5",
    "kv_mismatch": "I5",
    "bad_request": "core",
    "a token is missing": "I4",
    "tokens before the request was committed": "I4",
}


class Outcome(Enum):
    """What became of a request."""

    EXACT = "exact"
    STOPPED = "stop string"
    LEFT = "client left"
    ROUTER_CRASHED = "router crashed"
    EXHAUSTED = "attempts used up"
    NOTHING_SERVES = "nothing serves"
    NO_ROOM = "no room in time"
    DEADLINE = "deadline"
    TOO_LARGE = "too large"


def judge(site: Site, client: Client, error: BatonError) -> Outcome:
    """Why this error is allowed.

    Raises:
        Violation: it is not.
    """
    scenario, router, oracle = site.scenario, client.router, client.oracle
    assert router is not None
    assert oracle is not None
    now, spec, limits = router.now(), oracle.spec, scenario.conductor
    if isinstance(error, DeadlineExceeded):
        if spec.deadline_s is not None and now - client.submitted_at >= spec.deadline_s - _SLACK_S:
            return Outcome.DEADLINE
    elif isinstance(error, ContextLengthExceeded):
        needed = len(spec.token_ids) + spec.sampling.max_tokens - 1
        if needed > scenario.decode_blocks * scenario.block_size:
            return Outcome.TOO_LARGE
    elif site.num_faults:
        if client.num_failed + 1 >= limits.max_attempts:
            return Outcome.EXHAUSTED
        if isinstance(error, Overloaded) and any(why in error.message for why in (BACKLOG, QUEUE_TOO_SLOW)):
            return Outcome.NO_ROOM
        if not router.conductor.workers.view().has_ready(Role.DECODE):
            return Outcome.NOTHING_SERVES
        wait_s = limits.recovery_wait_s
        if not client.num_retries:  # a short wait says that nobody was there when it began
            wait_s = min(wait_s, limits.queue_timeout_s)
        if now - client.waiting_since >= wait_s - _SLACK_S:
            return Outcome.NO_ROOM
    raise Violation(
        "end", f"{spec.request} after {client.num_retries} retries: {type(error).__name__}: {error}"
    )


def was_handed_over(life: Lifecycle) -> bool:
    """Of a retry: by a draining worker, so that it does not count as failed."""
    return ": draining: " in life.detail


def judge_attempts(site: Site, client: Client) -> None:
    """After a retry.

    Raises:
        Violation: there was none left.
    """
    most = site.scenario.conductor.max_attempts
    if client.num_failed >= most:
        raise Violation("end", f"{client.request}: {client.num_failed} attempts failed, {most} are the most")


def judge_deadline(client: Client) -> None:
    """When a request is over. Its router may have been held up.

    Raises:
        Violation: that was too late.
    """
    router, deadline_s = client.router, client.spec.deadline_s
    assert router is not None
    if deadline_s is None or router.queue.now - router.undisturbed_since < _LATE_S:
        return
    late_s = router.now() - client.submitted_at - deadline_s
    if late_s > _LATE_S:
        raise Violation("end", f"{client.request}: over {late_s:.2f} s after its deadline")


def judge_lifecycle(site: Site, life: Lifecycle) -> None:
    """Of a retry or a failure.

    Raises:
        Violation: it had no right to happen.
    """
    for words, rule in _FORBIDDEN.items():
        if words in life.detail:
            raise Violation(rule, f"{life.request}: {life.detail}")
    if "lease_expired" in life.detail:
        quiet_s = site.queue.now - site.held_up_until
        if quiet_s > site.scenario.conductor.lease_ttl_s:
            raise Violation("I3", f"{life.request}: {life.detail}; nobody was held up for {quiet_s:.1f} s")
    if not site.num_faults and life.event.name == "RETRIED":
        raise Violation("end", f"{life.request}: a retry without a fault: {life.detail}")
