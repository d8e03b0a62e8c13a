"""Memory of pools: aligned, zero, on huge pages where there are any, and unmapped with the last view."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections.abc import Iterator

import pytest
import torch

from cluster.errors import ConfigError
from cluster.kv.mapping import HUGE_PAGE_BYTES, commit, map_file, map_private

SIZES = [1, mmap.PAGESIZE, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 5]


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("mapped", os.MFD_CLOEXEC)
    yield fd
    os.close(fd)


def ranges() -> list[tuple[int, int]]:
    """Of this process's address space, (start, end)."""
    with open("/proc/self/maps") as lines:
        return [tuple(int(x, 16) for x in line.split()[0].split("-")) for line in lines]  # type: ignore[misc]


def is_mapped(address: int) -> bool:
    return any(start <= address < end for start, end in ranges())


def kilobytes_on_huge_pages(address: int) -> int:
    """Of the mapping that begins at `address`."""
    found, is_it = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                is_it = int(words[0].split("-")[0], 16) == address
            elif is_it and words[0] in ("AnonHugePages:", "ShmemPmdMapped:"):
                found += int(words[1])
    return found


@pytest.mark.parametrize("num_bytes", SIZES)
def test_private_memory_is_aligned_zero_and_writable(num_bytes: int) -> None:
    buffer = map_private(num_bytes)
    assert len(buffer) == num_bytes
    assert ctypes.addressof(buffer) % HUGE_PAGE_BYTES == 0
    values = torch.frombuffer(buffer, dtype=torch.uint8)
    assert not values.any()
    values.fill_(7)
    assert bytes(buffer) == b"\x07" * num_bytes


@pytest.mark.parametrize("num_bytes", SIZES)
def test_a_file_is_seen_through_every_mapping(file: int, num_bytes: int) -> None:
    os.ftruncate(file, num_bytes)
    ours, theirs = map_file(num_bytes, file), map_file(num_bytes, file)
    commit(ours)
    assert ctypes.addressof(theirs) % HUGE_PAGE_BYTES == 0
    assert not torch.frombuffer(theirs, dtype=torch.uint8).any()
    theirs[num_bytes - 1] = b"z"
    assert ours[num_bytes - 1] == b"z"
    assert os.pread(file, 1, num_bytes - 1) == b"z"


def test_a_committed_file_is_in_memory_and_says_truly_whether_on_huge_pages(file: int) -> None:
    num_bytes = 4 * HUGE_PAGE_BYTES
    os.ftruncate(file, num_bytes)
    buffer = map_file(num_bytes, file)
    is_huge = commit(buffer)
    assert os.fstat(file).st_blocks * 512 == num_bytes
    if is_huge:
        assert kilobytes_on_huge_pages(ctypes.addressof(buffer)) * 1024 == num_bytes


def test_the_last_view_unmaps_and_nothing_around_is_touched() -> None:
    buffer = map_private(2 * HUGE_PAGE_BYTES)
    start = ctypes.addressof(buffer)
    view = torch.frombuffer(buffer, dtype=torch.uint8)[5:9]
    del buffer
    gc.collect()
    view.fill_(1)
    assert is_mapped(start)
    del view
    gc.collect()
    assert not is_mapped(start)


def test_reservations_leave_nothing_behind() -> None:
    def span() -> int:
        return sum(end - start for start, end in ranges())

    map_private(HUGE_PAGE_BYTES)  # what the first call loads stays
    before = span()
    for num_bytes in SIZES * 20:
        map_private(num_bytes)
    assert span() - before < HUGE_PAGE_BYTES


def test_what_cannot_be_mapped_is_one_sentence(file: int) -> None:
    with pytest.raises(ConfigError, match=r"^1152921504606846976 bytes cannot be mapped: \w"):
        map_private(2**60)
    fd, other = os.pipe()
    with pytest.raises(ConfigError, match="cannot be mapped"):
        map_file(mmap.PAGESIZE, fd)
    os.close(fd)
    os.close(other)
