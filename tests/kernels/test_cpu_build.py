"""The compile cache, the fallback where there is no compiler, and what the native kernels refuse."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels.cpu import build
from kernels.cpu.backend import CpuBackend
from tests.support.copying_compiler import copying_compiler


@pytest.fixture
def counting_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`CXX` that notes each library it links and copies that of the machine's cache: a fast compiler."""
    CpuBackend(1)  # fills the machine's cache
    runs = tmp_path / "runs"
    monkeypatch.setenv("CXX", str(copying_compiler(tmp_path, build.library_path(), runs)))
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    return runs


def test_second_load_does_not_compile(counting_compiler, caplog):
    caplog.set_level(logging.INFO, logger="kernels.cpu.build")
    assert CpuBackend(1).is_native
    assert [record.getMessage()[:24] for record in caplog.records] == ["compiled the CPU kernels"]
    caplog.clear()
    assert CpuBackend(1).is_native
    assert counting_compiler.read_text().splitlines() == ["run"]
    assert caplog.records == []


def test_processes_that_start_together_compile_once(counting_compiler):
    code = "from kernels.cpu.backend import CpuBackend; assert CpuBackend(1).is_native"
    environment = {**os.environ, "PYTHONPATH": str(Path(build.__file__).parents[2])}
    workers = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [worker.wait(timeout=60) for worker in workers] == [0, 0]
    assert counting_compiler.read_text().splitlines() == ["run"]
    cached = {path.suffix for path in build.library_path().parent.iterdir()}
    assert cached == {".so", ".lock"}


def test_a_lock_left_by_a_dead_process_does_not_block(counting_compiler):
    path = build.library_path()
    path.parent.mkdir(parents=True)
    path.with_suffix(".lock").touch()
    assert CpuBackend(1).is_native


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "no C\\+\\+ compiler: `CXX` is no-such-compiler"),
        ("false", "failed with status 1"),
    ],
)
def test_without_a_working_compiler_it_falls_back_with_one_line(
    tmp_path, monkeypatch, caplog, compiler, reason
):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    backend = CpuBackend(1)
    assert not backend.is_native
    assert backend.packed_layout == "rows_fp32"
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("CPU kernels are not compiled, running slower in torch: ")
    caplog.clear()
    with pytest.raises(build.BuildError, match=reason):
        build.load_library()


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGES = {"empty": lambda _: b"", "another": lambda _: b"not a library", "cut": cut, "flipped": flipped}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_library_is_compiled_again(damage, counting_compiler, caplog):
    """A cut one would load, and end the process where a page is missing."""
    good = build.library_path()
    build.load_library()
    content = good.read_bytes()
    good.unlink()  # it is mapped by now: the damaged one is another file
    good.write_bytes(damage(content))
    caplog.clear()
    assert not build.is_whole(good)
    assert CpuBackend(1).is_native
    assert [r.getMessage() for r in caplog.records] == [f"`{good}` is damaged: compiling it again"]
    assert build.is_whole(good)
    assert counting_compiler.read_text().splitlines() == ["run"] * 2


def test_a_damaged_library_and_no_compiler_fall_back(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    path = build.library_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a library")
    assert not CpuBackend(1).is_native
    assert "is damaged" in caplog.text
    assert "running slower in torch: no C++ compiler" in caplog.text


def test_a_library_that_is_whole_and_cannot_be_loaded_says_what_to_do(tmp_path, monkeypatch):
    """As where programs may not be run from the cache's file system."""
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    path = build.library_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no program" + hashlib.sha256(b"no program").digest())
    with pytest.raises(build.BuildError, match=r"cannot be loaded: .*delete it, or set BATON_CACHE_DIR"):
        build.load_library()


def test_a_cache_that_cannot_be_written_falls_back_and_says_what_to_do(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "file"))
    assert not CpuBackend(1).is_native
    [record] = caplog.records
    assert "cannot be written: " in record.getMessage()
    assert record.getMessage().endswith("set BATON_CACHE_DIR to a directory that can")


