"""Workers over GPUs: each one its own where there are enough, equal parts where there are not."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ConfigError
from cluster.gpu_placement import (
    VISIBLE,
    GpuPlace,
    RayNode,
    check_places,
    deal_out,
    describe_places,
    describe_ray_share,
    free_ray_gpus,
    own_device,
    ray_share,
    visible_names,
)
from cluster.gpus import Gpus

TWO = Gpus(("A", "B"), (1, 1), ((True, True), (True, True)))


@given(num_workers=st.integers(1, 40), num_gpus=st.integers(1, 20))
def test_gpus_are_dealt_out_evenly_and_their_parts_are_whole(num_workers: int, num_gpus: int) -> None:
    names = [str(gpu) for gpu in range(num_gpus)]
    places = deal_out(num_workers, names)
    assert len(places) == num_workers
    counts = [sum(place.gpu == gpu for place in places) for gpu in range(num_gpus)]
    assert max(counts) - min(counts) <= 1
    for place in places:
        assert place.visible == names[place.gpu]
        assert place.num_sharers == counts[place.gpu]
    if num_workers <= num_gpus:
        assert len({place.gpu for place in places}) == num_workers


@given(num_workers=st.integers(1, 300), num_gpus=st.integers(1, 64))
def test_what_is_asked_of_ray_fits_however_it_packs(num_workers: int, num_gpus: int) -> None:
    fraction, most = ray_share(num_workers, num_gpus)
    steps = round(fraction * 10_000)
    assert 0 < steps <= 10_000
    assert abs(fraction * 10_000 - steps) < 1e-6
    assert most * steps <= 10_000  # a GPU holds as many as are said to meet there, and no more
    assert (most + 1) * steps > 10_000 or most >= 100
    assert num_gpus * most >= num_workers  # and all find a place
    assert most == 1 or num_gpus * (most - 1) < num_workers


def test_without_gpus_nobody_has_a_place() -> None:
    assert deal_out(4, ()) == ()


@pytest.mark.parametrize(
    ("num_gpus", "given", "names"),
    [
        (2, None, ("0", "1")),
        (2, "3,1", ("3", "1")),
        (1, "GPU-abc, 7", ("GPU-abc",)),  # the driver knows no 7
        (0, "", ()),
        (0, "9", ()),
        (2, "MIG-1,MIG-2", ("MIG-1", "MIG-2")),
    ],
)
def test_gpus_are_called_as_whoever_started_us_calls_them(
    num_gpus: int, given: str | None, names: tuple[str, ...]
) -> None:
    assert visible_names(num_gpus, {} if given is None else {VISIBLE: given}) == names


def test_a_device_by_hand_is_the_only_one_its_process_sees() -> None:
    assert own_device("cuda:1", "triton", TWO, {}) == "1"
    assert own_device("cuda:1", "auto", TWO, {VISIBLE: "5,GPU-b"}) == "GPU-b"


@pytest.mark.parametrize(
    ("device", "backend", "gpus", "environment", "message"),
    [
        ("cuda:2", "triton", TWO, {}, "--device cuda:2: there is no such GPU here, cuda:0 to cuda:1 are"),
        (
            "cuda:1",
            "triton",
            Gpus(("A",), (1,), ((True,),)),
            {VISIBLE: "4"},
            "--device cuda:1: there is no such GPU here, only cuda:0 is (CUDA_VISIBLE_DEVICES=4)",
        ),
        ("cuda:0", "triton", Gpus(problem="no driver"), {}, "--device cuda:0: no driver"),
        (
            "cuda:0",
            "triton",
            Gpus(),
            {VISIBLE: "9"},
            "--device cuda:0: no GPU is visible here (CUDA_VISIBLE_DEVICES=9)",
        ),
        ("cuda", "triton", TWO, {}, "--device: `cuda:0`, `cuda:1` and so on name a GPU, not `cuda`"),
        ("cuda:-1", "triton", TWO, {}, "--device: `cuda:0`, `cuda:1` and so on name a GPU, not `cuda:-1`"),
        ("1", "triton", TWO, {}, "--device: `cuda:0`, `cuda:1` and so on name a GPU, not `1`"),
        (
            "cuda:0",
            "cpu",
            TWO,
            {},
            "--device cuda:0: the backend `cpu` uses no GPU: choose `--backend triton`",
        ),
    ],
)
def test_a_device_that_cannot_be_is_one_line(
    device: str, backend: str, gpus: Gpus, environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        own_device(device, backend, gpus, environment)


def test_nccl_takes_no_two_workers_of_one_gpu() -> None:
    names, roles = ["prefill-0", "decode-0", "decode-1"], ["prefill", "decode", "decode"]
    with pytest.raises(ConfigError, match=r"^--kv-edge nccl takes .* prefill-0, decode-1 share: start fewer"):
        check_places("nccl", names, roles, [2, 1, 2])
    check_places("nccl", names, roles, [1, 1, 1])
    check_places("cuda_ipc", names, roles, [3, 3, 3])
    check_places("nccl", ["decode-0", "decode-1"], ["decode", "decode"], [2, 2])  # no KV moves between them
    check_places("nccl", [], [], [])


def test_a_person_is_told_who_computes_where_and_with_how_much() -> None:
    places = deal_out(3, ("0", "1"))
    assert places == (GpuPlace(0, "0", 2), GpuPlace(1, "1", 1), GpuPlace(0, "0", 2))
    names = ["prefill-0", "decode-0", "decode-1"]
    assert (
        describe_places(names, places, None)
        == "GPU 0: prefill-0, decode-1, each with 1/2 of its memory; GPU 1: decode-0"
    )
    assert describe_places(names, places, 0.3).startswith(
        "GPU 0: prefill-0, decode-1, each taking 0.3 of what it finds free for KV; "
    )
    assert describe_ray_share(0.3333, 3, None) == (
        "Ray gives each worker 0.3333 of a GPU, each with 1/3 of its memory"
    )
    assert describe_ray_share(1.0, 1, None) == "Ray gives each worker 1 of a GPU"


def node(free: float, total: float = 4.0, address: str = "10.0.0.4") -> RayNode:
    return RayNode(address, num_cpus=8.0, free_cpus=8.0, num_gpus=total, free_gpus=free)


def test_of_a_joined_cluster_only_gpus_that_nobody_holds_are_asked_for() -> None:
    for backend in ("auto", "triton"):
        assert free_ray_gpus(backend, [node(4.0), node(2.0, 2.0)]) == (6, None)
        num_gpus, notice = free_ray_gpus(backend, [node(1.5), node(0.5, 1.0, "10.0.0.5"), node(0.0, 0.0)])
        assert num_gpus == 1  # halves of different GPUs make no whole one
        assert notice == (
            "others hold GPUs of this Ray cluster: 10.0.0.4 has 1.5 of 4 free, 10.0.0.5 has 0.5 of 1 free; "
            "workers take 1"
        )
        assert free_ray_gpus(backend, [node(0.0, 0.0)]) == (0, None)


def test_where_others_hold_every_gpu_auto_computes_on_cpus_and_triton_says_who() -> None:
    num_gpus, notice = free_ray_gpus("auto", [node(0.0)])
    assert num_gpus == 0
    assert notice is not None
    assert "10.0.0.4 has 0 of 4 free; workers compute on CPUs" in notice
    with pytest.raises(ConfigError, match=r"10\.0\.0\.4 has 0 of 4 free: wait or end who holds them"):
        free_ray_gpus("triton", [node(0.0)])
