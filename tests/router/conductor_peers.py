"""Scripted workers that speak the protocol, and a small world that moves messages between them and a
conductor.

A scripted token is a hash of the whole history, so a resume with one token too many, too few or wrong is seen
in every token after it. Channels are FIFO per direction and pair, and not ordered against each other.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.block_hash import pack_tokens
from cluster.ids import Attempt, Epoch, LeaseId, RequestId, WorkerId
from cluster.request import LifecycleEvent, RequestSpec
from cluster.sampling import FinishReason, SamplingParams, TokenOutput, finish_reason
from cluster.wire.kv_events import RouterSays, WorkerSays
from cluster.wire.messages import (
    Abort,
    AttemptFailed,
    Committed,
    Finish,
    FirstToken,
    Grant,
    Heartbeat,
    KVGeometry,
    Nack,
    NackReason,
    Prefill,
    Register,
    RenewLeases,
    Reserve,
    Role,
    TokenRow,
    Tokens,
    WorkerLoad,
    WorkerState,
)
from router.conductor import Conductor
from router.conductor_io import (
    Action,
    ClientFinished,
    ClientLeft,
    Deliver,
    Ended,
    Event,
    FromWorker,
    Lifecycle,
    Send,
    Submitted,
    Tick,
    WorkerGone,
    WorkerJoined,
)
from router.config import ConductorConfig
from router.delivery import Failed, NewTokens, RequestSummary

EOS = 7
BLOCK_SIZE = 4


def scripted_token(history: Sequence[int]) -> int:
    """The next token after `history`, a printable ASCII byte; EOS about once in 16."""
    digest = zlib.crc32(pack_tokens(history))
    return EOS if digest % 16 == 0 else 32 + (digest >> 4) % 95


def scripted_output(spec: RequestSpec) -> tuple[list[int], FinishReason]:
    """What the request generates undisturbed."""
    outputs: list[int] = []
    while (reason := finish_reason(spec.sampling, outputs)) is None:
        outputs.append(scripted_token([*spec.token_ids, *outputs]))
    return outputs, reason


def make_spec(
    name: str, num_prompt: int = 6, max_tokens: int = 8, *, eos: bool = False, deadline_s: float | None = None
) -> RequestSpec:
    prompt = tuple(1000 + zlib.crc32(f"{name}/{i}".encode()) % 5000 for i in range(num_prompt))
    return RequestSpec(
        request=RequestId(name),
        token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, eos_token_ids=(EOS,) if eos else ()),
        deadline_s=deadline_s,
    )


def make_register(
    worker: str, role: Role, epoch: int = 1, num_blocks: int = 1000, max_num_seqs: int = 8
) -> Register:
    return Register(
        worker=WorkerId(worker),
        role=role,
        epoch=Epoch(epoch),
        pid=1,
        model="scripted",
        fingerprint="scripted/1",
        max_model_len=4000,
        max_num_seqs=max_num_seqs,
        geometry=KVGeometry(
            first_layer=0,
            num_layers=1,
            first_head=0,
            num_heads=1,
            head_dim=8,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            dtype="float32",
        ),
        kv_address="unix:/scripted" if role is Role.DECODE else None,
    )


Key = tuple[RequestId, Attempt]


@dataclass(frozen=True)
class Commit:
    """P → D on the KV stream: everything is there, go on from this token."""

    key: Key
    lease: LeaseId
    output: TokenOutput
    prefill: WorkerId


class ScriptedPrefill:
    """Computes one prompt per step; forgets a request when it is told to, or when it was committed."""

    def __init__(self, register: Register) -> None:
        self.register = register
        self.waiting: dict[Key, Prefill] = {}
        self.committing: dict[Key, Prefill] = {}
        self.out: deque[WorkerSays] = deque()
        self.to_decode: deque[tuple[WorkerId, Epoch, Commit]] = deque()
        self.num_prefills = 0
        self.steps = 0

    def receive(self, message: RouterSays, now: float) -> None:
        match message:
            case Prefill():
                self.waiting[message.request, message.attempt] = message
            case Finish() | Abort():
                self.waiting.pop((message.request, message.attempt), None)
                self.committing.pop((message.request, message.attempt), None)

    def step(self, now: float) -> None:
        self.steps += 1
        if not self.waiting:
            return
        key = next(iter(self.waiting))
        order = self.waiting.pop(key)
        self.num_prefills += 1
        outputs = order.token_ids[order.num_prompt_tokens :]
        token = scripted_token(order.token_ids)
        reason = finish_reason(order.sampling, [*outputs, token])
        self.out.append(
            FirstToken(
                request=order.request,
                attempt=order.attempt,
                output=TokenOutput(token),
                finish_reason=reason,
                cached_tokens=0,
                queue_s=0.25,
                prefill_s=0.5,
            )
        )
        if reason is None:
            self.committing[key] = order
            commit = Commit(key, order.lease, TokenOutput(token), self.register.worker)
            self.to_decode.append((order.decode_worker, order.decode_epoch, commit))

    def load(self) -> WorkerLoad:
        tokens = sum(len(order.token_ids) for order in self.waiting.values())
        return WorkerLoad(waiting=len(self.waiting), queued_prefill_tokens=tokens, steps=self.steps)

    @property
    def num_held(self) -> int:
        return len(self.waiting) + len(self.committing)


@dataclass
class _Lease:
    order: Reserve
    lease: LeaseId
    expires_at: float
    num_blocks: int
    outputs: list[int] = field(default_factory=list)  # of this attempt
    is_decoding: bool = False


class ScriptedDecode:
    """Grants while it has slots and blocks, decodes one token per step and request."""

    def __init__(self, register: Register) -> None:
        self.register = register
        self.leases: dict[Key, _Lease] = {}
        self.out: deque[WorkerSays] = deque()
        self.refused: deque[Commit] = deque()
        self.done: deque[Commit] = deque()
        self.num_expired = 0
        self.max_held = 0
        self.steps = 0
        self.answers = True  # False: RESERVE stays unanswered
        self._next_lease = 0

    def receive(self, message: RouterSays, now: float) -> None:
        match message:
            case Reserve():
                if self.answers:
                    self._reserve(message, now)
            case Finish() | Abort():
                self.leases.pop((message.request, message.attempt), None)
            case RenewLeases(leases=leases):
                for held in self.leases.values():
                    if held.lease in leases:
                        held.expires_at = now + held.order.lease_ttl_s

    def _reserve(self, order: Reserve, now: float) -> None:
        total = order.num_prompt_tokens + order.sampling.max_tokens - 1
        num_blocks = -(-total // BLOCK_SIZE)
        used = sum(held.num_blocks for held in self.leases.values())
        pool = self.register.geometry.num_blocks
        reason = None
        if num_blocks > pool:
            reason = NackReason.TOO_LARGE
        elif len(self.leases) >= self.register.max_num_seqs:
            reason = NackReason.NO_SLOT
        elif used + num_blocks > pool:
            reason = NackReason.NO_BLOCKS
        if reason is not None:
            self.out.append(
                Nack(
                    request=order.request,
                    attempt=order.attempt,
                    reason=reason,
                    detail="scripted",
                    retry_after_s=0.5,
                )
            )
            return
        self._next_lease += 1
        lease = LeaseId(self._next_lease)
        self.leases[order.request, order.attempt] = _Lease(order, lease, now + order.lease_ttl_s, num_blocks)
        self.max_held = max(self.max_held, len(self.leases))
        self.out.append(
            Grant(
                request=order.request,
                attempt=order.attempt,
                lease=lease,
                ttl_s=order.lease_ttl_s,
                cached_tokens=0,
            )
        )

    def commit(self, commit: Commit) -> bool:
        held = self.leases.get(commit.key)
        if held is None or held.lease != commit.lease or held.is_decoding:
            return False
        held.outputs.append(commit.output.token_id)
        held.is_decoding = True
        request, attempt = commit.key
        self.out.append(Committed(request=request, attempt=attempt, kv_bytes=64, kv_transfer_s=0.125))
        return True

    def step(self, now: float) -> None:
        self.steps += 1
        rows = []
        for key, held in list(self.leases.items()):
            if now > held.expires_at:
                self.num_expired += 1
                del self.leases[key]
                continue
            if not (held.is_decoding or held.order.local):
                continue
            history = [*held.order.token_ids, *held.outputs]
            token = TokenOutput(scripted_token(history))
            before = len(held.outputs)
            held.outputs.append(token.token_id)
            delivered = held.order.token_ids[held.order.num_prompt_tokens :]
            reason = finish_reason(held.order.sampling, [*delivered, *held.outputs])
            if reason is not None:
                del self.leases[key]
            request, attempt = key
            if before == 0:
                held.is_decoding = True
                self.out.append(
                    FirstToken(
                        request=request,
                        attempt=attempt,
                        output=token,
                        finish_reason=reason,
                        cached_tokens=0,
                        queue_s=0.25,
                        prefill_s=0.5,
                    )
                )
                if reason is None:
                    committed = Committed(request=request, attempt=attempt, kv_bytes=0, kv_transfer_s=0.0)
                    self.out.append(committed)
            else:
                rows.append(TokenRow(request, attempt, before, [token], reason))
        if rows:
            self.out.append(Tokens(rows=rows))

    def load(self) -> WorkerLoad:
        running = sum(held.is_decoding for held in self.leases.values())
        return WorkerLoad(
            running=running,
            waiting=len(self.leases) - running,
            blocks_used=sum(held.num_blocks for held in self.leases.values()),
            steps=self.steps,
        )

    @property
    def num_held(self) -> int:
        return len(self.leases)


Worker = ScriptedPrefill | ScriptedDecode


@dataclass
class Client:
    """What one client has seen."""

    spec: RequestSpec
    outputs: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: BaseException | None = None
    gone: bool = False  # it finished early or left: nothing may be delivered any more
    summary: RequestSummary | None = None
    events: list[LifecycleEvent] = field(default_factory=list)
    ended_at: float | None = None

    @property
    def has_ended(self) -> bool:
        return self.summary is not None


class World:
    """A conductor, its workers and clients, and the messages under way. Checks exactly-once as it goes."""

    def __init__(self, config: ConductorConfig | None = None) -> None:
        self.now = 0.0
        self.conductor = Conductor(config or ConductorConfig())
        self.workers: dict[WorkerId, Worker] = {}
        self.inbox: dict[WorkerId, deque[RouterSays]] = {}
        self.clients: dict[RequestId, Client] = {}
        self.sent: list[Send] = []
        self.lifecycle: list[Lifecycle] = []
        self.epochs: dict[WorkerId, int] = {}

    @property
    def num_stale(self) -> int:
        """Messages that the conductor dropped."""
        return sum(self.conductor.stale_messages().values())

    # ---- membership

    def join(self, register: Register) -> Worker:
        worker: Worker = (
            ScriptedPrefill(register) if register.role is Role.PREFILL else ScriptedDecode(register)
        )
        self.workers[register.worker] = worker
        self.inbox[register.worker] = deque()
        self.epochs[register.worker] = register.epoch
        self.feed(WorkerJoined(register))
        self.heartbeat(register.worker)
        return worker

    def prefill(self, name: str, **settings: int) -> ScriptedPrefill:
        worker = self.join(make_register(name, Role.PREFILL, **settings))
        assert isinstance(worker, ScriptedPrefill)
        return worker

    def decode(self, name: str, **settings: int) -> ScriptedDecode:
        worker = self.join(make_register(name, Role.DECODE, **settings))
        assert isinstance(worker, ScriptedDecode)
        return worker

    def kill(self, name: str) -> Register:
        """The process dies: what it had sent is still read, then the stream ends."""
        worker = self.workers.pop(WorkerId(name))
        del self.inbox[WorkerId(name)]
        register = worker.register
        while worker.out:
            self.feed(FromWorker(register.worker, register.epoch, worker.out.popleft()))
        self.feed(WorkerGone(register.worker, register.epoch, "connection closed"))
        return register

    def heartbeat(self, name: str, state: WorkerState = WorkerState.READY) -> None:
        worker = self.workers[WorkerId(name)]
        worker.out.append(Heartbeat(state=state, load=worker.load()))
        self.read(WorkerId(name))

    # ---- clients

    def submit(self, spec: RequestSpec) -> Client:
        client = Client(spec)
        self.clients[spec.request] = client
        self.feed(Submitted(spec))
        return client

    def leave(self, name: str) -> None:
        self.clients[RequestId(name)].gone = True
        self.feed(ClientLeft(RequestId(name), "client disconnected"))

    def finish(self, name: str) -> None:
        self.clients[RequestId(name)].gone = True
        self.feed(ClientFinished(RequestId(name)))

    # ---- moving

    def feed(self, event: Event) -> list[Action]:
        actions = self.conductor.handle(event, self.now)
        for action in actions:
            self._carry_out(action)
        return actions

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send(worker, message):
                self.sent.append(action)
                if worker in self.inbox:
                    self.inbox[worker].append(message)
            case Deliver(request, delivery):
                client = self.clients[request]
                assert not client.gone, f"delivery to {request}, whose client is gone"
                assert not client.has_ended, f"delivery to {request} after its end"
                assert client.finish is None, f"delivery to {request} after its finish"
                assert client.error is None, f"delivery to {request} after its failure"
                match delivery:
                    case NewTokens(outputs, finish):
                        assert outputs
                        client.outputs += [output.token_id for output in outputs]
                        client.finish = finish
                        expected, _ = scripted_output(client.spec)
                        assert client.outputs == expected[: len(client.outputs)], request
                    case Failed(error):
                        client.error = error
            case Lifecycle(request, event):
                self.lifecycle.append(action)
                self.clients[request].events.append(event)
            case Ended(request, summary):
                client = self.clients[request]
                assert client.summary is None, f"{request} ended twice"
                client.summary = summary
                client.ended_at = self.now

    def read(self, worker: WorkerId) -> None:
        """The router reads everything this worker has sent."""
        peer = self.workers[worker]
        while peer.out:
            self.feed(FromWorker(worker, peer.register.epoch, peer.out.popleft()))

    def transfer(self, worker: ScriptedPrefill) -> None:
        """One KV commit reaches its decode worker, or finds it gone or unwilling."""
        decode, epoch, commit = worker.to_decode.popleft()
        order = worker.committing.pop(commit.key, None)
        peer = self.workers.get(decode)
        if order is None:
            return  # aborted meanwhile
        is_same = isinstance(peer, ScriptedDecode) and peer.register.epoch == epoch
        if not (is_same and isinstance(peer, ScriptedDecode) and peer.commit(commit)):
            worker.out.append(
                AttemptFailed(
                    request=order.request,
                    attempt=order.attempt,
                    code="kv_refused",
                    message="scripted",
                    retryable=True,
                )
            )

    def work(self, worker: WorkerId) -> None:
        """This worker reads its messages, steps once, and its messages are read."""
        peer = self.workers[worker]
        while self.inbox[worker]:
            peer.receive(self.inbox[worker].popleft(), self.now)
        peer.step(self.now)
        if isinstance(peer, ScriptedPrefill):
            while peer.to_decode:
                self.transfer(peer)
        if worker in self.workers:
            self.read(worker)

    def advance(self, seconds: float) -> None:
        """Time passes; ticks come when they are due, heartbeats every half second."""
        end = self.now + seconds
        while True:
            due = self.conductor.next_deadline()
            if due is None or due > end:
                break
            self.now = max(self.now, due)
            self.feed(Tick())
            for worker in list(self.workers):
                self._receive_all(worker)
        self.now = end

    def _receive_all(self, worker: WorkerId) -> None:
        while self.inbox[worker]:
            self.workers[worker].receive(self.inbox[worker].popleft(), self.now)

    def run(self, max_s: float = 600.0, step_s: float = 0.05) -> None:
        """Go on, everything in order, until every request has ended."""
        end = self.now + max_s
        while not all(client.has_ended for client in self.clients.values()):
            assert self.now < end, "some request hangs"
            for worker in list(self.workers):
                self.work(worker)
            for worker in list(self.workers):
                self.heartbeat(worker)
            self.advance(step_s)

    def settle(self) -> None:
        """Everything under way arrives; after that nobody may hold anything."""
        for _ in range(3):
            for worker in list(self.workers):
                self.work(worker)

    def assert_quiet(self) -> None:
        self.settle()
        assert self.conductor.quiet()
        for name, worker in self.workers.items():
            assert worker.num_held == 0, f"{name} still holds {worker.num_held}"

    def assert_served(self, client: Client) -> None:
        expected, reason = scripted_output(client.spec)
        assert client.error is None
        assert client.outputs == expected
        assert client.finish is reason


def shuffled(rng: random.Random, items: Sequence[WorkerId]) -> list[WorkerId]:
    return rng.sample(list(items), len(items))
