"""Where requests meet their key's limits: the gateway asks here, and gives back here.

The limits are this router's own (`QuotaBook`), or shared with others (`Sharing`).

1. `look` refuses a request before its body is read, if its key may not send any now.
2. `take` refuses it with 429, `Retry-After` and the limits' standing, or returns an `Admission`.
3. `Admission.settle` when the reply is over, with the tokens it has cost.

Without keys there are no limits, and all of it does nothing.
"""

from __future__ import annotations

from cluster.clock import Clock
from cluster.errors import RateLimited
from cluster.metrics import Metrics
from router.api_keys import ApiKey
from router.job import Job
from router.quotas.book import Hold, QuotaBook, Wait
from router.quotas.headers import Headers, duration, limit_headers
from router.quotas.limits import Demand, KeyLimits, Limit
from router.quotas.sharing import Sharing


def demand_of(job: Job) -> Demand:
    """Prompts count once, however many answers they get."""
    most = sum(sampling.max_tokens for sampling in job.sampling) * job.num_candidates
    return Demand(sum(map(len, job.prompts)), most)


class Admission:
    """One request within its limits; settle it once."""

    def __init__(self, gate: QuotaGate, key: ApiKey | None, hold: Hold | None) -> None:
        self._gate = gate
        self._key = key
        self._hold = hold

    def headers(self) -> Headers:
        """Where the limits stand now."""
        return () if self._key is None else self._gate.headers(self._key)

    def settle(self, num_tokens: int | None) -> None:
        """The request is over: `num_tokens` is what it cost; None: it was failed by us and counts nowhere."""
        if self._hold is not None:
            self._gate.settle(self._hold, num_tokens)
            self._hold = None


class QuotaGate:
    """Belongs to one event loop."""

    def __init__(self, clock: Clock, metrics: Metrics, sharing: Sharing | None = None) -> None:
        self._clock = clock
        self._metrics = metrics
        self._sharing = sharing
        self._own = QuotaBook()
        self._book = self._own if sharing is None else sharing.book

    def look(self, key: ApiKey | None) -> None:
        """
        Raises:
            RateLimited: no request of this key can be served now, however small.
        """
        if key is None or not key.limits.is_limited:
            return
        wait = self._book.look(key.tenant, key.limits, self._clock.now())
        if wait is not None:
            raise self._refusal(key, wait, Demand(0, 0))

    async def take(self, key: ApiKey | None, demand: Demand) -> Admission:
        """Waits for others at most as long as the shared state may take.

        Raises:
            RateLimited: nothing was taken.
        """
        if key is None or not key.limits.is_limited:
            return Admission(self, None, None)
        if self._sharing is None:
            verdict = self._own.take(key.tenant, key.limits, demand, self._clock.now())
        else:
            verdict = await self._sharing.take(key.tenant, key.limits, demand)
        if isinstance(verdict, Wait):
            raise self._refusal(key, verdict, demand)
        return Admission(self, key, verdict)

    def settle(self, hold: Hold, num_tokens: int | None) -> None:
        counts = num_tokens is not None
        self._book.settle(hold, num_tokens or 0, self._clock.now(), counts=counts)

    def headers(self, key: ApiKey) -> Headers:
        return limit_headers(self._book.standing(key.tenant, key.limits, self._clock.now()))

    def quiet(self) -> bool:
        """Whether nothing is held."""
        return self._book.quiet()

    def _refusal(self, key: ApiKey, wait: Wait, demand: Demand) -> RateLimited:
        self._metrics.observe_quota_refused(wait.limit.value)
        headers = self.headers(key)
        if wait.retry_after_s is None:
            headers += ((b"x-should-retry", b"false"),)
        return RateLimited(
            _message(key.limits, wait, demand), retry_after_s=wait.retry_after_s, headers=headers
        )


def _message(limits: KeyLimits, wait: Wait, demand: Demand) -> str:
    if wait.retry_after_s is None:
        return (
            f"The prompt has {demand.num_prompt_tokens} tokens, more than the {limits.tokens_per_min} that "
            "this API key may use in a minute: it cannot be served."
        )
    what = {
        Limit.REQUESTS: f"{limits.requests_per_min} requests per minute",
        Limit.TOKENS: f"{limits.tokens_per_min} tokens per minute, prompt and `max_tokens` together",
        Limit.CONCURRENT: f"{limits.concurrent} requests at once",
    }[wait.limit]
    return f"This API key may use {what}. Try again in {duration(wait.retry_after_s)}."
