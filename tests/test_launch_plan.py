"""The plan: one role per process, everything each needs, for any number of workers."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import ClusterConfig, EdgeKind, GpuModeName, QuantizationName
from cluster.errors import ConfigError
from cluster.launch_plan import Site, choose_edge, describe_gpus, kernel_environment, plan_roles
from cluster.launch_prepare import prepare_command
from cluster.role_config import KV_ADDRESS_BY_ROUTE, RouterConfig, WorkerConfig, dump_config, load_config
from cluster.wire.address import TcpAddress, UnixAddress, parse_address
from cluster.wire.messages import Role
from kernels.quantization import Quantization
from kernels.triton.tiles import Mode

SITE = Site(
    served_model_name="m",
    runtime_dir="/tmp/baton-abcdefgh",
    log_dir="/logs",
    cluster_token="t" * 32,
    num_cores=2,
)
JOINED = dataclasses.replace(SITE, ray_cpus=4.0, router_host="10.0.0.9", router_control_ports=(4711,))


def test_one_of_each_on_two_cores() -> None:
    router, prefill, decode = plan_roles(ClusterConfig(), SITE)
    assert (router.name, prefill.name, decode.name) == ("router-0", "prefill-0", "decode-0")
    assert isinstance(router.config, RouterConfig)
    assert isinstance(prefill.config, WorkerConfig)
    assert isinstance(decode.config, WorkerConfig)
    assert (
        prefill.config.router_addresses == decode.config.router_addresses == (router.config.control_address,)
    )
    assert (prefill.config.kv_address, prefill.config.kv_edge, prefill.config.max_chunk_tokens) == (
        None,
        "shm",
        512,
    )
    assert (decode.config.max_chunk_tokens, decode.config.kv_bytes) == (512, None)
    assert prefill.env["OMP_NUM_THREADS"] == decode.env["OMP_NUM_THREADS"] == "1"
    assert (router.num_cpus, prefill.num_cpus, decode.num_cpus) == (0, 1, 1)


def test_where_roles_change_a_worker_has_a_place_whatever_its_role() -> None:
    config = ClusterConfig(
        roles="planned", prefill=1, decode=2, routers=2, prefill_kv_bytes=7, decode_kv_bytes=9
    )
    specs = plan_roles(config, SITE)
    assert [(spec.name, spec.role) for spec in specs[2:]] == [
        ("worker-0", "prefill"),
        ("worker-1", "decode"),
        ("worker-2", "decode"),
    ]
    planning = [spec.config.plans_roles for spec in specs if isinstance(spec.config, RouterConfig)]
    assert planning == [True, False]
    for spec in specs[2:]:
        other = spec.in_role("decode" if spec.role == "prefill" else "prefill")
        assert spec.in_role(spec.role) is spec
        assert other.in_role(spec.role) == spec
        assert other.alternative is not None
        changed = {"role", "kv_bytes", "kv_address"}
        before, after = (dataclasses.replace(one, alternative=None) for one in (spec, other))
        assert dataclasses.replace(after, config=before.config, entry=before.entry) == before
        assert isinstance(before.config, WorkerConfig)
        assert isinstance(after.config, WorkerConfig)
        differ = {
            name
            for name in WorkerConfig.__struct_fields__
            if getattr(before.config, name) != getattr(after.config, name)
        }
        assert differ == changed
        assert other.started(3, "/m").alternative is not None
    fixed = plan_roles(ClusterConfig(), SITE)
    assert [spec.alternative for spec in fixed] == [None] * 3


@pytest.mark.parametrize(
    ("backend", "edge"), [("cpu", "shm"), ("reference", "shm"), ("triton", "auto"), ("auto", "auto")]
)
def test_workers_whose_kv_may_be_on_a_gpu_choose_the_edge_themselves(backend: str, edge: str) -> None:
    config = ClusterConfig(backend=backend, gpu_memory_share=0.4, decode_kv_bytes=1 << 30)  # type: ignore[arg-type]
    _, prefill, decode = (spec.config for spec in plan_roles(config, SITE))
    assert isinstance(prefill, WorkerConfig)
    assert isinstance(decode, WorkerConfig)
    assert (prefill.kv_edge, decode.kv_edge) == (edge, edge)
    assert (prefill.gpu_memory_share, prefill.kv_bytes, decode.kv_bytes) == (0.4, None, 1 << 30)
    assert choose_edge(ClusterConfig(backend="triton", kv_edge="shm"), True) == "shm"  # the worker refuses it


def test_several_routers_share_a_port_and_every_worker_dials_all_of_them() -> None:
    config = ClusterConfig(routers=3, port=8000, redis="redis://:secret@host")
    for site in (SITE, dataclasses.replace(JOINED, router_control_ports=(1, 2, 3))):
        specs = plan_roles(config, site)
        routers = [spec.config for spec in specs if isinstance(spec.config, RouterConfig)]
        workers = [spec.config for spec in specs if isinstance(spec.config, WorkerConfig)]
        assert [router.router for router in routers] == ["router-0", "router-1", "router-2"]
        assert [(router.port, router.shares_port) for router in routers] == [(8000, True)] * 3
        assert [router.admin_port for router in routers] == [8001, 8002, 8003]
        addresses = tuple(router.control_address for router in routers)
        assert len(set(addresses)) == 3
        assert {worker.router_addresses for worker in workers} == {addresses}
        assert {router.redis for router in routers} == {config.redis}
        assert "secret" not in repr(specs)
    (alone,) = (spec.config for spec in plan_roles(ClusterConfig(), SITE) if spec.is_router)
    assert isinstance(alone, RouterConfig)
    assert (alone.shares_port, alone.admin_port, alone.redis) == (False, None, None)


@given(
    prefill=st.integers(0, 20),
    decode=st.integers(1, 20),
    is_joined=st.booleans(),
    edge=st.sampled_from(get_args(EdgeKind)),
    num_edges=st.integers(1, 99),
)
def test_any_shape_gives_unique_names_and_addresses_that_parse(
    prefill: int, decode: int, is_joined: bool, edge: Any, num_edges: int
) -> None:
    config = ClusterConfig(prefill=prefill, decode=decode, kv_edge=edge, max_kv_edges=num_edges)
    specs = plan_roles(config, JOINED if is_joined else SITE)
    assert len({spec.name for spec in specs}) == len(specs) == 1 + prefill + decode
    assert [spec.role for spec in specs] == ["router"] + ["prefill"] * prefill + ["decode"] * decode
    workers = [spec.config for spec in specs if isinstance(spec.config, WorkerConfig)]
    kind = TcpAddress if is_joined else UnixAddress
    kv_addresses = [worker.kv_address for worker in workers if worker.kv_address is not None]
    assert len(kv_addresses) == decode
    if is_joined:
        assert set(kv_addresses) == {KV_ADDRESS_BY_ROUTE}
    else:
        assert len(set(kv_addresses)) == decode
        assert all(isinstance(parse_address(address), UnixAddress) for address in kv_addresses)
    for address in (address for worker in workers for address in worker.router_addresses):
        assert isinstance(parse_address(address), kind)
    assert {worker.kv_edge for worker in workers} == {
        ("gloo" if is_joined else "shm") if edge == "auto" else edge
    }
    assert {worker.max_kv_edges for worker in workers} == {num_edges}
    assert all(load_config(dump_config(spec.config)) == spec.config for spec in specs)
    if is_joined:
        assert sum(spec.num_cpus for spec in specs) <= 4.0 + 1e-9
        assert all(spec.num_cpus > 0 for spec in specs if not spec.is_router)


def test_chunks_have_a_bound_and_requests_targets_on_every_worker() -> None:
    config = ClusterConfig(local_chunk=16, prefill_chunk=32, slo_ttft_ms=500, slo_tpot_ms=25, slo_gap_ms=80)
    router, prefill, decode = (spec.config for spec in plan_roles(config, SITE))
    assert isinstance(prefill, WorkerConfig)
    assert isinstance(decode, WorkerConfig)
    assert (prefill.max_chunk_tokens, decode.max_chunk_tokens) == (32, 16)
    for one in (router, prefill, decode):
        assert (one.slo_ttft_s, one.slo_tpot_s, one.slo_gap_s) == (0.5, 0.025, 0.08)


def test_a_worker_without_prefill_workers_has_all_threads() -> None:
    (_, decode) = plan_roles(ClusterConfig(prefill=0), SITE)
    assert isinstance(decode.config, WorkerConfig)
    assert (decode.config.role, decode.config.num_threads) == (Role.DECODE, 2)


def test_every_worker_keeps_kv_as_asked() -> None:
    for asked in ("auto", "int8"):
        _, *workers = plan_roles(ClusterConfig(kv_dtype=asked, dtype="fp32"), SITE)  # type: ignore[arg-type]
        assert {worker.config.kv_dtype for worker in workers} == {asked}  # type: ignore[union-attr]


def test_a_start_sets_what_was_not_known_before() -> None:
    router, prefill, _ = plan_roles(ClusterConfig(), SITE)
    started = router.started(4, "/prepared").config
    assert isinstance(started, RouterConfig)
    assert started.model_dir == "/prepared"
    again = prefill.started(4, "/prepared").config
    assert isinstance(again, WorkerConfig)
    assert again.epoch == 4


def test_no_argument_or_environment_carries_the_token() -> None:
    for spec in plan_roles(ClusterConfig(), SITE):
        assert SITE.cluster_token not in repr(spec)
        assert SITE.cluster_token not in spec.env.values()


def test_kernels_hear_which_instructions_to_use_in_every_process() -> None:
    config = ClusterConfig(cpu_isa="simd", gguf_weights="small", gpu_mode="fast")
    assert kernel_environment(config)["BATON_GPU_MODE"] == "fast"
    assert kernel_environment(config)["BATON_CPU_ISA"] == "simd"
    assert kernel_environment(config)["BATON_GGUF_WEIGHTS"] == "small"
    for spec in plan_roles(config, SITE):
        assert spec.env.items() >= kernel_environment(config).items()


def test_every_worker_and_the_preparation_hear_of_the_quantization() -> None:
    config = ClusterConfig(quantization="int8", prefill=1, decode=2)
    workers = [spec.config for spec in plan_roles(config, SITE) if isinstance(spec.config, WorkerConfig)]
    assert [worker.quantization for worker in workers] == ["int8"] * 3
    command = prepare_command(config)
    assert command[command.index("--quantization") + 1] == "int8"


def test_workers_hear_whether_to_speculate() -> None:
    for speculation in ("auto", "off"):
        _, *workers = plan_roles(ClusterConfig(speculation=speculation), SITE)  # type: ignore[arg-type]
        assert {worker.config.speculation for worker in workers} == {speculation}  # type: ignore[union-attr]


def test_settings_spell_quantizations_and_modes_as_the_kernels_do() -> None:
    assert get_args(QuantizationName) == tuple(Quantization)
    assert get_args(GpuModeName) == tuple(Mode)


def test_workers_share_cores_where_there_is_a_board() -> None:
    site = dataclasses.replace(SITE, core_board="/proc/1/fd/9")
    workers = [spec.config for spec in plan_roles(ClusterConfig(), site)[1:]]
    assert all(isinstance(worker, WorkerConfig) for worker in workers)
    shares = [worker.core_share for worker in workers if isinstance(worker, WorkerConfig)]
    assert [(share.worker, share.own, share.lent) for share in shares if share] == [
        (0, (0,), (1,)),
        (1, (1,), (0,)),
    ]
    assert {share.board for share in shares if share} == {"/proc/1/fd/9"}
    for spec in plan_roles(ClusterConfig(prefill=0), site)[1:]:  # it has both cores already
        assert isinstance(spec.config, WorkerConfig)
        assert spec.config.core_share is None


def workers_of(config: ClusterConfig, site: Site) -> list[tuple[Any, WorkerConfig]]:
    specs = plan_roles(config, site)
    return [(spec, spec.config) for spec in specs if isinstance(spec.config, WorkerConfig)]


def test_each_worker_sees_a_gpu_of_its_own_and_shared_ones_have_equal_parts() -> None:
    site = dataclasses.replace(SITE, gpus=("4", "GPU-b"))
    two = workers_of(ClusterConfig(backend="triton"), site)
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec, _ in two] == ["4", "GPU-b"]
    assert [(own.gpu_sharers, own.gpu_memory_share) for _, own in two] == [(1, 0.9)] * 2
    three = workers_of(ClusterConfig(backend="triton", decode=2), site)
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec, _ in three] == ["4", "GPU-b", "4"]
    assert [own.gpu_sharers for _, own in three] == [2, 1, 2]
    asked = workers_of(ClusterConfig(backend="triton", decode=2, gpu_memory_share=0.3), site)
    assert [(own.gpu_sharers, own.gpu_memory_share) for _, own in asked] == [(1, 0.3)] * 3  # it wins
    sized = workers_of(ClusterConfig(backend="triton", decode=2, decode_kv_bytes=1 << 33), site)
    assert [(own.gpu_sharers, own.kv_bytes) for _, own in sized] == [(2, None), (1, 1 << 33), (1, 1 << 33)]
    assert [spec.num_gpus for spec, _ in (*two, *three)] == [0.0] * 5
    router = plan_roles(ClusterConfig(backend="triton"), site)[0]
    assert "CUDA_VISIBLE_DEVICES" not in router.env
    again = two[1][0].started(2, "/prepared")
    assert again.env["CUDA_VISIBLE_DEVICES"] == "GPU-b"  # its next epoch is where it was
    assert describe_gpus(ClusterConfig(decode=2), site) == (
        "GPU 0: prefill-0, decode-1, each with 1/2 of its memory; GPU 1: decode-0"
    )


def test_ray_deals_out_its_own_gpus_and_sets_what_workers_see() -> None:
    for site in (dataclasses.replace(SITE, ray_gpus=2), dataclasses.replace(JOINED, ray_gpus=2)):
        config = ClusterConfig(backend="triton", decode=2)
        three = workers_of(config, site)
        assert [(spec.num_gpus, own.gpu_sharers) for spec, own in three] == [(0.5, 2)] * 3
        assert not any("CUDA_VISIBLE_DEVICES" in spec.env for spec, _ in three)
        told = "Ray gives each worker 0.5 of a GPU, each with 1/2 of its memory"
        assert describe_gpus(config, site) == told
        asked = dataclasses.replace(site, ray_gpus=1)
        config = ClusterConfig(backend="triton", gpus_per_worker=2.0)
        assert [(spec.num_gpus, own.gpu_sharers) for spec, own in workers_of(config, asked)] == [(2.0, 1)] * 2
        assert describe_gpus(config, asked) is None


def test_without_gpus_the_plan_is_as_ever() -> None:
    for spec, own in workers_of(ClusterConfig(backend="auto"), SITE):
        assert (spec.num_gpus, own.gpu_sharers, own.gpu_memory_share) == (0.0, 1, 0.9)
        assert "CUDA_VISIBLE_DEVICES" not in spec.env
    assert describe_gpus(ClusterConfig(), SITE) is None


def test_nccl_is_refused_before_anything_starts_where_workers_share_a_gpu() -> None:
    site = dataclasses.replace(SITE, gpus=("0",))
    with pytest.raises(ConfigError, match="--kv-edge nccl takes no two workers on one GPU"):
        plan_roles(ClusterConfig(backend="triton", kv_edge="nccl"), site)
    plan_roles(ClusterConfig(backend="triton", kv_edge="cuda_ipc"), site)
    plan_roles(ClusterConfig(backend="triton", kv_edge="nccl", prefill=0), site)
    planned = ClusterConfig(backend="triton", kv_edge="nccl", prefill=0, decode=2, roles="planned")
    with pytest.raises(ConfigError, match="worker-0, worker-1 share"):
        plan_roles(planned, site)  # one of them may come to be a prefill worker
