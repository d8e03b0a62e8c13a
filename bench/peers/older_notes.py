"""Notes of older files, which said which server was the faster one of its kind, and not at what load. Pure.

It was decided at the highest load that had been measured by then. What the file still shows of that is the
highest load at which the one named is the faster of the two; without one, nothing is claimed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from bench.peers.outcome import PeerOutcome, mean_of

_WITHOUT_LOAD = re.compile(
    r"(?P<what>no further round|not searched): (?P<title>.+) is the faster one (of its kind|here)"
)


def faster_text(title: str, load: int) -> str:
    return f"{title} is the faster one of its kind at {load} in flight"


def name_loads(outcomes: Sequence[PeerOutcome]) -> None:
    """In place, in every note that lacks its load."""
    by_title = {outcome.title: outcome for outcome in outcomes}
    for outcome in outcomes:
        outcome.once = {at: _with_load(note, outcome, by_title) for at, note in outcome.once.items()}
        for name in ("goodput_note", "rounds_note"):
            note = getattr(outcome, name)
            if note is not None:
                setattr(outcome, name, _with_load(note, outcome, by_title))


def _with_load(note: str, outcome: PeerOutcome, by_title: dict[str, PeerOutcome]) -> str:
    found = _WITHOUT_LOAD.fullmatch(note)
    if found is None:
        return note
    named = by_title.get(found["title"])
    loads = [at for at in _loads(outcome) if named is not None and _is_faster(named, outcome, at)]
    if not loads:
        return f"{found['what']}: {found['title']} was taken for its kind"
    return f"{found['what']}: {faster_text(found['title'], max(loads))}"


def _loads(outcome: PeerOutcome) -> set[int]:
    return {run.concurrency for one in outcome.rounds for run in one}


def _is_faster(one: PeerOutcome, other: PeerOutcome, load: int) -> bool:
    ours, theirs = mean_of(one, load), mean_of(other, load)
    return ours is not None and theirs is not None and ours.output_tok_per_s > theirs.output_tok_per_s
