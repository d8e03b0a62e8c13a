"""Roles by hand: the same configuration that a launcher would give, from one command's options."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import ClusterConfig
from cluster.config_sources import setting_infos
from cluster.errors import ConfigError
from cluster.launch_plan import Site, plan_roles
from cluster.role_by_hand import ROUTER, ROUTER_ADDRESS, SETTINGS, ByHand, config_by_hand
from cluster.role_config import KV_ADDRESS_BY_ROUTE, RouterConfig, WorkerConfig, load_config
from tests.support.processes import ROOT

LAUNCHERS_OWN = {"routers", "idle_cores", "gpus_per_worker", "launcher", "roles", "address", "runtime_dir"}
ROLES = {"router": "router", "prefill": "prefill_worker", "decode": "decode_worker"}
TOKEN = "t" * 32


def by_hand(role: str, config: ClusterConfig, hand: ByHand, num_cores: int = 2) -> Any:
    return config_by_hand(role, config, hand, model_name="m", token=TOKEN, num_cores=num_cores)


def test_every_setting_is_some_roles_or_the_launchers_own() -> None:
    every = {info.name for info in setting_infos()}
    assert {name for names in SETTINGS.values() for name in names} == every - LAUNCHERS_OWN
    assert all(len(set(names)) == len(names) for names in SETTINGS.values())


@given(
    threads=st.integers(1, 8),
    dtype=st.sampled_from(["bf16", "fp32"]),
    chunk=st.integers(1, 999),
    slo=st.floats(1, 1e4),
    num=st.integers(0, 3),
)
def test_it_is_what_the_launcher_gives_but_for_places(
    threads: int, dtype: Any, chunk: int, slo: float, num: int
) -> None:
    config = ClusterConfig(
        threads_per_worker=threads,
        dtype=dtype,
        prefill_chunk=chunk,
        slo_ttft_ms=slo,
        prefill=num,
        max_n=chunk % 128 + 1,
    )
    site = Site(served_model_name="m", runtime_dir="", log_dir=None, cluster_token=TOKEN, num_cores=2)
    for spec in plan_roles(config, site):
        hand = ByHand(spec.name, ("unix:/run/r.sock",), epoch=7)
        own = by_hand(spec.role, config, hand)
        if isinstance(spec.config, RouterConfig):
            expected: Any = msgspec.structs.replace(spec.config, control_address="unix:/run/r.sock")
        else:
            expected = msgspec.structs.replace(
                spec.config,
                router_addresses=("unix:/run/r.sock",),
                epoch=7,
                kv_address=None if spec.config.kv_address is None else KV_ADDRESS_BY_ROUTE,
                join_timeout_s=600.0,
            )
        assert own == expected
        assert load_config(msgspec.json.encode(own)) == own
        assert TOKEN not in repr(own)


@pytest.mark.parametrize(
    ("routers", "asked", "edge"),
    [
        ((ROUTER_ADDRESS,), "auto", "shm"),
        (("unix:/r", "tcp:localhost:1"), "auto", "shm"),
        (("tcp:10.0.0.9:8500",), "auto", "gloo"),
        (("unix:/r", "tcp:10.0.0.9:8500"), "auto", "gloo"),
        (("tcp:10.0.0.9:8500",), "shm", "shm"),
        ((ROUTER_ADDRESS,), "gloo", "gloo"),
        ((ROUTER_ADDRESS,), "cuda_ipc", "cuda_ipc"),
        (("tcp:10.0.0.9:8500",), "nccl", "nccl"),
    ],
)
def test_the_edge_follows_from_where_the_router_is(routers: tuple[str, ...], asked: Any, edge: str) -> None:
    for role in ("prefill", "decode"):
        own = by_hand(role, ClusterConfig(kv_edge=asked), ByHand("w", routers))
        assert isinstance(own, WorkerConfig)
        assert (own.kv_edge, own.router_addresses) == (edge, routers)


def test_a_worker_alone_takes_every_core_it_may_use() -> None:
    assert by_hand("decode", ClusterConfig(), ByHand("d"), num_cores=12).num_threads == 12
    assert by_hand("decode", ClusterConfig(threads_per_worker=3), ByHand("d"), num_cores=12).num_threads == 3


def test_routers_by_hand_share_no_port() -> None:
    router = by_hand(ROUTER, ClusterConfig(routers=3, host="0.0.0.0"), ByHand("router-1"))
    assert (router.shares_port, router.admin_port, router.log.file) == (False, 8001, None)
    logged = by_hand(ROUTER, ClusterConfig(log_dir="/logs"), ByHand("router-1"))
    assert logged.log.file == "/logs/router-1.log"


@pytest.mark.parametrize(
    ("hand", "message"),
    [
        (ByHand("a/b"), "--name: letters"),
        (ByHand(""), "--name: letters"),
        (ByHand("d", ("10.0.0.9:8500",)), "not an address, expected `unix:/path` or `tcp:host:port`"),
        (ByHand("d", ("unix:/r", "unix:/r")), "--router names an address twice: unix:/r, unix:/r"),
        (ByHand("d", kv_address="here"), "not an address"),
    ],
)
def test_what_cannot_work_is_one_sentence(hand: ByHand, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        by_hand("decode", ClusterConfig(), hand)


def run(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "COLUMNS": "110", **environment},
        check=False,
    )


def test_help_has_the_options_of_the_role_and_the_whole_recipe() -> None:
    shown = run("decode_worker", "--help")
    assert shown.returncode == 0, shown.stderr
    infos = {info.name: info for info in setting_infos()}
    for name in SETTINGS["decode"]:
        assert f" {infos[name].flag} " in shown.stdout
    for text in (
        "--router ADDRESS",
        "--device cuda:K",
        "--name NAME",
        "--epoch",
        "--kv-address",
        "(default: 512MiB)",
    ):
        assert text in shown.stdout
    for module in ROLES.values():
        assert f"python -m {module} " in shown.stdout
    assert "--prefill-kv" not in shown.stdout


def test_errors_of_the_command_are_one_sentence_and_a_status() -> None:
    cases = [
        ("router", (), {}, "error: no cluster token: give all processes"),
        (
            "prefill_worker",
            ("--model", "/none"),
            {"BATON_CLUSTER_TOKEN": TOKEN},
            "error: /none: no such model file or directory",
        ),
        (
            "decode_worker",
            ("--dtype", "int3"),
            {},
            "error: --dtype: expected one of bf16, fp32, got `int3` (from --dtype)",
        ),
        (
            "decode_worker",
            ("x.json", "--dtype", "bf16"),
            {},
            "error: x.json is the whole configuration: drop it, or --dtype",
        ),
        ("decode_worker", ("/none.json",), {}, "error: cannot read /none.json: No such file"),
        (
            "decode_worker",
            ("--backend", "triton", "--device", "cuda:99"),
            {"BATON_CLUSTER_TOKEN": TOKEN},
            "error: --device cuda:99: ",
        ),
        (
            "router",
            (),
            {"BATON_CLUSTER_TOKEN": "short"},
            "error: the cluster token from environment BATON_CLUSTER_TOKEN is",
        ),
    ]
    for module, arguments, environment, message in cases:
        told = run(module, *arguments, **environment)
        assert told.returncode == 1, told.stderr
        assert told.stderr.startswith(message)
        assert told.stderr.count("\n") == 1
