"""What a comparison is asked to do, as a value; `__main__` makes it from the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.peers.chats import Chats
from bench.peers.load import TraceLoad
from bench.peers.peer import Places


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What is compared, and how."""

    places: Places
    cores: tuple[int, ...]
    num_rounds: int
    is_together: bool  # all servers run at once, and take turns at every load
    closed_loops: tuple[tuple[int, int], ...]  # (in flight, requests), in order
    chats: Chats | None  # the closed loops' prompts; None: random ids
    trace: TraceLoad | None
    no_trace_reason: str | None
    goodput_names: frozenset[str]  # peers that are searched for max goodput; empty: each family's fastest
    budget_s: float  # of the whole comparison; the searches take no more probes than it has room for
    model_title: str  # the model's own name, and its file
    not_chosen: Mapping[str, str]  # title of a server that is not measured |-> why
    earlier: Path | None  # results that this comparison adds to
    max_loop_s: float  # a closed loop that would take longer is left out, and said so
    out: Path  # without suffix: .json and .md are written


class Interrupted(Exception):
    """The user wants to stop. The message says what is written."""
