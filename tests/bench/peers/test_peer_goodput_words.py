"""The table of max goodput says what its figures can and cannot show."""

from __future__ import annotations

import pytest

from bench.peers.goodput_table import goodput_table
from bench.peers.losses import goodput_losses
from bench.peers.older_notes import name_loads
from bench.peers.outcome import Goodput, PeerOutcome, SeedBracket
from bench.peers.searching import why_faster
from tests.bench.peers.test_peer_outcome import outcome, run


def searched(
    rate: float | None, *brackets: tuple[float | None, float | None], ended: bool = False, probes: int = 5
) -> Goodput:
    return Goodput(
        target=0.99,
        requests_per_s=rate,
        ci_low=None,
        ci_high=None,
        is_converged=ended,
        is_lower_bound=rate is not None and not ended,
        seeds=[
            SeedBracket(
                seed=seed,
                passed=low,
                failed=high,
                end="found" if ended else "unfinished",
                is_converged=ended,
                is_counted=low is not None,
            )
            for seed, (low, high) in enumerate(brackets)
        ],
        max_probes=probes,
    )


def table(own: Goodput, rival: Goodput) -> tuple[list[str], list[str], list[str]]:
    """Cells of Baton's row, its losses, all lines."""
    outcomes = [outcome("baton", goodput=[own]), outcome("rival", goodput=[rival])]
    lines = goodput_table(outcomes)
    (mine,) = [line.strip("| ").split(" | ") for line in lines if line.startswith("| Baton |")]
    return mine, goodput_losses(outcomes), lines


RIVAL = searched(3.79, (3.79, 4.54), ended=True)


@pytest.mark.parametrize(
    ("own", "cell", "seeds", "loss"),
    [
        (
            searched(2.0, (2.0, 3.16)),
            "≥ 0.53, at most 0.83 (2 – 3.16 against 3.79)",
            "1 (seed 0)",
            "3.16 req/s failed, so at most 0.83 times that",
        ),
        (
            searched(None, (None, 3.16)),
            "at most 0.83 (none – 3.16 against 3.79)",
            "none",
            "3.16 req/s failed, so at most 0.83 times that",
        ),
        (
            searched(2.0, (2.0, 2.5), (2.0, 3.5)),
            "≥ 0.53, at most 0.79 (2 – 3 against 3.79)",
            "2 (seeds 0, 1)",
            "3 req/s failed, so at most 0.79 times that",
        ),
        (searched(2.0, (2.0, 9.77)), "≥ 0.53", "1 (seed 0)", None),
        (searched(2.0, (2.0, None)), "≥ 0.53", "1 (seed 0)", None),
        (searched(2.0, (2.0, 2.5), (2.0, None)), "≥ 0.53", "2 (seeds 0, 1)", None),
        (searched(2.0, (2.0, 2.4), ended=True), "0.53", "1 (seed 0)", None),
    ],
)
def test_a_loss_that_the_brackets_prove_is_said(
    own: Goodput, cell: str, seeds: str, loss: str | None
) -> None:
    mine, (told,), _ = table(own, RIVAL)
    assert mine[6] == cell
    assert mine[4] == seeds
    assert (loss or "at most") in told if loss else "at most" not in told


def test_the_words_of_the_table_are_defined() -> None:
    _, _, lines = table(searched(None, (None, 9.0)), RIVAL)
    assert "**not found**: no rate that was tried passed, and lower ones were not tried" in lines[0]


def test_the_number_of_probes_is_told_where_it_differs() -> None:
    _, _, lines = table(searched(2.0, (2.0, 3.0), probes=7), RIVAL)
    assert "Probes that each search was allowed, by the time that was left: Baton: 7; Rival: 5." in lines
    _, _, lines = table(searched(2.0, (2.0, 3.0)), RIVAL)
    assert not any("allowed" in line for line in lines)


def family() -> tuple[PeerOutcome, PeerOutcome]:
    return (
        outcome("slow", [run(1, 60.0), run(8, 70.0), run(32, 90.0)]),
        outcome("fast", [run(1, 40.0), run(8, 80.0), run(32, 100.0)]),
    )


def test_who_is_the_faster_one_is_said_with_its_load() -> None:
    slow, fast = family()
    assert why_faster(fast, slow) == "Fast is the faster one of its kind at 32 in flight"
    unmeasured = outcome("slow", [run(1, 60.0)])
    assert why_faster(fast, unmeasured) == "of its kind only Fast has a figure at 32 in flight"


@pytest.mark.parametrize(
    ("at_32", "told"),
    [
        (90.0, "Fast is the faster one of its kind at 32 in flight"),
        (
            110.0,
            "Fast is the faster one of its kind at 8 in flight",
        ),  # measured when that was decided already
    ],
)
def test_a_note_of_an_older_file_gets_the_load_at_which_it_is_true(at_32: float, told: str) -> None:
    slow, fast = family()
    slow.rounds = [[run(1, 60.0), run(8, 70.0), run(32, at_32)]]
    slow.once = {1: "no further round: Fast is the faster one of its kind", 8: "no further round: it is slow"}
    slow.goodput_note = "not searched: Fast is the faster one here"
    for _ in range(2):
        name_loads([slow, fast])
        assert slow.once == {1: f"no further round: {told}", 8: "no further round: it is slow"}
        assert slow.goodput_note == f"not searched: {told}"


def test_a_note_of_an_older_file_that_nothing_bears_out_claims_nothing() -> None:
    slow, fast = family()
    fast.goodput_note = "not searched: Slow is the faster one here"
    slow.rounds = [[run(1, 1.0)]]
    name_loads([slow, fast])
    assert fast.goodput_note == "not searched: Slow was taken for its kind"
