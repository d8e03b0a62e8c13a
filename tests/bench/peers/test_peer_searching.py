"""Which servers are searched and measured again, in what order, and with how much of the time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.load.figures.slo import parse_slos
from bench.peers.comparison import Comparison
from bench.peers.load import TraceLoad
from bench.peers.outcome import ClosedLoop, Goodput, PeerOutcome
from bench.peers.peer import Peer, Places
from bench.peers.searching import (
    due_loops,
    is_far_at,
    loops_s,
    one_seed_below,
    search_share,
    to_search,
)

LOAD = TraceLoad(
    path=Path("trace.csv"),
    scale=16.0,
    slos=parse_slos("ttft=2s,tpot=100ms"),
    probe_s=40.0,
    seeds=(0, 1, 2),
    targets=(0.9, 0.99),
    max_probes=20,
    tolerance=0.2,
)


def outcome(name: str, *loops: tuple[int, float], goodput: float | None = None) -> PeerOutcome:
    """One round of closed loops (in flight, tok/s), if any; max goodput at 90 %, if given."""
    runs = [
        ClosedLoop(
            concurrency=concurrency,
            num_requests=16,
            num_failed=0,
            output_tok_per_s=rate,
            ttft_p50_ms=500.0,
            ttft_p99_ms=500.0,
            tpot_p50_ms=20.0,
            tpot_p99_ms=20.0,
            valid=True,
        )
        for concurrency, rate in loops
    ]
    return PeerOutcome(
        name=name,
        title=name.title(),
        precision="-",
        weight_bits=16,
        kv_bits=16,
        is_baton=name.startswith("baton"),
        settings={},
        rounds=[runs] if runs else [],
        goodput=[]
        if goodput is None
        else [Goodput(target=0.9, requests_per_s=goodput, ci_low=None, ci_high=None, is_converged=True)],
    )


def peer(name: str, family: str = "") -> Peer:
    return Peer(
        name=name,
        title=name.title(),
        precision="-",
        weight_bits=16,
        settings={},
        argv=(),
        model="m",
        family=family,
        is_baton=name.startswith("baton"),
    )


def comparison(**changes: Any) -> Comparison:
    fields = {
        "places": Places(Path("c"), Path("r"), "python", "demo", gguf=None, tcmalloc=None),
        "cores": (0,),
        "num_rounds": 2,
        "is_together": False,
        "closed_loops": ((1, 3), (8, 16)),
        "chats": None,
        "trace": LOAD,
        "no_trace_reason": None,
        "goodput_names": frozenset(),
        "budget_s": 4800.0,
        "model_title": "m",
        "not_chosen": {},
        "earlier": None,
        "max_loop_s": 120.0,
        "out": Path("out"),
    }
    return Comparison(**(fields | changes))


PEERS = [
    peer("baton"),
    peer("baton-int8"),
    peer("a-f16", "a"),
    peer("a-int8", "a"),
    peer("slow"),
    peer("off"),
]
OUTCOMES = {
    "baton": outcome("baton", (1, 30.0), (8, 100.0)),
    "baton-int8": outcome("baton-int8", (1, 30.0), (8, 150.0)),
    "a-f16": outcome("a-f16", (1, 20.0), (8, 80.0)),
    "a-int8": outcome("a-int8", (1, 25.0), (8, 70.0)),
    "slow": outcome("slow", (1, 24.0), (8, 30.0)),
    "off": outcome("off"),
}


def test_the_fastest_of_each_family_is_searched_the_best_peer_first_and_baton_last() -> None:
    promised = {"baton": 3.0, "baton-int8": 4.0, "a-f16": 1.0, "slow": 2.0}
    chosen, reasons = to_search(comparison(), PEERS, OUTCOMES, promised)
    assert [one.name for one in chosen] == ["slow", "a-f16", "baton-int8", "baton"]
    assert reasons == {"a-int8": "not searched: A-F16 is the faster one of its kind at 8 in flight"}
    named = comparison(goodput_names=frozenset({"a-int8", "baton"}))
    assert [one.name for one in to_search(named, PEERS, OUTCOMES, promised)[0]] == ["a-int8", "baton"]
    without = comparison(trace=None, no_trace_reason="no trace")
    assert to_search(without, PEERS, OUTCOMES, promised)[0] == []


def test_what_an_earlier_comparison_found_stays_unless_it_is_named() -> None:
    known = {**OUTCOMES, "slow": outcome("slow", (1, 24.0), (8, 30.0), goodput=0.2)}
    chosen, reasons = to_search(comparison(), PEERS, known, {})
    assert "slow" not in [one.name for one in chosen]
    assert "slow" not in reasons
    named = comparison(goodput_names=frozenset({"slow"}))
    assert [one.name for one in to_search(named, PEERS, known, {})[0]] == ["slow"]


def test_a_peer_that_promises_little_gets_the_time_for_one_seed() -> None:
    promised = {"a-f16": 1.0, "slow": 0.2, "baton": 1.5}
    left = [PEERS[2], PEERS[4], PEERS[0]]
    assert search_share(left, promised) == pytest.approx(3 / 7)
    assert search_share(left[1:], promised) == pytest.approx(1 / 4)
    assert search_share(left[2:], promised) == 1.0


def test_one_seed_is_enough_far_from_the_best_peer_and_never_for_baton() -> None:
    found = [outcome("baton", goodput=9.0), outcome("a", goodput=1.0), outcome("slow"), outcome("b")]
    assert one_seed_below(found[2], found, 0.9) == 0.5
    assert one_seed_below(found[2], found, 0.99) == 0.0
    assert one_seed_below(found[0], found, 0.9) == 0.0
    assert one_seed_below(found[1], found, 0.9) == 0.0  # none but itself is known


def test_later_rounds_measure_what_changes_a_ratio() -> None:
    def due(name: str, number: int = 1) -> tuple[Any, dict[int, str]]:
        own = next(one for one in PEERS if one.name == name)
        return due_loops(comparison(), own, PEERS, OUTCOMES, number)

    both = ((1, 3), (8, 16))
    assert due("slow", 0) == (both, {})
    assert due("baton") == (both, {})
    assert due("a-f16") == (both, {})
    loops, why = due("a-int8")
    assert loops == ()
    assert set(why) == {1, 8}
    assert "A-F16 is the faster" in why[1]
    loops, why = due("slow")
    assert loops == ((1, 3),)
    assert set(why) == {8}
    assert is_far_at(OUTCOMES["slow"], 8, list(OUTCOMES.values()))
    assert is_far_at(OUTCOMES["slow"], 32, list(OUTCOMES.values()))  # not measured: not worth a round
    assert not is_far_at(OUTCOMES["slow"], 1, list(OUTCOMES.values()))


def test_the_time_of_the_loops_still_to_come_is_kept_for_them() -> None:
    one = outcome("a", (1, 10.0), (8, 100.0))
    one.start_s = [20.0, 30.0]
    assert loops_s(one, ((1, 3), (8, 16)), 128) == pytest.approx(45.0 + 38.4 + 20.48)
    assert loops_s(one, (), 128) == 45.0
