"""Pools: fresh zero memory, shared without a name, attached only to what was announced, and freed."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from cluster.errors import ConfigError, EdgeError
from cluster.kv.layout import KVLayout
from cluster.kv.memory import available_bytes, check_available
from cluster.kv.pool import HEADER_BYTES, KVPool, attach_pool
from tests.kv.edge_harness import GEOMETRY, nothing_leaked, resources

LAYOUT = KVLayout.from_geometry(GEOMETRY)


@pytest.mark.parametrize("make", [KVPool.private, KVPool.shared], ids=["private", "shared"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_a_fresh_pool_is_zero_and_of_the_layouts_shape(make: Any, dtype: str) -> None:
    layout = KVLayout.from_geometry(msgspec.structs.replace(GEOMETRY, dtype=dtype))
    pool = make(layout)
    assert tuple(pool.tensor.shape) == layout.shape
    assert pool.tensor.dtype is getattr(torch, dtype)
    assert pool.tensor.is_contiguous()
    assert pool.tensor.data_ptr() % 64 == 0
    assert not pool.tensor.any()
    pool.tensor.fill_(1)
    pool.close()
    pool.close()
    with pytest.raises(EdgeError, match="closed"):
        _ = pool.tensor
    again = make(layout)
    assert not again.tensor.any()
    again.close()


def test_memory_is_taken_only_as_blocks_are_written() -> None:
    big = KVLayout.from_geometry(msgspec.structs.replace(GEOMETRY, num_blocks=40_000))  # 240 MiB
    before = resident_bytes()
    pool = KVPool.private(big)
    pool.tensor[7] = 1
    assert resident_bytes() - before < 32 * 2**20
    pool.close()


def test_writes_are_seen_through_an_attached_pool_both_ways() -> None:
    pool = KVPool.shared(LAYOUT)
    attached = attach_pool(pool.endpoint(), GEOMETRY)
    pool.tensor[3] = 1.5
    assert torch.equal(attached.tensor, pool.tensor)
    attached.tensor[5] = -2
    assert torch.equal(attached.tensor, pool.tensor)
    pool.close()  # the other mapping stays good
    assert attached.tensor[5, 0, 0, 0, 0, 0] == -2
    attached.close()


async def test_b140_nothing_is_left_after_closing() -> None:
    before = resources()
    pool = KVPool.shared(LAYOUT)
    attached = attach_pool(pool.endpoint(), GEOMETRY)
    view = attached.tensor[3]
    attached.close()
    pool.close()
    view.fill_(1)  # a view keeps its memory: no crash, and gone with the view
    del view
    assert await nothing_leaked(before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nonce": "00" * 16}, "nonce differs"),
        ({"fd": 0}, "is not a KV pool"),
        ({"fd": 9999}, "cannot be opened"),
        ({"pid": 2**22 + 1}, "cannot be opened"),
        ({"pid": "7"}, "needs `pid`"),
    ],
)
def test_what_is_not_the_announced_pool_is_refused(changes: dict[str, str | int], message: str) -> None:
    pool = KVPool.shared(LAYOUT)
    with pytest.raises(EdgeError, match=message):
        attach_pool(pool.endpoint() | changes, GEOMETRY)
    pool.close()


def test_another_pool_under_the_same_descriptor_is_refused() -> None:
    """A worker restarted under the same pid and descriptor number."""
    first = KVPool.shared(LAYOUT)
    endpoint = first.endpoint()
    first.close()
    second = KVPool.shared(LAYOUT)
    assert second.endpoint()["fd"] == endpoint["fd"]
    with pytest.raises(EdgeError, match="nonce differs"):
        attach_pool(endpoint, GEOMETRY)
    second.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks": 49},
        {"first_layer": 1},
        {"num_layers": 2, "num_heads": 3},
        {"dtype": "int8", "head_dim": 60},
    ],
)
def test_b080_a_pool_of_another_geometry_is_refused(changes: dict[str, Any]) -> None:
    pool = KVPool.shared(LAYOUT)
    with pytest.raises(EdgeError, match="announced"):
        attach_pool(pool.endpoint(), msgspec.structs.replace(GEOMETRY, **changes))
    pool.close()


@pytest.mark.parametrize("kind", ["file", "unsealed", "pipe", "headless"])
def test_files_that_are_no_pools_are_refused(tmp_path: Path, kind: str) -> None:
    num_bytes = HEADER_BYTES + LAYOUT.pool_bytes
    other_fd = None
    if kind == "file":
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, num_bytes)
    elif kind == "pipe":
        fd, other_fd = os.pipe()
    else:
        fd = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, num_bytes)
        if kind == "headless":
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(EdgeError, match="is not a KV pool"):
        attach_pool({"pid": os.getpid(), "fd": fd, "nonce": "00" * 16}, GEOMETRY)
    os.close(fd)
    if other_fd is not None:
        os.close(other_fd)


def test_a_private_pool_has_no_endpoint() -> None:
    pool = KVPool.private(LAYOUT)
    with pytest.raises(ConfigError, match="private"):
        pool.endpoint()
    pool.close()


@pytest.mark.parametrize("make", [KVPool.private, KVPool.shared], ids=["private", "shared"])
def test_b139_a_pool_larger_than_memory_is_refused_with_both_sizes(make: Any) -> None:
    blocks = 2 * available_bytes() // LAYOUT.bytes_per_block
    huge = KVLayout.from_geometry(msgspec.structs.replace(GEOMETRY, num_blocks=blocks))
    with pytest.raises(ConfigError, match=r"needs \d+\.\d\d GiB but only \d+\.\d\d GiB .*: lower the number"):
        make(huge)


def test_b139_pools_do_not_live_in_dev_shm() -> None:
    before = os.statvfs("/dev/shm").f_bfree
    pool = KVPool.shared(KVLayout.from_geometry(msgspec.structs.replace(GEOMETRY, num_blocks=4000)))
    pool.tensor.fill_(1)  # 24 MiB
    taken = (before - os.statvfs("/dev/shm").f_bfree) * os.statvfs("/dev/shm").f_bsize
    assert taken < 8 * 2**20
    pool.close()


def machine(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   1000 kB\n", **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_available_memory_is_the_machines_where_there_is_no_limit(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, {})) == 1000 * 1024


def test_available_memory_respects_every_level_of_cgroup_v2(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": "500000\n",
            "sys/fs/cgroup/pod/memory.current": "300000\n",
            "sys/fs/cgroup/pod/memory.stat": "anon 1\ninactive_file 50000\n",
        },
    )
    assert available_bytes(root) == 250000


def test_available_memory_respects_cgroup_v1_in_a_container(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/abc\n",  # a path that is not mounted here
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "400000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "390000\n",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 20000\n",
        },
    )
    assert available_bytes(root) == 30000


def test_what_fits_is_not_refused() -> None:
    check_available(1, "a byte", "")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
