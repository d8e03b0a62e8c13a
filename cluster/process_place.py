"""Where a process is, so that another one can tell whether the two are together: on one machine, with pids
that mean the same to both."""

from __future__ import annotations

import os
from pathlib import Path


def process_place() -> str:
    """Where this process's pid means it: machine and pid namespace. "" where that cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
