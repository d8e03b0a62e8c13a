"""The live router and a live worker under load, in virtual time: which waits were predicted, and which came.

1. A `Load` starts a router and one decode worker that computes its own prompts, calibrated as a live one is.
2. `closed` keeps so many requests in flight, each client sending its next one when the last has ended; `open`
   sends at a rate, whatever becomes of them. Prompts and answers have one length, and share no prefix.
3. Each request is a `Call`: when it was sent, the wait that its placement predicted, when its first and last
   token came, or after how long it was told to come again.

Router, scheduler and admission are the live ones; only the engine is simulated, by what a step costs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.simulator.clients import Caller, Workload
from bench.simulator.decode_process import DecodeProcess
from bench.simulator.model import VOCABULARY
from bench.simulator.router_process import RouterProcess
from bench.simulator.scenario import BLOCK_BYTES, Scenario
from bench.simulator.site import Site
from cluster.errors import BatonError, Overloaded
from cluster.ids import Epoch, RequestId, WorkerId
from cluster.request import LifecycleEvent, RequestSpec
from cluster.sampling import SamplingParams
from cluster.step_model import StepModel
from cluster.worker_io import Calibrated
from decode_worker.core import DecodeConfig
from prefill_worker.core import PrefillConfig
from router.conductor_io import Lifecycle
from router.config import ConductorConfig
from router.delivery import Delivery, Failed

if TYPE_CHECKING:
    from collections.abc import Callable

_START_S = 1.0
_BLOCK_TOKENS = 16
_MAX_SEQS = 128


@dataclass(slots=True)
class Call:
    """Times are the simulation's."""

    sent_s: float
    predicted_s: float | None = None
    first_s: float | None = None
    finish_s: float | None = None
    retry_after_s: float | None = None
    error: BatonError | None = None

    @property
    def ttft_s(self) -> float:
        assert self.first_s is not None, "its first token has not come"
        return self.first_s - self.sent_s


@dataclass(frozen=True, slots=True)
class Shape:
    """What requests are, and what a step costs: `step_s` + `token_s` per token."""

    num_prompt: int = 256
    num_output: int = 128
    step_s: float = 0.025
    token_s: float = 0.002


class _Caller(Caller):
    """One request; then `on_end`."""

    def __init__(self, site: Site, workload: Workload, on_end: Callable[[Call], None]) -> None:
        super().__init__(site, workload, 0)
        self.call = Call(site.queue.now)
        self._on_end = on_end

    def deliver(self, delivery: Delivery) -> None:
        if isinstance(delivery, Failed):
            self.call.error = delivery.error
            if isinstance(delivery.error, Overloaded):
                self.call.retry_after_s = delivery.error.retry_after_s
            return
        self.num_tokens += len(delivery.outputs)
        if self.call.first_s is None:
            self.call.first_s = self._site.queue.now

    def lifecycle(self, life: Lifecycle) -> None:
        assert self.router is not None
        if life.event is LifecycleEvent.PLACED and self.call.predicted_s is None:
            attempt = self.router.conductor._requests[self.request].attempt
            assert attempt is not None
            waited_s = self._site.queue.now - self.call.sent_s
            self.call.predicted_s = waited_s + attempt.predicted_ttft_s

    def ended(self) -> None:
        if self.call.error is None:
            self.call.finish_s = self._site.queue.now
        self._on_end(self.call)


class Load:
    """Owns the processes of one run, and its calls in the order they were sent."""

    def __init__(
        self, shape: Shape | None = None, seed: int = 0, conductor: ConductorConfig | None = None
    ) -> None:
        self.calls: list[Call] = []
        self._shape = shape = shape or Shape()
        self._rng = random.Random(f"{seed}/loops")
        num_blocks = _MAX_SEQS * (-(-(shape.num_prompt + shape.num_output) // _BLOCK_TOKENS) + 1)
        scenario = Scenario(
            seed=seed,
            num_requests=1,
            num_clients=0,
            think_s=0.0,
            num_routers=1,
            num_prefill=0,
            num_decode=1,
            in_place=True,
            block_size=_BLOCK_TOKENS,
            prefill_blocks=0,
            decode_blocks=num_blocks,
            max_prompt_tokens=shape.num_prompt,
            max_new_tokens=shape.num_output,
            prefill=PrefillConfig(block_bytes=BLOCK_BYTES),
            decode=DecodeConfig(block_bytes=BLOCK_BYTES, max_num_seqs=_MAX_SEQS),
            conductor=conductor or ConductorConfig(),
            step_s=shape.step_s,
            token_s=shape.token_s,
        )
        self.site = Site(scenario)
        self._workload = Workload(self.site, self.site.queue.stop)
        self._router = RouterProcess(self.site, 0, Epoch(1))
        self.site.routers.append(self._router)
        worker = DecodeProcess(self.site, WorkerId("decode-0"), Epoch(1))
        self.site.add(worker)
        worker.start()
        worker.dispatch(Calibrated(StepModel(shape.step_s, 0.0, shape.token_s, 0.0, 0.0)))
        self.site.queue.run(_START_S)

    def closed(self, num_clients: int, num_requests: int) -> list[Call]:
        """All begin at once. One that is refused sends its next request when it was told to."""
        queue = self.site.queue
        last = len(self.calls) + num_requests
        running = 0

        def send() -> None:
            nonlocal running
            if len(self.calls) < last:
                running += 1
                self._send(ended)

        def ended(call: Call) -> None:
            nonlocal running
            running -= 1
            if running == 0 and len(self.calls) >= last:
                queue.stop()
            elif call.error is None:
                send()
            else:
                queue.after(call.retry_after_s or 1.0, send)

        for _ in range(num_clients):
            send()
        assert queue.run(queue.now + 100.0 * num_requests), "it hangs"
        return self.calls[last - num_requests :]

    def open(self, rate: float, seconds: float) -> list[Call]:
        """Arrivals of a Poisson process for so long; returns at the last of them."""
        first, end_s = len(self.calls), self.site.queue.now + seconds
        while (at_s := self.site.queue.now + self._rng.expovariate(rate)) < end_s:
            self.site.queue.run(at_s)
            self.one()
        return self.calls[first:]

    def one(self) -> Call:
        """A request now."""
        return self._send(lambda call: None)

    def run(self, seconds: float) -> None:
        """Nothing new comes."""
        self.site.queue.run(self.site.queue.now + seconds)

    def _send(self, on_end: Callable[[Call], None]) -> Call:
        shape = self._shape
        caller = _Caller(self.site, self._workload, on_end)
        self.calls.append(caller.call)
        spec = RequestSpec(
            request=RequestId(f"r{len(self.calls)}"),
            token_ids=tuple(self._rng.randrange(VOCABULARY) for _ in range(shape.num_prompt)),
            sampling=SamplingParams(max_tokens=shape.num_output),
        )
        caller.send(self._router, spec)
        return caller.call
