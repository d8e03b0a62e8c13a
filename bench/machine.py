"""What this machine can do, measured in the run it is reported with: the yardstick for every figure."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cluster.errors import BatonError

# Each probe runs in a process of its own: thread counts are fixed there, and no torch is loaded here.
_PROBE_PROGRAM = """
import json, sys, time, torch
from kernels.cpu.build import BuildError
from kernels.cpu.isa import IsaError
from kernels.cpu.probe import MachineProbe
num_threads = int(sys.argv[1])
torch.set_num_threads(num_threads)

def best_rate(work, amount, repeats):
    work()
    best = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = max(best, amount / (time.perf_counter() - start))
    return best / 1e9

data = torch.ones(128 * 1024 * 1024, dtype=torch.float32)
rates = {"read": best_rate(data.sum, data.nbytes, 7)}
rows, columns, depth = 512, 1536, 1536
for name, dtype, repeats in (("fp32", torch.float32, 20), ("bf16", torch.bfloat16, 3)):
    a, b = torch.ones(rows, depth, dtype=dtype), torch.ones(depth, columns, dtype=dtype)
    rates[name] = best_rate(lambda: a @ b, 2 * rows * columns * depth, repeats)
x, w = torch.ones(rows, depth, dtype=torch.int8), torch.ones(depth, columns, dtype=torch.int8)
rates["int8"] = best_rate(lambda: torch._int_mm(x, w), 2 * rows * columns * depth, 3)
try:
    probe = MachineProbe(num_threads)
    read, multiply_adds = probe.measure()
    multiply_adds = max(multiply_adds, probe.tile_multiply_adds_per_s(is_bf16=True))
    bytes_of_tiles = probe.tile_multiply_adds_per_s(is_bf16=False)
    rates["read"], rates["registers"] = max(rates["read"], read / 1e9), 2 * multiply_adds / 1e9
    rates["fp32"] = max(rates["fp32"], 2 * probe.fp32_multiply_adds_per_s() / 1e9)
    rates["int8"] = max(rates["int8"], 2 * max(probe.byte_multiply_adds_per_s(), bytes_of_tiles) / 1e9)
except (BuildError, IsaError):  # torch's products are the yardstick
    pass
print(json.dumps(rates))
"""
_PROBE_TIMEOUT_S = 600  # the first one compiles
_REPOSITORY = Path(__file__).resolve().parents[1]


class _Rates(msgspec.Struct):
    read: float  # GB/s, of memory far larger than the caches
    fp32: float  # GFLOP/s of a 512 x 1536 x 1536 product, or from registers if that is more
    bf16: float  # of a product
    int8: float  # as fp32
    registers: float = 0.0  # GFLOP/s of multiply-adds that wait for no memory: fp32, pairs of bf16, tiles

    @property
    def gflop_per_s(self) -> float:
        return round(max(self.fp32, self.bf16, self.registers), 1)


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware and software a result belongs to."""

    cpu: str
    num_cores: int
    isa: tuple[str, ...]
    python: str
    read_gb_per_s_one_thread: float
    read_gb_per_s_all_threads: float
    gemm_gflop_per_s_one_thread: float  # the best of torch's products and of multiply-adds from registers
    gemm_gflop_per_s_all_threads: float
    # The same of fp32 alone and of int8, two operations per multiply-add; 0: not measured.
    fp32_gflop_per_s_one_thread: float = 0.0
    fp32_gflop_per_s_all_threads: float = 0.0
    int8_gop_per_s_one_thread: float = 0.0
    int8_gop_per_s_all_threads: float = 0.0


def _measure(num_threads: int) -> _Rates:
    """The best of several tries each: what neighbours leave of the machine at its quietest.

    Raises:
        BatonError: the probe failed, or took too long.
    """
    environment = dict(os.environ, OMP_NUM_THREADS=str(num_threads), PYTHONPATH=str(_REPOSITORY))
    try:
        result = subprocess.run(
            [sys.executable, "-c", _PROBE_PROGRAM, str(num_threads)],
            env=environment,
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BatonError(
            f"this machine's rates were not measured within {_PROBE_TIMEOUT_S} s: is it busy with other work?"
        ) from None
    if result.returncode != 0:
        last = (result.stderr.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise BatonError(f"this machine's rates cannot be measured: {last}")
    return msgspec.json.decode(result.stdout, type=_Rates)


def cpu_facts() -> tuple[str, tuple[str, ...]]:
    """Model name, and the instruction sets that matter to matrix products."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    pairs = (line.split(":", 1) for line in info if ":" in line)
    fields = {key.strip(): value.strip() for key, value in pairs}
    flags = set(fields.get("flags", "").split())
    isa = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8")
    return fields.get("model name", platform.processor()), tuple(name for name in isa if name in flags)


def describe_machine() -> Machine:
    """Measure and describe; takes about ten seconds."""
    cpu, isa = cpu_facts()
    num_cores = len(os.sched_getaffinity(0))
    one, together = _measure(1), _measure(num_cores)
    return Machine(
        cpu=cpu,
        num_cores=num_cores,
        isa=isa,
        python=platform.python_version(),
        read_gb_per_s_one_thread=round(one.read, 1),
        read_gb_per_s_all_threads=round(together.read, 1),
        gemm_gflop_per_s_one_thread=one.gflop_per_s,
        gemm_gflop_per_s_all_threads=together.gflop_per_s,
        fp32_gflop_per_s_one_thread=round(one.fp32, 1),
        fp32_gflop_per_s_all_threads=round(together.fp32, 1),
        int8_gop_per_s_one_thread=round(one.int8, 1),
        int8_gop_per_s_all_threads=round(together.int8, 1),
    )


def proportional_memory_bytes(pid: int) -> tuple[int, int]:
    """(RSS, PSS) of a process; PSS counts a page shared by n processes as 1/n."""
    fields = {
        key: int(value.split()[0]) * 1024
        for key, value in (
            line.split(":", 1)
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            if line.startswith(("Rss:", "Pss:"))
        )
    }
    return fields["Rss"], fields["Pss"]
