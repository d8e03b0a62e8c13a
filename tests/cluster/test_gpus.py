"""What GPUs there are: asked of a driver that is scripted here, in a process that may do anything."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster import doctor, gpus
from cluster.config import ClusterConfig
from cluster.gpu_probe import NO_DEVICE, look
from cluster.gpus import Gpus, find_gpus, may_use_gpus

TWO = Gpus(("A", "B"), (80 << 30, 24 << 30), ((True, False), (False, True)))


class Driver:
    """As much of the CUDA driver as is asked."""

    def __init__(
        self, names: list[str], strangers: set[tuple[int, int]] | None = None, start: int = 0
    ) -> None:
        self._names, self._strangers, self._start = names, strangers or set(), start

    def cuInit(self, flags: int) -> int:
        return self._start

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self._names)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = 7 + index  # a handle, no number
        return 0

    def cuDeviceGetName(self, text: Any, size: int, device: ctypes.c_int) -> int:
        text.value = self._names[device.value - 7].encode()[: size - 1]
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, device: ctypes.c_int) -> int:
        size._obj.value = device.value << 32  # more than 32 bits hold
        return 0

    def cuDeviceCanAccessPeer(self, can: Any, one: ctypes.c_int, other: ctypes.c_int) -> int:
        assert one.value != other.value, "the driver takes no GPU for its own peer"
        can._obj.value = (one.value - 7, other.value - 7) not in self._strangers
        return 0

    def cuGetErrorName(self, status: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" if status == 803 else None
        return 0


def test_the_driver_is_asked_for_names_memory_and_reach() -> None:
    assert look(Driver(["NVIDIA H100", "NVIDIA L4"], {(1, 0)})) == {
        "names": ["NVIDIA H100", "NVIDIA L4"],
        "memory_bytes": [7 << 32, 8 << 32],
        "peers": [[True, True], [False, True]],
    }


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (NO_DEVICE, "the NVIDIA driver shows no GPU"),
        (803, "the NVIDIA driver does not start: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        (4711, "the NVIDIA driver does not start: error 4711"),
    ],
)
def test_a_driver_that_does_not_start_is_one_line(status: int, said: str) -> None:
    assert look(Driver([], start=status)) == {"problem": said}


def test_a_call_that_fails_names_the_error() -> None:
    driver = Driver(["A"])
    driver.cuDeviceTotalMem_v2 = lambda size, device: 803  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="SYSTEM_DRIVER_MISMATCH"):
        look(driver)


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (f"print({msgspec.json.encode(TWO).decode()!r})", TWO),
        ("import os; os.kill(os.getpid(), 11)", "ended the process that asked it, with status -11"),
        ("print('{\"names\": 3}')", "ended the process that asked it, with status 0"),
        ("raise SystemExit(3)", "with status 3"),
        ("import time; time.sleep(60)", "does not answer within 0.5 s"),
    ],
)
def test_whatever_a_driver_does_ends_in_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: Gpus | str
) -> None:
    (tmp_path / "probe.py").write_text(script)
    monkeypatch.setattr(gpus, "PROBE_TIMEOUT_S", 20.0 if "sleep" not in script else 0.5)
    told = find_gpus({}, str(tmp_path / "probe.py"))
    if isinstance(found, Gpus):
        assert told == found
    else:
        assert found in (told.problem or "")
        assert len(told) == 0


def test_the_probe_of_this_machine_answers_in_the_agreed_form() -> None:
    told = find_gpus()
    assert (len(told) == 0) == (told.problem is not None or told.names == ())
    assert len(told.memory_bytes) == len(told.peers) == len(told)


def test_pairs_that_do_not_reach_one_another_both_ways() -> None:
    assert TWO.strangers() == [(0, 1)]
    assert msgspec.structs.replace(TWO, peers=((True, True), (False, True))).strangers() == [(0, 1)]
    assert msgspec.structs.replace(TWO, peers=((True, True), (True, True))).strangers() == []


def test_the_doctor_shows_gpus_their_reach_and_who_would_compute_where() -> None:
    def shown(found: Gpus, environment: dict[str, str] | None = None, **settings: Any) -> doctor.Check:
        return doctor.gpus_check(ClusterConfig(**settings), found, environment or {})

    check = shown(TWO, backend="triton", prefill=1, decode=2)
    assert check.is_ok
    assert check.finding == (
        "2: A (80 GiB), B (24 GiB); `cuda_ipc` not between 0 and 1: KV goes by nccl or gloo there; "
        "GPU 0: prefill-0, decode-1, each with 1/2 of its memory; GPU 1: decode-0"
    )
    near = msgspec.structs.replace(TWO, peers=((True, True), (True, True)))
    assert shown(near).finding == "2: A (80 GiB), B (24 GiB); each reaches the others' memory"
    none = Gpus(problem="no NVIDIA driver is installed (libcuda.so.1)")
    assert shown(none).is_ok
    assert shown(none).finding.endswith("; the backend `cpu` needs none")
    assert not shown(none, backend="triton").is_ok
    assert not may_use_gpus(ClusterConfig())
    assert may_use_gpus(ClusterConfig(backend="auto"))
