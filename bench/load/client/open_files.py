"""The limit of open files: each request in flight holds a connection, and each connection is one.

1. Before a run `check_open_files` compares what its plan needs for certain with the hard limit.
2. Each client process raises its soft limit to the hard one (`raise_file_limit`).
3. A run that needs more than can be known before (an open loop against a slow server) meets the limit while
   it goes on: those requests end as `Status.CLIENT`, and the run is not valid.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Sequence

from bench.load.client.frames import Job
from cluster.errors import ConfigError

SPARE_FILES = 32  # pipes, event loop, timer, and what the interpreter holds
FILES_PER_PROCESS = 4  # that the parent holds of each of its client processes: three pipes and its exit


def certain_connections(jobs: Sequence[Job], num_slots: int | None) -> int:
    """How many requests one process has in flight at once whatever the server does: its slots, or what is
    due in one moment.
    """
    chains = [job for job in jobs if job.turn == 0]
    if num_slots is not None:
        return min(num_slots, len(chains))
    return max(Counter(job.scheduled_s for job in chains).values(), default=0)


def check_open_files(connections: Sequence[int], soft_limit: int, hard_limit: int) -> None:
    """`connections`: per client process, from `certain_connections`. The limits are `getrlimit`'s; those of
    the client processes are raised to the hard one, their parent's is not.

    Raises:
        ConfigError: one process, or their parent, needs more files than it may open.
    """
    needed = max(connections, default=0) + SPARE_FILES
    of_parent = len(connections) * FILES_PER_PROCESS + SPARE_FILES
    if needed > hard_limit != resource.RLIM_INFINITY:
        most = max(1, hard_limit - SPARE_FILES)
        raise ConfigError(
            f"{sum(connections):,} requests at once need {needed:,} open files in a client process, but the "
            f"hard limit is {hard_limit:,} (ulimit -Hn): give --processes {-(-sum(connections) // most)} or "
            "more, fewer requests at once, or raise the limit."
        )
    if of_parent > soft_limit != resource.RLIM_INFINITY:
        raise ConfigError(
            f"{len(connections):,} client processes need {of_parent:,} open files in their parent, but its "
            f"limit is {soft_limit:,} (ulimit -n): give fewer --processes, or raise the limit."
        )


def file_limits() -> tuple[int, int]:
    """Soft and hard."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def raise_file_limit() -> None:
    """As many files as this process may open without asking anyone."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
