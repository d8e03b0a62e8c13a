"""What a table says about where it comes from: date, machine, model, load, and the time it took."""

from __future__ import annotations

import datetime
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import orjson

from bench.peers.catalogue import SPECULATION
from bench.peers.chats import NUM_WARM_UP, TASKS, Chats
from bench.peers.comparison import Comparison
from bench.peers.estimate import MAX_PROBE_S, MIN_REQUESTS
from bench.peers.load import INPUT_TOKENS, OUTPUT_TOKENS
from bench.peers.peer import Places
from bench.roofline import ModelShape


def facts_of(given: Comparison) -> dict[str, str]:
    how = "every server started anew in each"
    if given.is_together:
        how = "all servers up at once, in turn at every load; who waits is stopped (SIGSTOP), Baton idle"
    prompts = "random ids" if given.chats is None else "chats of real text"
    facts = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "system": f"{platform.system()} {platform.release()}",
        "Baton's commit": _commit(given.places.repository),
        "cores used by every server (and by the client beside it)": ", ".join(map(str, given.cores)),
        "model": given.model_title,
        "closed loop": f"{INPUT_TOKENS} tokens in ({prompts}), {OUTPUT_TOKENS} out, greedy, not ended by an "
        f"end-of-text token; {given.num_rounds} round(s), {how}",
        "time": f"a budget of {given.budget_s / 60:.0f} minutes",
    }
    if given.trace is not None:
        slos = ", ".join(f"{slo.metric.value} {slo.bound_s:g} s" for slo in given.trace.slos)
        facts["trace"] = (
            f"{given.trace.path.name}, lengths divided by {given.trace.scale:g}, "
            f"{given.trace.probe_s:g} s per probe (up to {MAX_PROBE_S:g} s where that has fewer than "
            f"{MIN_REQUESTS} requests), up to {len(given.trace.seeds)} seeds as the time allows, until pass "
            f"and fail differ by at most {given.trace.tolerance:.0%}; SLOs: {slos}"
        )
    return facts


def chats_facts(chats: Chats, loops: Sequence[tuple[int, int]], num_rounds: int) -> dict[str, str]:
    """What is asked in these closed loops, once the model is there.

    Raises:
        BatonError: the chats cannot be written.
    """
    numbers = range(NUM_WARM_UP, NUM_WARM_UP + num_rounds * sum(num for _, num in loops))
    shortest, mean, longest = chats.lengths(numbers)
    return {
        "prompts": f"{len(numbers)} chats, one of {len(TASKS)} tasks on a passage of prose each "
        f"(bench/peers/chats.py), {shortest} to {longest} tokens, {mean:.1f} on average, by the model's own "
        "tokenizer and with its chat template; sent as token ids, the same to all servers, each once; no two "
        "begin alike beyond the template",
        "speculation": SPECULATION,
    }


def _commit(repository: Path) -> str:
    command = ["git", "-C", str(repository), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown: not a git checkout"
    return found.stdout.strip()


def cpu_flags() -> frozenset[str]:
    """The kernel's names of what this CPU can do."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def model_shape(places: Places) -> ModelShape | None:
    """Of the directory that the peers read; None: no peer needed it."""
    config = places.model_directory("bf16") / "config.json"
    return ModelShape.from_config(orjson.loads(config.read_bytes())) if config.is_file() else None


def time_words(comparison: Comparison, took_s: float) -> str:
    return f"{took_s / 60:.0f} minutes, of a budget of {comparison.budget_s / 60:.0f}"
