"""What a comparison writes: `<out>.json` with every result, `<out>.md` with the tables.

1. `Report` begins empty, or with an earlier comparison's file.
2. Outcomes are changed in place as servers are measured; every result is kept beside them.
3. `write` puts all of it on disk at once; each run of the comparison is a part, with its date and machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson

from bench.load.results.files import json_safe, write_or_rescue
from bench.load.runner import Measurement
from bench.peers.goodput import goodput_of
from bench.peers.measuring import MEANWHILE
from bench.peers.older_notes import name_loads
from bench.peers.outcome import Goodput, PeerOutcome
from bench.peers.table import as_markdown
from cluster.errors import ConfigError

RANDOM, TEXT = "random", "text"  # kinds of prompts
LEFT_OUT = frozenset({"timeslices", "clients", "environment", "server"})  # bulky, or told once by the parts

_OF_EVERY_COMPARISON = ("parts", "peers")  # another JSON object is not read as an empty comparison


class Part(msgspec.Struct, kw_only=True):
    """One run of the comparison."""

    facts: dict[str, str]
    machine: dict[str, Any]
    load_average: list[float] = []  # when it was last written


class Written(msgspec.Struct, kw_only=True):
    """The JSON file."""

    parts: list[Part] = []
    peers: list[PeerOutcome] = []
    searches: dict[str, dict[str, Any]] = {}
    results: dict[str, list[dict[str, Any]]] = {}
    not_measured: dict[str, str] = {}  # title of a server without a row |-> why
    prompts: str | msgspec.UnsetType = msgspec.UNSET  # of all closed loops; unset: random

    @property
    def kind_of_prompts(self) -> str:
        return RANDOM if self.prompts is msgspec.UNSET else self.prompts


class Report:
    """Owns what is written."""

    def __init__(
        self, out: Path, earlier: Path | None, facts: dict[str, str], machine: dict[str, Any], is_text: bool
    ) -> None:
        """`is_text`: as the earlier comparison's closed loops.

        Raises:
            ConfigError: `earlier` cannot be read.
        """
        self._out = out
        new = Written(prompts=TEXT if is_text else msgspec.UNSET)
        self._written = new if earlier is None else read_written(earlier)
        self._written.parts.append(Part(facts=facts, machine=machine))
        self._meanwhile: list[Mapping[str, Any]] = []  # results of this run
        self._searched: set[str] = set()  # in this run
        self.has_new_figures = False
        self.is_written = False

    @property
    def outcomes(self) -> list[PeerOutcome]:
        return self._written.peers

    @property
    def machines(self) -> list[dict[str, Any]]:
        """As measured at the start of each run."""
        return [part.machine for part in self._written.parts]

    def outcome_of(self, new: PeerOutcome) -> PeerOutcome:
        """The earlier outcome of the same name, described anew; else `new`, taken in."""
        for outcome in self._written.peers:
            if outcome.name == new.name:
                outcome.settings, outcome.cannot_run = new.settings, None
                return outcome
        self._written.peers.append(new)
        return new

    def tell(self, name: str, text: str) -> None:
        """A fact about this run of the comparison."""
        self._written.parts[-1].facts[name] = text

    def leave_out(self, reasons: Mapping[str, str]) -> None:
        """Servers that this run does not measure, by title; an earlier one may have."""
        titles = {outcome.title for outcome in self._written.peers}
        self._written.not_measured = {
            title: reason for title, reason in reasons.items() if title not in titles
        }

    def keep(self, name: str, measurement: Measurement) -> None:
        self.has_new_figures = True
        kept = {key: value for key, value in measurement.result.items() if key not in LEFT_OUT}
        self._written.results.setdefault(name, []).append(kept)
        self._meanwhile.append(kept)

    def keep_search(self, name: str, found: dict[str, Any]) -> None:
        self.has_new_figures = True
        self._written.searches[name] = found
        self._searched.add(name)

    def write(self) -> None:
        self._written.parts[-1].load_average = list(os.getloadavg())
        probes = [one for name in self._searched for one in self._written.searches[name]["probe_meanwhile"]]
        if seen := [*self._meanwhile, *probes]:
            self.tell("the machine meanwhile", _meanwhile_words(seen))
        write_files(self._out, self._written)
        self.is_written = True


def _meanwhile_words(results: Sequence[Mapping[str, Any]]) -> str:
    others, stolen, speed = ([one[name] for one in results] for name in MEANWHILE)
    return (
        f"in a loop or probe others used {max(others):.2f} cores at most, and the machine's host took "
        f"{max(stolen):.2f} at most; just before each, fp32 products ran at {min(speed):.0f} to "
        f"{max(speed):.0f} GFLOP/s"
    )


def write_files(out: Path, written: Written) -> None:
    """`<out>.json` and `<out>.md`."""
    safe = json_safe(msgspec.to_builtins(written, str_keys=True))
    text = orjson.dumps(safe, option=orjson.OPT_INDENT_2)
    runs = [run for outcome in written.peers for one in outcome.rounds for run in one]
    concurrencies = sorted({run.concurrency for run in runs})
    facts = [(part.facts, part.machine) for part in written.parts]
    table = as_markdown(written.peers, concurrencies, facts, written.not_measured)
    write_or_rescue(
        [
            (out.with_name(f"{out.name}.json"), lambda: [text, b"\n"]),
            (out.with_name(f"{out.name}.md"), lambda: [table.encode()]),
        ]
    )


def read_written(path: Path) -> Written:
    """Max goodput is read from the searches' own accounts, so that one rule makes all figures.

    Raises:
        ConfigError: not the JSON file of a comparison.
    """
    try:
        whole = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        if missing := [key for key in _OF_EVERY_COMPARISON if not whole.get(key)]:
            raise ConfigError(f"{path} is not the JSON file of a comparison: it has no `{missing[0]}`")
        for peer in whole.get("peers", ()):
            peer["rounds"] = [[_with_nan(run) for run in one] for one in peer["rounds"]]
        written = msgspec.convert(whole, Written, str_keys=True)
        for outcome in written.peers:
            account = written.searches.get(outcome.name, {})
            outcome.goodput = goodput_of(account) if "answers" in account else _bounds(outcome.goodput)
        name_loads(written.peers)
        return written
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, TypeError, KeyError, AttributeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not the JSON file of a comparison: {error}") from None


def _bounds(figures: Sequence[Goodput]) -> list[Goodput]:
    """Of a file without accounts: what did not converge was a lower bound."""
    return [msgspec.structs.replace(own, is_lower_bound=not own.is_converged) for own in figures]


def _with_nan(run: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: a figure that did not exist was written as null."""
    return {
        key: float("nan") if value is None else _with_nan(value) if isinstance(value, dict) else value
        for key, value in run.items()
    }
