"""Large files in memory: whole huge pages written, every byte read, whatever the system does about pages."""

from __future__ import annotations

import ctypes
import errno
import io
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine import weight_pages
from cluster.engine.file_lock import descriptor_lock
from cluster.engine.weight_pages import HugePageWriter, map_file_huge
from cluster.errors import ConfigError
from cluster.kv.mapping import HUGE_PAGE_BYTES


class Disk(io.RawIOBase):
    """Takes at most `most` bytes at a time, and remembers how many it was asked to take."""

    def __init__(self, most: int = 1 << 40) -> None:
        self.most, self.content, self.asked = most, bytearray(), list[int]()

    def write(self, content: memoryview) -> int:  # type: ignore[override]
        self.asked.append(len(content))
        taken = bytes(content[: self.most])
        self.content += taken
        return len(taken)


def pattern(num_bytes: int) -> bytes:
    return (bytes(range(251)) * (num_bytes // 251 + 1))[:num_bytes]


@given(st.lists(st.integers(0, 3 * HUGE_PAGE_BYTES), max_size=6))
def test_whole_huge_pages_are_written_and_then_the_rest(sizes: list[int]) -> None:
    disk, content = Disk(), pattern(sum(sizes))
    writer, start = HugePageWriter(disk), 0
    for size in sizes:
        writer.write(memoryview(content)[start : start + size])
        start += size
    writer.close()
    assert disk.content == content
    num_pages, rest = divmod(len(content), HUGE_PAGE_BYTES)
    assert disk.asked == [HUGE_PAGE_BYTES] * num_pages + [rest] * bool(rest)


def test_a_disk_that_takes_less_gets_the_rest_again() -> None:
    disk, content = Disk(most=HUGE_PAGE_BYTES // 3), pattern(2 * HUGE_PAGE_BYTES + 5)
    writer = HugePageWriter(disk)
    writer.write(content)
    writer.close()
    assert disk.content == content


def written(path: Path, num_bytes: int, at_a_time: int) -> int:
    """A descriptor of a file whose pages are in memory as they were written."""
    content = memoryview(pattern(num_bytes))
    with path.open("wb", buffering=0) as file:
        for start in range(0, num_bytes, at_a_time):
            file.write(content[start : start + at_a_time])
    return os.open(path, os.O_RDONLY)


@pytest.mark.parametrize("num_bytes", [1, 4097, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 5])
@pytest.mark.parametrize("at_a_time", [1 << 16, HUGE_PAGE_BYTES])
def test_every_byte_is_there_from_a_huge_pages_boundary(
    tmp_path: Path, num_bytes: int, at_a_time: int
) -> None:
    fd = written(tmp_path / "weights", num_bytes, at_a_time)
    buffer = map_file_huge(fd, num_bytes)
    os.close(fd)
    assert bytes(buffer) == pattern(num_bytes)
    assert ctypes.addressof(buffer) % HUGE_PAGE_BYTES == 0


def test_small_pages_in_the_cache_do_not_stay_where_the_file_system_has_huge_ones(tmp_path: Path) -> None:
    num_bytes = 4 * HUGE_PAGE_BYTES
    fd = written(tmp_path / "weights", num_bytes, 1 << 14)
    os.fsync(fd)  # what is not on disk yet is not dropped
    comes_huge = weight_pages._comes_huge(fd)
    buffer = map_file_huge(fd, num_bytes)
    if comes_huge:
        assert weight_pages._huge_bytes(buffer) == num_bytes
    assert bytes(buffer) == pattern(num_bytes)
    os.close(fd)


@pytest.mark.parametrize("comes_huge", [False, True])
def test_the_whole_file_is_read_again_only_where_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_huge: bool
) -> None:
    num_bytes = 3 * HUGE_PAGE_BYTES
    fd = written(tmp_path / "weights", num_bytes, HUGE_PAGE_BYTES)
    dropped, asked = [], []
    monkeypatch.setattr(weight_pages.os, "posix_fadvise", lambda *args: dropped.append(args[1:3]))
    monkeypatch.setattr(weight_pages, "collapse", lambda buffer: asked.append(len(buffer)))

    def huge_bytes(buffer: ctypes.Array[ctypes.c_char]) -> int:
        is_whole_again = len(dropped) == 2
        return len(buffer) if comes_huge and (len(buffer) < num_bytes or is_whole_again) else 0

    monkeypatch.setattr(weight_pages, "_huge_bytes", huge_bytes)
    assert bytes(map_file_huge(fd, num_bytes)) == pattern(num_bytes)
    os.close(fd)
    first = (0, HUGE_PAGE_BYTES)
    assert dropped == ([first, (0, num_bytes)] if comes_huge else [first])
    assert asked == ([] if comes_huge else [num_bytes])


def test_a_system_that_says_nothing_of_pages_still_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:
        raise OSError(errno.ENOENT, "no such file", path)

    monkeypatch.setattr("builtins.open", refuse)
    fd = os.open(tmp_path / "weights", os.O_RDWR | os.O_CREAT)
    os.write(fd, pattern(2 * HUGE_PAGE_BYTES))
    assert bytes(map_file_huge(fd, 2 * HUGE_PAGE_BYTES)) == pattern(2 * HUGE_PAGE_BYTES)
    os.close(fd)


def test_of_a_file_without_a_whole_huge_page_nobody_asks_for_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_pages, "_huge_bytes", None)
    num_bytes = HUGE_PAGE_BYTES - 1
    fd = written(tmp_path / "weights", num_bytes, num_bytes)
    assert bytes(map_file_huge(fd, num_bytes)) == pattern(num_bytes)
    os.close(fd)


def test_what_cannot_be_mapped_says_so(tmp_path: Path) -> None:
    fd = written(tmp_path / "weights", 10, 10)
    os.close(fd)
    with pytest.raises(ConfigError, match=r"^10 bytes cannot be mapped: \w"):
        map_file_huge(fd, 10)


def test_who_holds_the_file_is_waited_for_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, num_bytes = tmp_path / "weights", HUGE_PAGE_BYTES + 5
    fd, other = written(path, num_bytes, num_bytes), os.open(path, os.O_RDONLY)
    monkeypatch.setattr(weight_pages, "_PATIENCE_S", 0.05)
    with descriptor_lock(other, 1.0):
        assert bytes(map_file_huge(fd, num_bytes)) == pattern(num_bytes)
    os.close(fd)
    fd = os.open(path, os.O_RDONLY)
    assert bytes(map_file_huge(fd, num_bytes)) == pattern(num_bytes)
    with descriptor_lock(other, 1.0):  # it was let go of, though the file is still open
        pass
    os.close(fd)
    os.close(other)
