"""How fast this machine could move KV: what `baton doctor` says of the edges. A tenth of a second each.

`shm` copies between two mappings, as a prefill worker writes into a decode worker's pool; `gloo` is bounded
by what one TCP stream carries over loopback. One thread each, as the edges use.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from typing import Final

NUM_BYTES: Final = 64 << 20
_CHUNK_BYTES: Final = 1 << 20


def shm_bytes_per_s(num_bytes: int = NUM_BYTES) -> float:
    """Second of two copies: the first also pays for the pages.

    Raises:
        OSError: shared memory cannot be had, or not that much.
    """
    descriptor = os.memfd_create("baton-doctor")
    try:
        os.ftruncate(descriptor, num_bytes)
        with mmap.mmap(-1, num_bytes) as source, mmap.mmap(descriptor, num_bytes) as target:
            seconds = 0.0
            with memoryview(source) as read, memoryview(target) as write:
                for _ in range(2):
                    began = time.perf_counter()
                    write[:] = read
                    seconds = time.perf_counter() - began
            return num_bytes / seconds
    finally:
        os.close(descriptor)


def loopback_bytes_per_s(num_bytes: int = NUM_BYTES) -> float:
    """
    Raises:
        OSError: loopback cannot be used.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=_send, args=(server.getsockname(), num_bytes))
        sender.start()
        stream, _ = server.accept()
        buffer = bytearray(_CHUNK_BYTES)
        with stream:
            began, received = time.perf_counter(), 0
            while (number := stream.recv_into(buffer)) > 0:
                received += number
            seconds = time.perf_counter() - began
        sender.join()
    return received / seconds


def _send(address: tuple[str, int], num_bytes: int) -> None:
    chunk = bytes(_CHUNK_BYTES)
    with socket.create_connection(address, timeout=10) as stream:
        for _ in range(num_bytes // _CHUNK_BYTES):
            stream.sendall(chunk)
