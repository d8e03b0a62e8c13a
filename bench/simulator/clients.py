"""Clients in a closed loop: what they ask for, and whether they got exactly that.

Life of a request:

1. A client pauses, draws a prompt (fresh, with a head that others share, or the next turn of its chat) and
   submits it to a router that is up.
2. Every delivery is compared with the oracle at once: next index, right token, right end (I4, I8).
3. Some find a stop string on the way (`ClientFinished`); a fault may make one leave (`ClientLeft`).
4. It ends exactly once. An error has to be one that the rules allow at that moment (`verdict`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from bench.simulator.model import EOS, VOCABULARY, Oracle
from bench.simulator.site import Site
from bench.simulator.verdict import (
    Outcome,
    judge,
    judge_attempts,
    judge_deadline,
    judge_lifecycle,
    was_handed_over,
)
from bench.simulator.violation import Violation
from cluster.errors import BatonError
from cluster.ids import RequestId
from cluster.request import LifecycleEvent, RequestSpec
from cluster.sampling import SamplingParams
from router.conductor_io import ClientFinished, ClientLeft, Lifecycle
from router.delivery import Delivery, Failed

if TYPE_CHECKING:
    from bench.simulator.router_process import RouterProcess

_NO_ROUTER_S = 0.1
_AFTER_ERROR_S = 2.0


class Workload:
    """Draws requests; owns how many are still to come and the tally of what became of them."""

    def __init__(self, site: Site, on_all_ended: Callable[[], None]) -> None:
        self._site = site
        self._rng = random.Random(f"{site.scenario.seed}/workload")
        self._on_all_ended = on_all_ended
        self._num_drawn = 0
        self._num_ended = 0
        length = site.scenario.max_prompt_tokens
        self._heads = [self._tokens(length) for _ in range(3)]
        self.outcomes: Counter[Outcome] = Counter()
        self.touched: Counter[tuple[str, Outcome]] = Counter()  # (fault, outcome) |-> requests it hit

    @property
    def is_over(self) -> bool:
        """Nothing more is to be submitted."""
        return self._num_drawn >= self._site.scenario.num_requests

    def draw(self, so_far: list[int] | None) -> RequestSpec:
        """The next request. `so_far`: the client's last prompt and its answer."""
        rng, below, scenario = self._rng, self._below, self._site.scenario
        self._num_drawn += 1
        longest = scenario.max_prompt_tokens
        if so_far is not None and len(so_far) < longest and rng.random() < 0.4:
            prompt = so_far
        else:
            head = self._heads[below(len(self._heads))]
            prompt = head[: (0, 0, below(longest))[below(3)]]
        room = longest - len(prompt)
        prompt = prompt + self._tokens(1 + below(min(room, 16)) if room > 0 else 0)
        sampling = SamplingParams(
            max_tokens=1 + below(scenario.max_new_tokens),
            seed=below(3),
            eos_token_ids=(EOS,) if rng.random() < 0.7 else (),
            stop_token_ids=(1, 2) if rng.random() < 0.3 else (),
            min_tokens=(0, 0, 3)[below(3)],
        )
        spec = RequestSpec(
            request=RequestId(f"r{self._num_drawn}"),
            token_ids=tuple(prompt),
            sampling=sampling,
            cache_salt="" if rng.random() < 0.8 else "other",
            deadline_s=self._deadline_s() if rng.random() < 0.05 else None,
            tenant=f"tenant-{self._num_drawn % 3}",
            share=1.0 + self._num_drawn % 3,
        )
        self._site.oracles[spec.request] = Oracle(spec)
        return spec

    def _deadline_s(self) -> float:
        """Some are short where there are faults: without any, every request is to end with its tokens."""
        return 1.0 if self._site.scenario.fault_every is not None and self._num_drawn % 2 else 30.0

    def stop_after(self, oracle: Oracle) -> int | None:
        """After how many tokens the client finds its stop string."""
        return self._rng.randint(1, len(oracle.outputs)) if self._rng.random() < 0.1 else None

    def pause_s(self) -> float:
        think_s = self._site.scenario.think_s
        return self._rng.expovariate(1 / think_s) if think_s else 0.0

    def ended(self, outcome: Outcome, touched: set[str]) -> None:
        self.outcomes[outcome] += 1
        for fault in touched:
            self.touched[fault, outcome] += 1
        self._num_ended += 1
        if self._num_ended >= self._site.scenario.num_requests:
            self._on_all_ended()

    def _tokens(self, count: int) -> list[int]:
        return [self._below(VOCABULARY) for _ in range(count)]

    def _below(self, limit: int) -> int:
        """As `Random.randrange`, at a third of its price."""
        draw, num_bits = self._rng.getrandbits, limit.bit_length()
        value = draw(num_bits)
        while value >= limit:
            value = draw(num_bits)
        return value