def test_the_cache_key_covers_sources_and_torch(tmp_path, monkeypatch):
    before = build.library_path()
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    assert build.library_path() != before
    monkeypatch.undo()
    for name in (*build.SOURCES, *build.HEADERS):
        (tmp_path / name).write_bytes((build.SOURCE_DIR / name).read_bytes())
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path)
    assert build.library_path() == before
    (tmp_path / build.HEADERS[0]).write_text("changed")
    assert build.library_path() != before


def test_every_source_is_part_of_the_build():
    assert {path.name for path in build.SOURCE_DIR.glob("*.cpp")} == set(build.SOURCES)
    assert {path.name for path in build.SOURCE_DIR.glob("*.h")} == set(build.HEADERS)


def test_threads_must_be_positive():
    with pytest.raises(ValueError, match="num_threads"):
        CpuBackend(0)


class TestNativeRefuses:
    """What would read or write memory that is not the caller's."""

    @pytest.fixture
    def native(self) -> CpuBackend:
        backend = CpuBackend(1)
        assert backend.is_native
        return backend

    def test_a_weight_of_another_width_or_layout(self, native):
        x = torch.zeros(2, 64)
        with pytest.raises(ValueError, match="not a weight packed as panels"):
            native.linear(x, native.pack_linear(torch.zeros(8, 63)))
        with pytest.raises(ValueError, match="not a weight packed as panels"):
            native.linear(x, torch.zeros(8, 64))
        with pytest.raises(ValueError, match="not a weight packed as panels"):
            native.linear(x, native.pack_linear(torch.zeros(8, 64))[:-1])

    def test_other_dtypes_and_shapes(self, native):
        packed = native.pack_linear(torch.zeros(8, 64))
        with pytest.raises(TypeError, match="fp32 or bf16"):
            native.linear(torch.zeros(2, 64, dtype=torch.float16), packed)
        with pytest.raises(ValueError, match="bias"):
            native.linear(torch.zeros(2, 64), packed, torch.zeros(7))
        with pytest.raises(ValueError, match="weight"):
            native.rms_norm(torch.zeros(2, 64), torch.zeros(63), 1e-5)
        with pytest.raises(ValueError, match="gate_up"):
            native.silu_mul(torch.zeros(2, 7))

    @pytest.mark.parametrize("slot", [-1, 32])
    def test_slots_outside_the_pool(self, native, slot):
        pool = torch.zeros(2, 1, 2, 16, 1, 8)
        rows = torch.ones(2, 1, 8)
        with pytest.raises(IndexError, match=f"slot outside the pool of 32: {slot}"):
            native.write_kv(rows, rows, pool, 0, torch.tensor([0, slot]))
        assert not pool.any()

    @pytest.mark.parametrize("position", [-1, 10])
    def test_positions_outside_the_table(self, native, position):
        table = torch.zeros(10, 4)
        with pytest.raises(IndexError, match=f"rotary table of 10: {position}"):
            native.rotary(torch.zeros(1, 1, 8), torch.tensor([position]), table, table)

    @pytest.mark.parametrize(
        ("query_starts", "context_len", "blocks"),
        [
            ([0, 2], 17, [0, 2]),
            ([0, 2], 17, [0, -1]),
            ([0, 2], 33, [0, 1]),
            ([0, 2], 1, [0, 1]),
            ([0, 3], 9, [0, 1]),
        ],
    )
    def test_sequences_that_do_not_fit_the_pool(self, native, query_starts, context_len, blocks):
        pool = torch.zeros(2, 1, 2, 16, 1, 8)
        meta = SimpleNamespace(
            query_starts=torch.tensor(query_starts, dtype=torch.int32),
            context_lens=torch.tensor([context_len], dtype=torch.int32),
            block_tables=torch.tensor([blocks], dtype=torch.int32),
        )
        with pytest.raises(IndexError, match="sequence 0 does not fit"):
            native.paged_attention(torch.zeros(2, 1, 8), pool, 0, meta, 1.0)

    def test_layers_outside_the_pool(self, native):
        pool, rows = torch.zeros(2, 1, 2, 16, 1, 8), torch.zeros(1, 1, 8)
        with pytest.raises(IndexError, match="layer outside the pool of 1: 1"):
            native.write_kv(rows, rows, pool, 1, torch.tensor([0]))
