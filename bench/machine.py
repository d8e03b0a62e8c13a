"""What this machine can do, measured in the run it is reported with: the yardstick for every figure."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_READ_BANDWIDTH_PROGRAM = """
import sys, time, torch
threads = int(sys.argv[1])
torch.set_num_threads(threads)
data = torch.ones(128 * 1024 * 1024, dtype=torch.float32)
best = 0.0
for _ in range(7):
    start = time.perf_counter()
    data.sum()
    best = max(best, data.nbytes / (time.perf_counter() - start))
print(best / 1e9)
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware and software a result belongs to."""

    cpu: str
    num_cores: int
    isa: tuple[str, ...]
    python: str
    read_gb_per_s_one_thread: float
    read_gb_per_s_all_threads: float


def _read_bandwidth(num_threads: int) -> float:
    """GB/s of a 512 MiB sum, best of seven, in a process of its own."""
    environment = dict(os.environ, OMP_NUM_THREADS=str(num_threads))
    result = subprocess.run(
        [sys.executable, "-c", _READ_BANDWIDTH_PROGRAM, str(num_threads)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return round(float(result.stdout), 1)


def describe_machine() -> Machine:
    """Measure and describe; takes a few seconds."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in info if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = set(fields.get("flags", "").split())
    num_cores = len(os.sched_getaffinity(0))
    return Machine(
        cpu=fields.get("model name", platform.processor()),
        num_cores=num_cores,
        isa=tuple(
            name
            for name in ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8")
            if name in flags
        ),
        python=platform.python_version(),
        read_gb_per_s_one_thread=_read_bandwidth(1),
        read_gb_per_s_all_threads=_read_bandwidth(num_cores),
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
