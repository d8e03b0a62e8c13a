"""Prefill and decode cores joined in one process: streams, edges and engines whose every delay is a choice.

Nothing happens by itself. `pending()` lists what could happen next (deliver the head of some stream, end a
step, finish a post, a send, a scatter, notice a broken edge, prove a writer dead), and `do` makes one of it
happen. A driver that chooses at random explores the interleavings; the same choices give the same run.

Faults are methods: `break_edge`, `kill`, `restart`, `duplicate`, `fail_next_step`, `advance`. Checked all
along: blocks by `check_integrity` and by counting owners against references; one owner per writable block
(I1); a send reads the KV it is meant to (I7); TagKV reads (I2, I5) and exact tokens in order (I4, I8) by the
runner and the router.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from cluster.engine.batch import StepPlan
from cluster.engine.following import following_plan
from cluster.ids import BlockId, Epoch, RouterId, WorkerId
from cluster.kv.block_manager import BlockManager
from cluster.kv.edge import Piece, Staged
from cluster.worker_io import (
    Action,
    CloseEdge,
    Discard,
    EdgeDown,
    EdgeUp,
    Event,
    FromPeer,
    FromRouter,
    OpenEdge,
    Peer,
    PieceScattered,
    PieceSent,
    PieceStaged,
    PostReceive,
    ReceivePosted,
    RouterLost,
    RunStep,
    Scatter,
    SendPiece,
    StepDone,
    StepFailed,
    Tick,
    ToPeer,
    ToRouter,
    WriterGone,
)
from decode_worker.core import DecodeConfig, DecodeCore
from prefill_worker.core import PrefillConfig, PrefillCore
from tests.support.scripted_model import ScriptedRunner, TagPool
from tests.support.scripted_router import ScriptedRouter

BLOCK_BYTES = 64
ROUTER = RouterId("router-0")

Op = Callable[[], None]


@dataclass(eq=False)
class Node:
    """One life (epoch) of a worker."""

    worker: WorkerId
    epoch: Epoch
    core: PrefillCore | DecodeCore
    blocks: BlockManager
    runner: ScriptedRunner
    step: StepPlan | None = None
    outcome: StepDone | None = None  # of the step before, which went on: the core has not heard of it yet
    inbox: deque[Event] = field(default_factory=deque)  # the stream from the router, in order
    alive: bool = True

    @property
    def peer(self) -> Peer:
        return Peer(self.worker, self.epoch)


@dataclass(eq=False)
class Edge:
    """One KV connection. Each side has its own view of whether it is up."""

    prefill: Node
    decode: Node
    in_place: bool
    up: dict[WorkerId, bool] = field(default_factory=dict)
    broken: bool = False
    to_decode: deque[Event] = field(default_factory=deque)
    to_prefill: deque[Event] = field(default_factory=deque)
    posting: deque[PostReceive] = field(default_factory=deque)
    posted: deque[Piece] = field(default_factory=deque)
    sends: deque[SendPiece] = field(default_factory=deque)
    staged: deque[PieceStaged] = field(default_factory=deque)
    staging: dict[int, list[list[int | None]]] = field(default_factory=dict)

    def is_up(self, node: Node) -> bool:
        return self.up.get(node.worker, False)


class SimulatedPair:
    """`num_prefill` × `num_decode` workers and a scripted router."""

    def __init__(
        self,
        *,
        in_place: bool,
        num_prefill: int = 1,
        num_decode: int = 1,
        block_size: int = 4,
        prefill_blocks: int = 32,
        decode_blocks: int = 32,
        prefill_config: PrefillConfig | None = None,
        decode_config: DecodeConfig | None = None,
    ) -> None:
        self.now = 0.0
        self.block_size = block_size
        self.in_place = in_place
        self._prefill_blocks, self._decode_blocks = prefill_blocks, decode_blocks
        self._prefill_config = prefill_config or PrefillConfig(
            BLOCK_BYTES, max_step_tokens=16, max_piece_bytes=2 * BLOCK_BYTES
        )
        self._decode_config = decode_config or DecodeConfig(BLOCK_BYTES, max_num_seqs=8, max_chunk_tokens=4)
        prefills = [WorkerId(f"prefill-{index}") for index in range(num_prefill)]
        decodes = [WorkerId(f"decode-{index}") for index in range(num_decode)]
        self.router = ScriptedRouter(prefills, decodes, self._send_to_worker)
        self.nodes: dict[WorkerId, Node] = {}
        self.edges: list[Edge] = []
        self.dials: list[tuple[Node, OpenEdge]] = []
        self.to_router: dict[WorkerId, deque[ToRouter]] = {}
        self.scatters: list[tuple[Node, Peer, Staged, list[list[int | None]], tuple[BlockId, ...]]] = []
        self.unproven: list[tuple[Node, Peer]] = []  # D nodes that wait for the proof of a writer's death
        self.failing: set[WorkerId] = set()
        self.num_steps = Counter[str]()
        self.num_went_on = 0  # steps that were not asked for
        self.bytes_sent = 0
        for worker in (*prefills, *decodes):
            self._start(worker, Epoch(1))

    # ---- what may happen

    def pending(self) -> list[Op]:
        """Everything that could happen next, in a fixed order."""
        ops: list[Op] = []
        for node in self.nodes.values():
            if node.inbox and node.alive:
                ops.append(partial(self._pop, node, node.inbox))
            if node.outcome is not None and node.alive:
                ops.append(partial(self._tell, node, node.outcome))
            elif node.step is not None and node.alive:
                ops.append(partial(self._end_step, node))
            if self.to_router[node.worker]:
                ops.append(partial(self._deliver_to_router, node.worker))
        ops += [partial(self._dial, index) for index in range(len(self.dials))]
        for edge in self.edges:
            ops += self._edge_ops(edge)
        ops += [partial(self._scatter, index) for index in range(len(self.scatters))]
        ops += [partial(self._prove, index) for index in range(len(self.unproven))]
        if self.router.has_queued:
            ops.append(self.router.place_next)
        return ops

    def do(self, op: Op) -> None:
        """One thing happens, and everything is checked."""
        op()
        self.check()

    def run(self, choose: Callable[[int], int], max_ops: int = 10_000) -> None:
        """Until nothing can happen any more but by the passing of time."""
        for _ in range(max_ops):
            ops = self.pending()
            if not ops:
                return
            self.do(ops[choose(len(ops))])
            self.advance(0.0005)
        raise AssertionError(f"still busy after {max_ops} steps")

    def settle(self, choose: Callable[[int], int], max_rounds: int = 2000) -> None:
        """Run, and let time pass whenever nothing else happens, until all is quiet."""
        for _ in range(max_rounds):
            self.run(choose)
            deadlines = [
                deadline
                for node in self.nodes.values()
                if node.alive and (deadline := node.core.next_deadline()) is not None
            ]
            if not deadlines:
                return
            self.advance(max(min(deadlines) - self.now, 0.0) + 0.001)
        raise AssertionError("deadlines without end")

    def silent_writers(self) -> list[WorkerId]:
        """Prefill workers that may still write in place, into blocks of requests that have ended."""
        leases = [
            lease
            for node in self.nodes.values()
            if isinstance(node.core, DecodeCore)
            for lease in node.core._leases.values()
            if lease.writer_may_write
        ]
        return sorted({lease.writer.worker for lease in leases if lease.writer is not None})

    def check_quiet(self) -> None:
        """Nothing is used anywhere, and every request got what it should."""
        for node in self.nodes.values():
            if node.alive:
                assert node.core.quiet(), (node.worker, node.core.load())
                node.blocks.check_integrity()
                load = node.core.load()
                assert load.running == load.waiting == load.leases == load.blocks_used == 0
                node.blocks.reset_cache()
                assert node.blocks.counts().free == node.blocks.num_blocks
        self.router.check_complete()

    # ---- faults

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for node in list(self.nodes.values()):
            deadline = node.core.next_deadline()
            if node.alive and deadline is not None and deadline <= self.now:
                self._handle(node, Tick())

    def break_edge(self, edge: Edge) -> None:
        """The connection is cut; each side learns it in its own time."""
        edge.broken = True

    def kill(self, worker: WorkerId) -> None:
        """The process is gone, in the middle of whatever it did."""
        node = self.nodes[worker]
        if not node.alive:
            return
        node.alive = False
        node.step = None
        node.inbox.clear()
        self.to_router[worker].clear()
        self.dials = [(dialer, dial) for dialer, dial in self.dials if dialer is not node]
        self.scatters = [entry for entry in self.scatters if entry[0] is not node]
        self.unproven = [entry for entry in self.unproven if entry[0] is not node]
        for edge in self.edges:
            if node not in (edge.prefill, edge.decode):
                continue
            edge.broken = True
            edge.up[node.worker] = False
            if node is edge.prefill and edge.in_place and not edge.is_up(edge.decode) and edge.decode.alive:
                self.unproven.append((edge.decode, node.peer))  # it noticed long before the death
            if node is edge.prefill:
                if edge.in_place and edge.sends and edge.decode.alive:  # torn in the middle of a write
                    for block_id in edge.sends[0].target_blocks:
                        edge.decode.runner.pool.blocks[block_id] = [-2] * self.block_size
                edge.sends.clear()
        self.router.worker_lost(worker)

    def restart(self, worker: WorkerId) -> None:
        """A new process with the next epoch and an empty pool."""
        assert not self.nodes[worker].alive
        self._start(worker, Epoch(self.nodes[worker].epoch + 1))
        self.router.worker_back(worker)

    def lose_router(self) -> None:
        """The router dies; every worker sees its stream end. Its requests are nobody's any more."""
        self.router.die()
        for node in self.nodes.values():
            if node.alive:
                self.to_router[node.worker].clear()
                node.inbox.clear()
                node.inbox.append(RouterLost(ROUTER))

    def fail_next_step(self, worker: WorkerId) -> None:
        self.failing.add(worker)

    def duplicate(self, choice: int) -> None:
        """Some message that is under way arrives twice."""
        queues: list[deque[Event]] = [node.inbox for node in self.nodes.values() if node.inbox]
        queues += [queue for edge in self.edges for queue in (edge.to_decode, edge.to_prefill) if queue]
        queues = [queue for queue in queues if isinstance(queue[0], FromPeer | FromRouter)]
        if queues:
            queue = queues[choice % len(queues)]
            queue.insert(1, queue[0])

    # ---- checks

    def check(self) -> None:
        for node in self.nodes.values():
            if node.alive:
                node.blocks.check_integrity()
                self._check_owners(node)

    def _check_owners(self, node: Node) -> None:
        """References equal owners, and what an owner may write belongs to it alone."""
        owners: Counter[BlockId] = Counter()
        writable: Counter[BlockId] = Counter()
        core = node.core
        if isinstance(core, PrefillCore):
            sequences = [attempt.sequence for attempt in core._attempts]
        else:
            sequences = list(core._scheduler.sequences())
            step = core._scheduler.book.step
            sequences += [s for s, _ in step.rows if s.key in step.cancelled] if step is not None else []
            for lease in core._leases.values():
                owners.update(lease.sequence.block_ids)
                num_cached = lease.sequence.num_computed // self.block_size
                writable.update(lease.sequence.block_ids[num_cached:])
        for sequence in sequences:
            owners.update(sequence.block_ids)
            writable.update(sequence.block_ids[sequence.num_computed // self.block_size :])
        for block_id in range(node.blocks.num_blocks):
            references = node.blocks._allocator.references(BlockId(block_id))
            assert references == owners[BlockId(block_id)], f"{node.worker}: block {block_id}"
        shared = [block_id for block_id in writable if owners[block_id] > 1]
        assert not shared, f"{node.worker}: blocks {shared} are writable by several"

    # ---- the machinery

    def _start(self, worker: WorkerId, epoch: Epoch) -> None:
        is_prefill = worker.startswith("prefill")
        num_blocks = self._prefill_blocks if is_prefill else self._decode_blocks
        blocks = BlockManager(num_blocks, self.block_size, "model")
        core: PrefillCore | DecodeCore = (
            PrefillCore(self._prefill_config, blocks)
            if is_prefill
            else DecodeCore(self._decode_config, blocks)
        )
        runner = ScriptedRunner(TagPool(num_blocks, self.block_size), self.router.oracles)
        self.nodes[worker] = Node(worker, epoch, core, blocks, runner)
        self.to_router[worker] = deque()
        self.router.epochs[worker] = epoch

    def _send_to_worker(self, worker: WorkerId, message: object) -> None:
        if self.nodes[worker].alive:
            self.nodes[worker].inbox.append(FromRouter(ROUTER, message))  # type: ignore[arg-type]

    def _deliver_to_router(self, worker: WorkerId) -> None:
        self.router.receive(worker, self.to_router[worker].popleft().message)

    def _pop(self, node: Node, queue: deque[Event]) -> None:
        self._handle(node, queue.popleft())

    def _handle(self, node: Node, event: Event) -> None:
        for action in node.core.handle(event, self.now):
            self._carry_out(node, action)

    def _carry_out(self, node: Node, action: Action) -> None:
        match action:
            case ToRouter():
                if self.router.alive:
                    self.to_router[node.worker].append(action)
            case RunStep(plan):
                assert node.step is None, "two steps at once"
                self._begin(node, plan)
            case ToPeer(peer, message):
                edge = self._edge(node, peer)
                assert edge is not None, f"{node.worker} talks to {peer} without an edge"
                queue = edge.to_decode if node is edge.prefill else edge.to_prefill
                queue.append(FromPeer(node.peer, message))
            case OpenEdge():
                self.dials.append((node, action))
            case CloseEdge(peer):
                edge = self._edge(node, peer)
                assert edge is not None
                edge.broken = True
            case SendPiece(peer):
                edge = self._edge(node, peer)
                assert edge is not None
                edge.sends.append(action)
            case PostReceive(peer):
                edge = self._edge(node, peer)
                assert edge is not None
                edge.posting.append(action)
            case Scatter(peer, staged, targets):
                edge = self._edge(node, peer)
                assert edge is not None
                data = edge.staging.pop(staged.slot)
                self.scatters.append((node, peer, staged, data, tuple(targets)))
            case Discard(peer, staged):
                edge = self._edge(node, peer)
                if edge is not None:
                    del edge.staging[staged.slot]

    def _edge(self, node: Node, peer: Peer) -> Edge | None:
        """The edge of this node to that peer, as long as the node has not been told that it is down."""
        for edge in self.edges:
            ends = (edge.prefill, edge.decode)
            if node in ends and edge.is_up(node) and any(end.peer == peer for end in ends):
                return edge
        return None

    def _dial(self, index: int) -> None:
        node, dial = self.dials.pop(index)
        target = self.nodes[dial.peer.worker]
        if not target.alive or target.epoch != dial.peer.epoch:
            self._handle(node, EdgeDown(dial.peer, "connection refused"))
            return
        old = self._edge(target, node.peer)
        if old is not None:  # the decode side had not noticed yet that the old edge broke
            self._notice(old, target)
        edge = Edge(node, target, self.in_place, {node.worker: True, target.worker: True})
        self.edges.append(edge)
        self._handle(target, EdgeUp(node.peer, self.in_place))
        self._handle(node, EdgeUp(target.peer, self.in_place))

    def _edge_ops(self, edge: Edge) -> list[Op]:
        ops: list[Op] = []
        prefill_up, decode_up = edge.is_up(edge.prefill), edge.is_up(edge.decode)
        if edge.to_decode and decode_up:
            ops.append(partial(self._pop, edge.decode, edge.to_decode))
        if edge.to_prefill and prefill_up:
            ops.append(partial(self._pop, edge.prefill, edge.to_prefill))
        if edge.posting and decode_up and not edge.broken:
            ops.append(partial(self._post, edge))
        if edge.sends and prefill_up and (edge.in_place or (edge.posted and not edge.broken)):
            ops.append(partial(self._send, edge))
        if edge.staged and decode_up:
            ops.append(partial(self._stage, edge))
        if edge.broken:
            ops += [
                partial(self._notice, edge, node)
                for node in (edge.prefill, edge.decode)
                if node.alive and edge.is_up(node)
            ]
        return ops

    def _notice(self, edge: Edge, node: Node) -> None:
        """One side learns that the edge is down."""
        edge.up[node.worker] = False
        if node is edge.prefill:
            edge.sends.clear()
            edge.to_prefill.clear()
            self._handle(node, EdgeDown(edge.decode.peer, "connection reset"))
            return
        edge.posting.clear()
        edge.posted.clear()
        edge.staged.clear()
        edge.staging.clear()
        edge.to_decode.clear()
        self._handle(node, EdgeDown(edge.prefill.peer, "connection reset"))
        if edge.in_place and not edge.prefill.alive:
            self.unproven.append((node, edge.prefill.peer))

    def _prove(self, index: int) -> None:
        node, peer = self.unproven.pop(index)
        self._handle(node, WriterGone(peer))

    def _post(self, edge: Edge) -> None:
        action = edge.posting.popleft()
        edge.posted.append(action.piece)
        self._handle(edge.decode, ReceivePosted(edge.prefill.peer, action.piece))

    def _send(self, edge: Edge) -> None:
        action = edge.sends.popleft()
        piece = action.piece
        source = edge.prefill.runner.pool
        oracle = self.router.oracles[piece.request]
        num_tokens = self.router.attempt_length(piece.request, piece.attempt)
        for offset, block_id in enumerate(action.source_blocks):
            assert edge.prefill.blocks._allocator.references(block_id) > 0, "a send reads a freed block"
            first = (piece.first_block + offset) * self.block_size
            for position in range(first, min(first + self.block_size, num_tokens)):
                tag = source.blocks[block_id][position - first]
                assert tag == oracle.tags[position], "a send reads KV that is not there (any more)"
        data = [list(source.blocks[block_id]) for block_id in action.source_blocks]
        self.bytes_sent += len(data) * BLOCK_BYTES
        if edge.in_place:
            for block_id, tags in zip(action.target_blocks, data, strict=True):
                edge.decode.runner.pool.blocks[block_id] = tags
        else:
            posted = edge.posted.popleft()
            assert posted == piece, "the receive that was posted first is for another piece"
            slot = len(edge.staging)
            while slot in edge.staging:
                slot += 1
            edge.staging[slot] = data
            edge.staged.append(PieceStaged(edge.prefill.peer, Staged(piece, slot, len(data) * BLOCK_BYTES)))
        self._handle(edge.prefill, PieceSent(edge.decode.peer, piece, len(data) * BLOCK_BYTES))

    def _stage(self, edge: Edge) -> None:
        self._handle(edge.decode, edge.staged.popleft())

    def _scatter(self, index: int) -> None:
        node, peer, staged, data, targets = self.scatters.pop(index)
        for block_id, tags in zip(targets, data, strict=True):
            node.runner.pool.blocks[block_id] = tags
        self._handle(node, PieceScattered(peer, staged.piece, staged.num_bytes))

    def _end_step(self, node: Node) -> None:
        plan = node.step
        assert plan is not None
        node.step = None
        if node.worker in self.failing:
            self.failing.discard(node.worker)
            node.runner.crash(plan)
            self._handle(node, StepFailed("out of memory"))
            return
        output = node.runner.finish(plan)
        following = following_plan(plan, output) if node.core.may_go_on() else None
        if following is None or self.num_steps[node.worker] % 4 == 0:  # an engine may, it need not
            self._handle(node, StepDone(output))
            return
        self._begin(node, following)
        self.num_went_on += 1
        node.outcome = StepDone(output, went_on=True)

    def _tell(self, node: Node, outcome: StepDone) -> None:
        node.outcome = None
        self._handle(node, outcome)

    def _begin(self, node: Node, plan: StepPlan) -> None:
        node.step = plan
        node.runner.begin(plan)
        self.num_steps[node.worker] += 1