class Client:
    """One user, with at most one request at a time."""

    def __init__(self, site: Site, workload: Workload, index: int) -> None:
        self._site = site
        self._workload = workload
        self._index = index
        self._so_far: list[int] | None = None
        self.router: RouterProcess | None = None  # of the request under way
        self.oracle: Oracle | None = None
        self.num_tokens = 0
        self.num_retries = 0
        self.num_failed = 0  # retries but those of attempts that a draining worker handed over
        self.touched: set[str] = set()
        self.waiting_since = 0.0  # for a place, in the router's clock
        self.submitted_at = 0.0
        self._stop_after: int | None = None
        self._is_last = False  # the last delivery was made
        self._outcome: Outcome | None = None

    @property
    def spec(self) -> RequestSpec:
        assert self.oracle is not None
        return self.oracle.spec

    @property
    def request(self) -> RequestId:
        return self.spec.request

    def begin(self) -> None:
        """Submit the next request, later if no router takes any."""
        if self._workload.is_over:
            return
        slots = self._site.routers
        routers = [slots[(self._index + step) % len(slots)] for step in range(len(slots))]
        router = next((router for router in routers if router.takes_requests()), None)
        if router is None:
            self._site.queue.after(_NO_ROUTER_S, self.begin)
            return
        spec = self._workload.draw(self._so_far)
        self.oracle = self._site.oracles[spec.request]
        self.router = router
        self.num_tokens = self.num_retries = self.num_failed = 0
        self.touched = set()
        self._stop_after = self._workload.stop_after(self.oracle)
        self._is_last = False
        self._outcome = None
        router.later(self._site.network.delay(), self._submit, router, spec)

    def come_again(self, in_s: float) -> None:
        """It was over its limits: it asks the same router again."""
        assert self.router is not None
        self.router.later(in_s, self._submit, self.router, self.spec)

    def leave(self) -> None:
        """The client closes its connection."""
        router = self.router
        if router is not None and self._outcome is None and self.request in router.clients:
            self._outcome = Outcome.LEFT
            router.later(self._site.network.delay(), router.feed, ClientLeft(self.request, "client left"))

    def router_died(self) -> None:
        """Its request went with the router."""
        self._outcome = Outcome.ROUTER_CRASHED
        self._end()

    # ---- what the router says

    def deliver(self, delivery: Delivery) -> None:
        oracle = self.oracle
        assert oracle is not None
        if self._is_last:
            raise Violation("I4", f"{self.request}: {delivery} after the last delivery")
        if isinstance(delivery, Failed):
            self._is_last = True
            self._failed(delivery.error)
            return
        start, self.num_tokens = self.num_tokens, self.num_tokens + len(delivery.outputs)
        if list(delivery.outputs) != oracle.outputs[start : self.num_tokens]:
            raise Violation("I8", f"{self.request}: tokens {delivery.outputs} at index {start}")
        if delivery.finish_reason is not None:
            self._is_last = True
            if self.num_tokens != len(oracle.outputs) or delivery.finish_reason is not oracle.finish:
                raise Violation(
                    "I8", f"{self.request}: ends after {self.num_tokens}: {delivery.finish_reason}"
                )
            self._outcome = self._outcome or Outcome.EXACT
        elif self._stop_after is not None and self.num_tokens >= self._stop_after and self._outcome is None:
            assert self.router is not None
            self._outcome = Outcome.STOPPED
            self.router.feed(ClientFinished(self.request))

    def lifecycle(self, life: Lifecycle) -> None:
        router = self.router
        assert router is not None
        match life.event:
            case LifecycleEvent.RETRIED:
                self.num_retries += 1
                self.num_failed += not was_handed_over(life)
                self.waiting_since = router.now()
                judge_lifecycle(self._site, life)
                judge_attempts(self._site, self)
            case LifecycleEvent.FAILED:
                judge_lifecycle(self._site, life)

    def ended(self) -> None:
        if self._outcome is None:
            raise Violation("end", f"{self.request}: ended without a last delivery")
        judge_deadline(self)
        self._end()

    def _failed(self, error: BatonError) -> None:
        outcome = judge(self._site, self, error)
        self._outcome = self._outcome or outcome

    def _submit(self, router: RouterProcess, spec: RequestSpec) -> None:
        self.submitted_at = self.waiting_since = router.now()
        router.submit(self, spec)

    def _end(self) -> None:
        outcome, oracle = self._outcome, self.oracle
        assert outcome is not None
        assert oracle is not None
        self.router = self.oracle = None
        self._site.ended_at[oracle.spec.request] = self._site.queue.now
        self._so_far = oracle.tokens if outcome is Outcome.EXACT else None
        self._site.log.note(oracle.spec.request, outcome.value)
        self._workload.ended(outcome, self.touched)
        is_error = outcome not in (Outcome.EXACT, Outcome.STOPPED)
        self._site.queue.after(self._workload.pause_s() + (_AFTER_ERROR_S if is_error else 0.0), self.begin)


class Caller(Client):
    """Sends one request as it is given, in a pool without limits; what is measured of it is its user's."""

    def send(self, router: RouterProcess, spec: RequestSpec) -> None:
        self.oracle = self._site.oracles[spec.request] = Oracle(spec)
        self.router = router
        router.submit(self, spec)

    def come_again(self, in_s: float) -> None:
        raise AssertionError("nobody has limits here")
