"""Which kind joins two workers: the best that both places allow, another where it does not come up, and that
one again later."""

from __future__ import annotations

import pytest

from cluster.errors import ConfigError, EdgeCrowded, EdgeDeviceLost, EdgeError, EdgeUnfit
from cluster.ids import Epoch, WorkerId
from cluster.kv.edge import EdgeName
from cluster.kv.edge_fallback import (
    MAX_DOUBLINGS,
    RETRY_S,
    KindBook,
    accepted,
    kinds_of,
    possible,
)
from cluster.kv.edges import EdgeKind
from tests.kv.edge_harness import edge_name

NAME, OTHER = edge_name(), EdgeName(WorkerId("prefill-0"), Epoch(1), WorkerId("decode-9"), Epoch(1))
IPC, NCCL, GLOO = EdgeKind.CUDA_IPC, EdgeKind.NCCL, EdgeKind.GLOO
ON_GPU = accepted(IPC)


class Dialling:
    """A prefill worker's book, and a decode worker that can do `can`."""

    def __init__(self, *can: EdgeKind) -> None:
        self.book, self.can, self.now = KindBook(ON_GPU), can, 0.0

    def dial(self, name: EdgeName = NAME) -> EdgeKind:
        offered = [kind.value for kind in self.book.offer(name, self.now)]
        able = [kind.value for kind in self.can if kind.value in offered]
        return self.book.welcomed(name, able[0], able, self.now)

    def fail(self, error: EdgeError) -> EdgeError:
        return self.book.failed(NAME, error, self.now)


@pytest.mark.parametrize("kind", EdgeKind)
def test_only_what_depends_on_two_gpus_falls_back(kind: EdgeKind) -> None:
    kinds = accepted(kind)
    assert kinds[0] is kind
    assert len(set(kinds)) == len(kinds)
    assert (len(kinds) > 1) == (kind is IPC)
    assert not any(one.in_ds_pool for one in kinds[1:])  # whatever a late writer does, it is staged


def test_auto_follows_from_where_kv_lies() -> None:
    assert kinds_of("auto", "cuda", None) == (IPC, NCCL, GLOO)
    assert kinds_of("auto", "cuda", "built without NCCL") == (IPC, GLOO)
    assert kinds_of("auto", "cpu", None) == (GLOO,)
    assert kinds_of("cuda_ipc", "cuda", None) == (IPC, NCCL, GLOO)
    assert kinds_of("nccl", "cuda", None) == (NCCL,)
    assert kinds_of("shm", "cpu", None) == (EdgeKind.SHM,)
    with pytest.raises(ConfigError, match="moves KV between GPUs"):
        kinds_of("nccl", "cpu", None)


@pytest.mark.parametrize(
    ("offered", "own", "is_one_host", "able"),
    [
        (ON_GPU, ON_GPU, True, [IPC, NCCL, GLOO]),
        (ON_GPU, ON_GPU, False, [NCCL, GLOO]),
        (ON_GPU, (GLOO,), True, [GLOO]),  # one keeps its KV on a GPU, the other does not
        ((GLOO,), ON_GPU, True, [GLOO]),
        ((NCCL, GLOO), ON_GPU, True, [NCCL, GLOO]),
        (ON_GPU, (NCCL, GLOO), True, [NCCL, GLOO]),  # its memory cannot be shared
        ((EdgeKind.SHM,), (EdgeKind.SHM,), False, [EdgeKind.SHM]),  # asked for by name
        ((EdgeKind.SHM,), (GLOO,), True, []),
        ((NCCL,), (GLOO,), False, []),
    ],
)
def test_two_gpus_of_one_host_share_memory_and_others_take_nccl(
    offered: tuple[EdgeKind, ...], own: tuple[EdgeKind, ...], is_one_host: bool, able: list[EdgeKind]
) -> None:
    assert possible([kind.value for kind in offered], own, is_one_host=is_one_host) == able


def test_what_two_places_do_not_allow_is_not_offered_again() -> None:
    far = Dialling(NCCL, GLOO)
    assert far.book.offer(NAME, 0.0) == [IPC, NCCL, GLOO]
    assert far.dial() is NCCL
    far.book.up(NAME)
    assert far.book.better_after_s(NAME, 0.0) is None
    assert far.book.offer(NAME, 1e9) == [NCCL, GLOO]
    with pytest.raises(EdgeError, match="chose the KV edge `shm`, which was not offered"):
        far.book.welcomed(NAME, "shm", ["shm"], 0.0)


def test_an_edge_that_is_unfit_is_the_next_kind_and_stays_it() -> None:
    near = Dialling(*ON_GPU)
    assert near.dial() is IPC
    verdict = near.fail(EdgeUnfit("no peer access"))
    assert isinstance(verdict, EdgeUnfit)
    assert str(verdict) == "no peer access; KV goes by `nccl` between these two"
    near.now = 1e9
    assert near.dial() is NCCL  # of every later dial
    near.book.up(NAME)
    assert near.book.better_after_s(NAME, near.now) is None


