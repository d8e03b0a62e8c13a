"""How much memory this process may still take: the machine's, or its container's if that is less.

Pools are reserved lazily: the kernel promises more than it has and kills whoever touches too much. So a
pool is checked against what is available before it is made, where the remedy can still be named.
"""

from __future__ import annotations

from pathlib import Path

from cluster.errors import ConfigError

GIB = 2**30


def available_bytes(root: Path = Path("/")) -> int:
    """Memory available to this process without swapping. `root` is for tests.

    The least of `MemAvailable` and, for each cgroup (v1 or v2) the process is in, its limit minus what is
    used, where reclaimable file cache does not count as used.
    """
    available = _meminfo_available(root / "proc/meminfo")
    for directory, limit_name, usage_name, cache_name in _cgroups(root):
        try:
            limit_text = (directory / limit_name).read_text().strip()
            if limit_text == "max":
                continue
            usage = int((directory / usage_name).read_text())
            stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        except FileNotFoundError:  # no memory controller at this level: no limit from it
            continue
        cache = int(stat.get(cache_name, "0"))
        available = min(available, int(limit_text) - max(0, usage - cache))
    return max(0, available)


def check_available(num_bytes: int, purpose: str, advice: str) -> None:
    """Refuse what cannot fit.

    Raises:
        ConfigError: with needed and available GiB, and the advice.
    """
    available = available_bytes()
    if num_bytes > available:
        raise ConfigError(
            f"{purpose} needs {num_bytes / GIB:.2f} GiB but only {available / GIB:.2f} GiB of memory "
            f"is available: {advice}"
        )


def _meminfo_available(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError(f"{path} names no `MemAvailable`")


def _cgroups(root: Path) -> list[tuple[Path, str, str, str]]:
    """(directory, limit, usage, name of the cache in memory.stat) of each level the process is under.

    In a container the paths of /proc/self/cgroup may not exist below the mount, whose top is then the
    container's own group: levels that are absent are skipped by the caller.
    """
    levels: list[tuple[Path, str, str, str]] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        return levels
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = top / path.lstrip("/")
        for directory in (own, *own.parents):
            if directory != top and top not in directory.parents:
                break
            levels.append((directory, *names))
    return levels
