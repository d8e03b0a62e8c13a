"""A script of the standard library: the GPUs that the NVIDIA driver shows, as one JSON object on its output.

Run by `cluster.gpus` in a process of its own, with the environment of those who will compute. The driver
reads `CUDA_VISIBLE_DEVICES` once per process, and may take seconds to start or end the process that asks it:
neither is to happen to a launcher. No memory of a GPU is taken.
"""

from __future__ import annotations

import ctypes
import json
from typing import Any

LIBRARY = "libcuda.so.1"
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_NAME_BYTES = 256


def look(driver: Any) -> dict[str, object]:
    """`names` of the GPUs in their order, `memory_bytes` of each, and whose memory each reaches (`peers`), or
    the `problem`. `driver`: the library, loaded."""
    status = driver.cuInit(0)
    if status == NO_DEVICE:
        return {"problem": "the NVIDIA driver shows no GPU"}
    if status != 0:
        return {"problem": f"the NVIDIA driver does not start: {_error_name(driver, status)}"}
    count = ctypes.c_int()
    _check(driver, driver.cuDeviceGetCount(ctypes.byref(count)))
    devices = []
    for index in range(count.value):
        device = ctypes.c_int()
        _check(driver, driver.cuDeviceGet(ctypes.byref(device), index))
        devices.append(device)
    return {
        "names": [_name(driver, device) for device in devices],
        "memory_bytes": [_memory_bytes(driver, device) for device in devices],
        "peers": [[_reaches(driver, one, other) for other in devices] for one in devices],
    }


def _name(driver: Any, device: ctypes.c_int) -> str:
    text = ctypes.create_string_buffer(_NAME_BYTES)
    _check(driver, driver.cuDeviceGetName(text, _NAME_BYTES, device))
    return text.value.decode(errors="replace")


def _memory_bytes(driver: Any, device: ctypes.c_int) -> int:
    size = ctypes.c_size_t()
    _check(driver, driver.cuDeviceTotalMem_v2(ctypes.byref(size), device))
    return size.value


def _reaches(driver: Any, one: ctypes.c_int, other: ctypes.c_int) -> bool:
    """Whether a copy or a kernel on `one` can use memory of `other` in place."""
    if one.value == other.value:
        return True
    can = ctypes.c_int()
    _check(driver, driver.cuDeviceCanAccessPeer(ctypes.byref(can), one, other))
    return can.value != 0


def _check(driver: Any, status: int) -> None:
    if status != 0:
        raise RuntimeError(_error_name(driver, status))


def _error_name(driver: Any, status: int) -> str:
    name = ctypes.c_char_p()
    driver.cuGetErrorName(status, ctypes.byref(name))
    return (name.value or f"error {status}".encode()).decode()


def main() -> None:
    try:
        found = look(ctypes.CDLL(LIBRARY))
    except OSError:
        found = {"problem": f"no NVIDIA driver is installed ({LIBRARY})"}
    except RuntimeError as error:
        found = {"problem": f"the NVIDIA driver does not say what GPUs there are: {error}"}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