def test_a_peer_that_is_lost_or_does_not_answer_is_dialled_as_before() -> None:
    near = Dialling(*ON_GPU)
    near.dial()
    verdict = near.fail(EdgeError("the decode worker's process 7 has exited"))
    assert type(verdict) is EdgeError
    assert near.dial() is IPC
    near.book.offer(NAME, 0.0)  # refused, or no answer: no kind is to blame
    assert type(near.fail(EdgeUnfit("it is draining"))) is EdgeError
    assert near.dial() is IPC
    lost = EdgeDeviceLost("the GPU faulted")
    assert near.fail(lost) is lost


def test_a_pair_comes_back_to_the_better_kind_after_delays_that_grow_until_it_is_up() -> None:
    far, delays = Dialling(NCCL, GLOO), []
    for _ in range(MAX_DOUBLINGS + 2):
        assert far.dial() is NCCL
        verdict = far.fail(EdgeError("the peer did not connect"))
        assert isinstance(verdict, EdgeUnfit)
        assert "KV goes by `gloo` between these two; `nccl` again in" in str(verdict)
        assert far.dial() is GLOO
        far.book.up(NAME)
        delay = far.book.better_after_s(NAME, far.now)
        assert delay is not None
        delays.append(delay)
        far.now += delay - 0.5
        assert far.dial() is GLOO
        far.now += 1.0
    assert delays == [RETRY_S * 2 ** min(count, MAX_DOUBLINGS) for count in range(len(delays))]
    assert far.dial() is NCCL
    far.book.up(NAME)
    assert far.book.better_after_s(NAME, far.now) is None
    far.dial()
    far.fail(EdgeError("the peer did not connect"))
    assert far.dial() is GLOO
    assert far.book.better_after_s(NAME, far.now) == RETRY_S  # all was forgotten


def test_a_new_epoch_of_the_decode_worker_begins_anew() -> None:
    far = Dialling(NCCL, GLOO)
    far.dial()
    far.fail(EdgeError("the peer did not connect"))
    assert far.dial() is GLOO
    assert far.dial(OTHER) is NCCL  # another worker is another pair
    successor = EdgeName(NAME.prefill, NAME.prefill_epoch, NAME.decode, Epoch(NAME.decode_epoch + 1))
    assert far.dial(successor) is NCCL
    assert far.dial(OTHER) is NCCL


def test_a_dial_of_an_earlier_epoch_that_goes_on_disturbs_no_later_one_and_is_told_so() -> None:
    earlier, later = (
        edge_name(),
        EdgeName(NAME.prefill, NAME.prefill_epoch, NAME.decode, Epoch(NAME.decode_epoch + 1)),
    )
    pair = Dialling(IPC, NCCL, GLOO)
    pair.dial(later)
    assert pair.book.offer(earlier, pair.now)  # redialled, since D's process may be there still
    assert pair.dial(later) is IPC
    with pytest.raises(EdgeError, match="was dialled in a later epoch than 1"):
        pair.book.welcomed(earlier, IPC.value, [IPC.value], pair.now)
    pair.book.up(earlier)
    assert pair.book.better_after_s(earlier, pair.now) is None
    assert type(pair.book.failed(earlier, EdgeUnfit("gone"), pair.now)) is EdgeError
    assert pair.dial(later) is IPC


def test_a_kind_that_the_decode_worker_has_no_room_for_is_offered_again_later() -> None:
    far = Dialling(NCCL, GLOO)
    far.book.offer(NAME, 0.0)
    assert far.book.welcomed(NAME, "gloo", ["nccl", "gloo"], 0.0) is GLOO
    assert far.book.better_after_s(NAME, 0.0) == RETRY_S
    far.now = RETRY_S
    assert far.dial() is NCCL


def test_where_there_is_no_room_for_a_capped_kind_another_is_spoken_for_a_while() -> None:
    far = Dialling(NCCL, GLOO)
    assert far.dial() is NCCL
    full = EdgeCrowded("this worker holds 16 edges, as many as it may")
    assert far.fail(full) is full  # it says nothing of the kind
    assert far.dial() is NCCL
    assert NCCL not in far.book.offer(NAME, 0.0, uncapped=True)
    assert far.dial() is GLOO
    far.now = RETRY_S
    assert far.dial() is NCCL
    alone = KindBook((NCCL,))
    assert alone.offer(NAME, 0.0, uncapped=True) == [NCCL]  # there is no other


def test_the_last_kind_is_dialled_whatever_it_did() -> None:
    far = Dialling(GLOO)
    for _ in range(3):
        assert far.dial() is GLOO
        assert type(far.fail(EdgeUnfit("cannot listen"))) is EdgeError
    alone = KindBook(accepted(EdgeKind.SHM))
    alone.offer(NAME, 0.0)
    alone.welcomed(NAME, "shm", ["shm"], 0.0)
    assert type(alone.failed(NAME, EdgeUnfit("another container"), 0.0)) is EdgeError
