"""What the staged edges' backends promise where no GPU is: settings, refusals, and NCCL's way of use over
gloo."""

from __future__ import annotations

import ast
import asyncio
import os
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from cluster.errors import ConfigError, EdgeError
from cluster.ids import BlockId
from cluster.kv import edge_backends
from cluster.kv.edge_backends import Nccl, settle_nccl, why_no_nccl
from cluster.kv.edge_device import CopyQueue
from cluster.kv.edge_group import _close
from cluster.kv.edge_group_parts import TRAILER_BYTES
from cluster.kv.edges import EdgeKind, check_kind, check_memory, make_pool, make_source_pool
from cluster.kv.layout import KVLayout
from cluster.kv.pool import KVPool
from tests.kv.edge_harness import BLOCK_BYTES, CONFIG, GEOMETRY, EdgePair, edge_name
from tests.kv.stand_ins import Tagless, use_one_way

LAYOUT = KVLayout.from_geometry(GEOMETRY)
STALL_S = 1.5
NCCL_SETTINGS = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
)


def test_nccl_is_told_not_to_end_the_process_and_how_long_to_wait() -> None:
    environment: dict[str, str] = {}
    settle_nccl(environment, 9.5)
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert environment["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert environment["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "10"
    assert environment["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "0"  # else a lost edge closes a minute later
    assert environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"


def test_what_the_user_has_set_stays() -> None:
    environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "77"}
    settle_nccl(environment, 10.0)
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    assert environment["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "77"


@pytest.mark.parametrize(("value", "is_refused"), [("0", False), ("2", False), ("1", True), ("3", True)])
def test_a_setting_that_ends_the_process_with_its_peer_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str, is_refused: bool
) -> None:
    """Before anything starts, and again when an edge is made."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: None)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", value)
    sentence = f"TORCH_NCCL_ASYNC_ERROR_HANDLING={value} ends this process when one peer dies"
    for error, use in (
        (ConfigError, lambda: check_kind(EdgeKind.NCCL)),
        (EdgeError, lambda: Nccl(torch.device("cuda", 0))),
    ):
        with pytest.raises(error, match=sentence) if is_refused else nullcontext():
            use()
    check_kind(EdgeKind.CUDA_IPC)  # has nothing to do with it


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_a_torch_without_nccl_is_told_in_one_sentence() -> None:
    assert why_no_nccl({}) == "this torch is built without NCCL: use `--kv-edge gloo`"
    with pytest.raises(EdgeError, match="built without NCCL: use `--kv-edge gloo`"):
        Nccl(torch.device("cuda", 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("kind", [EdgeKind.CUDA_IPC, EdgeKind.NCCL])
@pytest.mark.parametrize("make", [make_pool, make_source_pool])
def test_without_a_gpu_its_kinds_are_refused(kind: EdgeKind, make: Any) -> None:
    with pytest.raises(ConfigError, match=f"--kv-edge {kind.value} needs a CUDA device: torch .* sees none"):
        make(kind, LAYOUT)


@pytest.mark.parametrize("kind", EdgeKind)
def test_kv_in_memory_of_the_host_moves_over_what_moves_such(kind: EdgeKind) -> None:
    refused = pytest.raises(ConfigError, match=f"--kv-edge {kind.value} moves KV between GPUs")
    with refused if kind.on_gpu else nullcontext():
        check_memory(kind, "cpu")
    check_memory(kind, "cuda")  # over gloo it is staged in memory of the host


class FakeGroup:
    """Keeps what it was made with; NCCL itself needs a GPU."""

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.made_of = (store, rank, size)
        self.options = options
        self.is_aborted = False

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace()

    def abort(self) -> None:
        self.is_aborted = True


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    """The backend over a group that does nothing, on streams that hold nothing."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeGroup, raising=False)
    for name in ("Stream", "device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    monkeypatch.setattr(edge_backends, "finish_stream", lambda stream: None)
    for name in NCCL_SETTINGS:
        monkeypatch.setenv(name, "")  # so that what is set in its place goes with the test
        monkeypatch.delenv(name)
    return Nccl(torch.device("cuda", 0))


def test_nccl_groups_have_what_is_used_of_them() -> None:
    """As this torch declares them; a build without NCCL has the declarations too."""
    tree = ast.parse((Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi").read_text())
    [group] = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "ProcessGroupNCCL"]
    members = {n.name: n for n in group.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    config, init, abort = members["NCCLConfig"], members["__init__"], members["abort"]
    assert isinstance(config, ast.ClassDef)
    assert isinstance(init, ast.FunctionDef)
    assert isinstance(abort, ast.FunctionDef)
    declared = {
        n.target.id for n in config.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    assert {"blocking", "min_ctas", "max_ctas"} <= declared
    assert [argument.arg for argument in init.args.args] == ["self", "store", "rank", "size", "options"]
    assert [argument.arg for argument in abort.args.args] == ["self"]


def test_an_nccl_group_is_small_and_waits_for_nobody_for_ever(nccl: Nccl) -> None:
    group = nccl.make_group("store", 1, "127.0.0.1", 7.0)
    assert group.made_of == ("store", 1, 2)
    assert group.options.config == SimpleNamespace(blocking=0, min_ctas=1, max_ctas=4)
    assert group.options._timeout == timedelta(seconds=7)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert nccl.staging_device(torch.device("cuda", 3)) == torch.device("cuda", 3)  # beside the pool
    assert nccl.stall_timeout_s is not None
    assert nccl.stall_timeout_s < 1.0  # a receive that nobody serves takes from the engine as long
    assert not nccl.has_receipts  # nothing goes against the order of the pieces


def test_an_aborted_transfer_looks_done_and_is_not_taken_for_it(nccl: Nccl) -> None:
    group, work = nccl.make_group("store", 0, "127.0.0.1", 7.0), SimpleNamespace(wait=lambda: True)
    assert nccl.wait(work, 1.0)
    nccl.break_off(group, 1)
    assert group.is_aborted
    assert not nccl.wait(work, 1.0)


def test_what_waits_for_a_peer_shares_no_stream_with_what_copies(
    nccl: Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch deals 32 streams of a priority out in turn; NCCL takes those of priority 0."""
    priorities: list[int] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda _, priority=0: priorities.append(priority))
    CopyQueue(torch.device("cuda", 0))
    Nccl(torch.device("cuda", 0))
    assert len({0, *priorities}) == 3


@pytest.mark.parametrize("method", ["break_off", "close"])
async def test_a_group_that_does_not_let_go_fails_the_closing_in_time(method: str) -> None:
    let_go = threading.Event()
    link: Any = SimpleNamespace(name="p/d", break_off=lambda reason: None, close=lambda: None)
    setattr(link, method, lambda *_: let_go.wait(60))
    try:
        with pytest.raises(EdgeError, match=r"within 0\.2 s"):
            async with asyncio.timeout(30):
                await _close(link, [], 0.2)
    finally:
        let_go.set()


@pytest.fixture
def stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edges as over NCCL, where a part may take only so long."""
    use_one_way(monkeypatch.setattr, STALL_S)


@pytest.mark.usefixtures("stalls")
async def test_a_posted_receive_that_nobody_serves_is_broken_off_by_the_watchdog() -> None:
    """Before the piece's own deadline: on a GPU it would spin until then."""
    pair, other = (EdgePair(EdgeKind.GLOO, GEOMETRY, CONFIG, edge_name(f"prefill-{i}")) for i in (0, 1))
    await asyncio.gather(pair.ready(), other.ready())
    await pair.transfer([1, 2], [3, 4])
    piece = pair.piece(5)
    await pair.receiver.post(piece, 5 * BLOCK_BYTES)
    begin = time.monotonic()
    with pytest.raises(EdgeError, match="prefill worker did not take part in a transfer before its deadline"):
        await pair.receiver.wait(piece)
    assert time.monotonic() - begin < CONFIG.operation_timeout_s
    with pytest.raises(EdgeError, match="before its deadline"):  # it is dead, and the first reason stays
        await pair.receiver.post(pair.piece(1), BLOCK_BYTES)
    await other.transfer([5], [6])  # the other one is not
    assert torch.equal(other.bits(other.target, [6]), other.bits(other.source, [5]))
    await pair.close()
    again = EdgePair(EdgeKind.GLOO, GEOMETRY, CONFIG, edge_name("prefill-0", epoch=2))
    await again.ready()
    await again.transfer([7], [8])
    assert torch.equal(again.bits(again.target, [8]), again.bits(again.source, [7]))
    for end in (again, other):
        await end.close()


@pytest.mark.usefixtures("stalls")
async def test_the_time_of_a_part_begins_with_its_turn() -> None:
    """Pieces that wait behind others in the ring are not late: only the first in line is served. Not every
    ring meets a machine that holds this process up for as long as a part may take."""
    blocks = [BlockId(block) for block in range(4)]

    async def is_served(pair: EdgePair) -> bool:
        pieces = [pair.piece(4) for _ in range(3)]
        for piece in pieces:
            await pair.receiver.post(piece, 4 * BLOCK_BYTES)
        try:
            for piece in pieces:
                await asyncio.sleep(0.4 * STALL_S)  # the last one has waited for longer than a part may take
                await pair.sender.send(piece, blocks, ())
                await pair.receiver.scatter(await pair.receiver.wait(piece), blocks)
        except EdgeError:
            return False
        return torch.equal(pair.bits(pair.target, range(4)), pair.bits(pair.source, range(4)))

    results = []
    while not any(results) and len(results) < 5:
        pair = EdgePair(EdgeKind.GLOO, GEOMETRY, CONFIG, edge_name(epoch=len(results)))
        await pair.ready()
        results.append(await is_served(pair))
        await pair.close()
    assert any(results)


@pytest.mark.usefixtures("stalls")
async def test_pieces_in_another_order_than_agreed_fail_and_touch_nothing() -> None:
    """Where order alone matches, the name behind each part tells whose it is: an error, never wrong KV."""
    pair = EdgePair(EdgeKind.GLOO, GEOMETRY, CONFIG, edge_name())
    await pair.ready()
    first, second = pair.piece(2), pair.piece(2)
    for piece in (first, second):
        await pair.receiver.post(piece, 2 * BLOCK_BYTES)
    blocks = [BlockId(1), BlockId(2)]
    sending = [asyncio.ensure_future(pair.sender.send(piece, blocks, ())) for piece in (second, first)]
    with pytest.raises(EdgeError, match="a part of another piece arrived"):
        await pair.receiver.wait(first)
    with pytest.raises(EdgeError, match="a part of another piece arrived"):  # dead, and stays so
        await pair.receiver.post(pair.piece(1), BLOCK_BYTES)
    await asyncio.gather(*sending, return_exceptions=True)
    assert not pair.target.tensor.any()
    await pair.close()


@pytest.mark.usefixtures("stalls")
async def test_receives_are_posted_for_what_was_offered_and_in_the_order_of_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A receive that waits spins on a GPU: before an offer there is none. The first piece finds its way used
    already: one byte has gone over it."""
    calls: dict[str, list[int]] = {"send": [], "recv": []}

    def recorded(name: str) -> Any:
        original = getattr(Tagless, name)

        def call(self: Tagless, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
            calls[name].append(tensors[0].numel() * tensors[0].element_size())
            return original(self, tensors, rank, tag)

        return call

    for name in calls:
        monkeypatch.setattr(Tagless, name, recorded(name))
    pair = EdgePair(EdgeKind.GLOO, GEOMETRY, CONFIG, edge_name())
    await pair.ready()
    assert calls == {"send": [1], "recv": [1]}
    piece = pair.piece(6)  # a slot holds four
    parts = [4 * BLOCK_BYTES, TRAILER_BYTES, 2 * BLOCK_BYTES, TRAILER_BYTES]
    await pair.receiver.post(piece, 6 * BLOCK_BYTES)
    assert calls == {"send": [1], "recv": [1, *parts]}
    await pair.sender.send(piece, [BlockId(block) for block in range(6)], ())
    pair.receiver.discard(await pair.receiver.wait(piece))
    assert calls == {"send": [1, *parts], "recv": [1, *parts]}
    await pair.close()


def test_both_pools_of_host_kinds_are_host_memory() -> None:
    for kind in (EdgeKind.LOCAL, EdgeKind.SHM, EdgeKind.GLOO):
        assert not kind.on_gpu
        for pool in (make_pool(kind, LAYOUT), make_source_pool(kind, LAYOUT)):
            assert isinstance(pool, KVPool)
            assert pool.tensor.device.type == "cpu"
            pool.close()
    assert EdgeKind.NCCL.on_gpu
    assert EdgeKind.CUDA_IPC.on_gpu
