"""Books of workers in a given state: what tests of placement decide on."""

from __future__ import annotations

from typing import Any

from cluster.block_hash import hash_blocks
from cluster.ids import BlockHash, RequestId, WorkerId
from cluster.slo_classes import Targets
from cluster.step_model import StepModel
from cluster.wire.kv_events import KvEvents
from cluster.wire.messages import Role, WorkerLoad, WorkerState
from router.claims import Claim, Phase
from router.config import PolicyConfig
from router.policy import Elastic, Placement, PlacementRequest, Reject
from router.worker_book import WorkerBook
from tests.router.conductor_peers import BLOCK_SIZE, make_register

CPU = StepModel(1e-3, 9e-3, 2e-4, 1e-7, 1e-8)  # 5000 tokens/s
DEFAULTS = Targets(2.0, 0.1)
POLICY = Elastic(PolicyConfig(), DEFAULTS)


def role_of(name: str) -> Role:
    return Role.PREFILL if name.startswith("p") else Role.DECODE


def hashes(num_tokens: int, start: int = 0) -> tuple[BlockHash, ...]:
    return tuple(hash_blocks(range(start, start + num_tokens), BLOCK_SIZE, "test", ""))


class Book:
    """A `WorkerBook` with short ways to say what its workers are up to."""

    def __init__(self, *names: str, model: StepModel | None = CPU, **settings: int) -> None:
        self.book = WorkerBook(stall_timeout_s=10.0)
        self.num_others = 0
        for name in names:
            self.join(name, model=model, **settings)

    def join(
        self,
        name: str,
        model: StepModel | None = CPU,
        *,
        max_model_len: int = 100_000,
        num_blocks: int = 10_000,
        max_num_seqs: int = 32,
        **load: Any,
    ) -> None:
        register = make_register(name, role_of(name), num_blocks=num_blocks, max_num_seqs=max_num_seqs)
        register = type(register)(
            **{field: getattr(register, field) for field in register.__struct_fields__}
            | {"max_model_len": max_model_len}
        )
        self.book.join(register, 0.0)
        self.beat(name, model=model, **load)

    def beat(
        self,
        name: str,
        *,
        now: float = 0.0,
        state: WorkerState = WorkerState.READY,
        model: StepModel | None = CPU,
        **load: Any,
    ) -> None:
        self.book.heartbeat(WorkerId(name), state, WorkerLoad(step_model=model, **load), now)

    def cached(self, name: str, block_hashes: tuple[BlockHash, ...]) -> None:
        """The worker reports these blocks, and no others."""
        report = KvEvents(sequence=0, begins=True, stored=list(block_hashes), removed=[])
        assert self.book.cache_changed(WorkerId(name), report)

    def hold(self, name: str, num_blocks: int = 0) -> None:
        """Somebody takes a slot and blocks."""
        self.num_others += 1
        claim = Claim(Phase.HELD, 1, num_blocks=num_blocks)
        self.book.place(WorkerId(name), RequestId(f"other-{self.num_others}"), claim)

    def place(self, request: PlacementRequest) -> Placement | Reject:
        return POLICY.place(self.book.view(), request, 0.0)

    def placed(self, request: PlacementRequest) -> tuple[str | None, str]:
        decision = self.place(request)
        assert isinstance(decision, Placement), decision
        return decision.prefill, decision.decode

    def take(self, name: str, request: PlacementRequest, decision: Placement) -> None:
        """The placed request's claims, as the conductor makes them."""
        prompt = Claim(
            Phase.PREFILL,
            request.num_tokens,
            new_tokens=decision.prefill_tokens,
            num_blocks=decision.prefill_blocks or decision.decode_blocks,
            stays=decision.prefill is None,
            hashes=tuple(request.hashes),
        )
        self.book.place(decision.prefill or decision.decode, RequestId(name), prompt)
        if decision.prefill is not None:
            claim = Claim(Phase.COMING, request.num_tokens, num_blocks=decision.decode_blocks)
            self.book.place(decision.decode, RequestId(name), claim)


def ask(num_tokens: int = 100, max_tokens: int = 10, **changes: Any) -> PlacementRequest:
    values: dict[str, Any] = {
        "num_tokens": num_tokens,
        "num_prompt_tokens": num_tokens,
        "max_tokens": max_tokens,
        "hashes": hashes(num_tokens),
        "targets": DEFAULTS,
        "expected_output": float(max_tokens),
    }
    return PlacementRequest(**(values | changes))
