import math
from typing import Any

import msgspec
import pytest

from bench.peers.losses import goodput_losses, losses
from bench.peers.one_server import too_long
from bench.peers.outcome import (
    ClosedLoop,
    Goodput,
    PeerOutcome,
    SeedBracket,
    best_peer,
    closed_loop_from_result,
    fastest,
    invalid_runs,
    mean_of,
)
from bench.peers.table import as_markdown


def run(concurrency: int, rate: float, ttft: float = 100.0, tpot: float = 20.0, **extra: Any) -> ClosedLoop:
    fields = {"num_requests": 4, "num_failed": 0, "valid": True} | extra
    return ClosedLoop(
        concurrency=concurrency,
        output_tok_per_s=rate,
        ttft_p50_ms=ttft,
        ttft_p99_ms=2 * ttft,
        tpot_p50_ms=tpot,
        tpot_p99_ms=2 * tpot,
        **fields,
    )


def outcome(name: str, *rounds: list[ClosedLoop], **extra: Any) -> PeerOutcome:
    fields = {
        "weight_bits": 16,
        "kv_bits": 16,
        "is_baton": name.startswith("baton"),
        "settings": {"a": "1"},
    } | extra
    return PeerOutcome(name=name, title=name.title(), precision="bf16", rounds=list(rounds), **fields)


def test_means_over_rounds() -> None:
    one = outcome("x", [run(1, 10.0), run(8, 80.0)], [run(1, 30.0, ttft=300.0, num_failed=2)])
    mean = mean_of(one, 1)
    assert mean is not None
    assert (mean.output_tok_per_s, mean.lowest_tok_per_s, mean.highest_tok_per_s) == (20.0, 10.0, 30.0)
    assert (mean.ttft_p50_ms, mean.ttft_p99_ms, mean.num_failed, mean.num_rounds) == (200.0, 400.0, 2, 2)
    assert mean_of(one, 32) is None


def test_the_best_peer_is_never_baton() -> None:
    outcomes = [
        outcome("baton", [run(8, 500.0)]),
        outcome("slow", [run(8, 50.0)]),
        outcome("int8", [run(8, 90.0)], weight_bits=8),
    ]
    best, equal = best_peer(outcomes, 8), best_peer(outcomes, 8, "16-bit")
    assert best is not None
    assert equal is not None
    assert (best[0].name, equal[0].name) == ("int8", "slow")
    assert best_peer(outcomes, 1) is None


def invalid(concurrency: int, rate: float, reason: str = "It lagged.") -> ClosedLoop:
    return run(concurrency, rate, valid=False, invalid_reasons=[reason])


def test_an_invalid_round_is_in_no_mean_and_said() -> None:
    one = outcome("x", [run(8, 10.0)], [invalid(8, 99.0)], [run(8, 30.0)], [invalid(8, 1.0)])
    mean = mean_of(one, 8)
    assert mean is not None
    assert (mean.output_tok_per_s, mean.lowest_tok_per_s, mean.highest_tok_per_s) == (20.0, 10.0, 30.0)
    assert mean.num_rounds == 2
    assert invalid_runs(one, 8) == "2 of 4 rounds left out, not valid: It lagged."
    assert invalid_runs(one, 1) is None


def test_a_server_without_a_valid_round_is_no_rival_and_keeps_its_row() -> None:
    outcomes = [
        outcome("baton", [run(8, 60.0)]),
        outcome("lucky", [invalid(8, 500.0)]),
        outcome("honest", [run(8, 50.0)]),
    ]
    best = best_peer(outcomes, 8)
    assert best is not None
    assert best[0].name == "honest"
    assert losses(outcomes, [8]) == []
    assert fastest(outcomes[1:]) is outcomes[2]
    text = as_markdown(outcomes, [8], [])
    assert (
        "| Lucky | bf16 | – | – | – | – | – | – | – | 1 of 1 rounds left out, not valid: It lagged. |" in text
    )


@pytest.mark.parametrize(
    ("bits", "name"),
    [(32, "32-bit"), (16, "16-bit"), (8.5, "8-bit"), (8, "8-bit"), (5, "4-bit"), (4.5, "4-bit")],
)
def test_precisions_have_classes(bits: float, name: str) -> None:
    assert outcome("x", weight_bits=bits).precision_class == name


def test_each_ratio_stands_beside_its_own_precision_and_names_its_peer() -> None:
    outcomes = [
        outcome("baton", [run(8, 60.0)]),
        outcome("baton-int8", [run(8, 120.0)], weight_bits=8),
        outcome("baton-odd", [run(8, 30.0)], weight_bits=32),
        outcome("half", [run(8, 40.0)]),
        outcome("small", [run(8, 80.0)], weight_bits=8.5),
        outcome("tiny", [run(8, 96.0)], weight_bits=5),
    ]
    text = as_markdown(outcomes, [8], [])
    assert "Best peer of any precision: Tiny; 16-bit: Half; 8-bit: Small; 4-bit: Tiny." in text
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    expected = {
        "Baton": "| 1.50 (16-bit) | 0.62 (any) |",
        "Baton-Int8": "| 1.50 (8-bit) | 1.25 (any) |",
        "Baton-Odd": "| – (no 32-bit peer) | 0.31 (any) |",
        "Half": "| 1.00 (16-bit) | 0.42 (any) |",
        "Small": "| 1.00 (8-bit) | 0.83 (any) |",
        "Tiny": "| 1.00 (4-bit) | 1.00 (any) |",
    }
    for title, cells in expected.items():
        assert cells in rows[title], title


def test_a_row_without_a_limit_says_why_where_others_have_one() -> None:
    limited = {"limits_tok_per_s": {1: 40.0}, "limits_bound_by": {1: "memory"}}
    rows = [outcome("baton", [run(1, 60.0)]), outcome("peer", [run(1, 20.0)], **limited)]
    text = as_markdown(rows, [1], [])
    assert "| 60.0 (60.0–60.0) | – | 3.00 (16-bit) |" in text
    assert "- A row without such a share would be bound by memory, and checks guesses" in text
    assert "A row without such a share" not in as_markdown(rows[1:], [1], [])


def test_servers_without_a_row_say_why() -> None:
    text = as_markdown([outcome("baton")], [], [], {"transformers, generate": "only if named: it is slow"})
    assert "- transformers, generate: only if named: it is slow" in text


def test_a_figure_that_does_not_exist_beats_nobody() -> None:
    nothing = run(8, 0.0, ttft=math.nan, tpot=math.nan)
    outcomes = [
        outcome("baton", [run(8, 60.0)]),
        outcome("failed", [nothing]),
        outcome("ok", [run(8, 50.0, ttft=90.0)]),
    ]
    assert [sentence.split(" of ")[0] for sentence in losses(outcomes, [8])] == [
        "Baton, 8 in flight: median TTFT",
        "Baton, 8 in flight: p99",
    ]


def test_losses_name_figure_rival_and_ratio() -> None:
    outcomes = [
        outcome("baton", [run(8, 60.0, ttft=100.0, tpot=30.0)]),
        outcome("fast", [run(8, 80.0, ttft=200.0, tpot=20.0)]),
        outcome("quick", [run(8, 40.0, ttft=150.0, tpot=25.0)]),
    ]
    said = losses(outcomes, [1, 8])
    assert said == [
        "Baton, 8 in flight: output of 60 tok/s is 0.75 times that of Fast (80 tok/s).",
        "Baton, 8 in flight: median TPOT of 30 ms is 1.50 times that of Fast (20 ms).",
        "Baton, 8 in flight: p99 of TPOT of 60 ms is 1.50 times that of Fast (40 ms).",
    ]


def test_no_peer_no_loss() -> None:
    assert losses([outcome("baton", [run(1, 1.0)])], [1]) == []


def goodput(rate: float, target: float = 0.9) -> Goodput:
    return Goodput(target=target, requests_per_s=rate, ci_low=rate, ci_high=None, is_converged=True)


def test_goodput_losses_compare_like_targets() -> None:
    outcomes = [
        outcome("baton", goodput=[goodput(2.0), goodput(1.0, 0.99)]),
        outcome("fast", goodput=[goodput(4.0), goodput(0.5, 0.99)]),
    ]
    assert goodput_losses(outcomes) == [
        "Baton: max goodput at 90% of 2 req/s is 0.50 times that of Fast (4 req/s)."
    ]


def test_a_result_without_successes_has_no_latencies() -> None:
    result = {
        "max_concurrency": 8,
        "num_prompts": 16,
        "failed": 16,
        "output_throughput": 0.0,
        "median_ttft_ms": None,
        "p99_ttft_ms": None,
        "median_tpot_ms": None,
        "p99_tpot_ms": None,
        "valid": False,
        "invalid_reasons": ["nothing succeeded"],
    }
    loop = closed_loop_from_result(result)
    assert (loop.num_failed, loop.valid, loop.invalid_reasons) == (16, False, ["nothing succeeded"])
    assert math.isnan(loop.ttft_p50_ms)


def test_the_report_shows_figures_ratios_losses_and_what_cannot_run() -> None:
    outcomes = [
        outcome("baton", [run(1, 10.0)], [run(1, 30.0)], versions={"torch": "2.13"}),
        outcome("fast", [run(1, 40.0, num_failed=1)], [invalid(1, 70.0, "it lagged")]),
        outcome("absent", cannot_run="its kernels need avx512f, which this CPU does not have"),
    ]
    text = as_markdown(outcomes, [1], [({"date": "today"}, {"cpu": "X", "isa": ("avx2", "fma")})])
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert (
        "| 20.0 (10.0–30.0) | – | 0.50 (16-bit) | 0.50 (any) | 100 / 200 | 20.0 / 40.0 | 2 × 4 |"
        in rows["Baton"]
    )
    assert "| 1.00 (16-bit) | 1.00 (any) |" in rows["Fast"]
    assert "1 of 2 rounds left out, not valid: it lagged; 1 failed" in rows["Fast"]
    assert "cannot run on this machine" in rows["Absent"]
    assert "- Absent: its kernels need avx512f" in text
    assert "- Baton, 1 in flight: output of 20 tok/s is 0.50 times that of Fast (40 tok/s)." in text
    assert "- isa: avx2, fma" in text
    assert "- versions: torch 2.13" in text
    assert "Not measured: it was not asked for." in text


@pytest.mark.parametrize(
    ("rate", "changes", "cell"),
    [
        (80.0, {}, "50%"),  # an older file
        (80.0, {"limits_bound_by": {8: "memory"}}, "50% (memory)"),
        (
            200.0,
            {"limits_bound_by": {8: "int8"}, "weight_bits": 8},
            "125% (int8) above it: the machine was faster",
        ),
        (200.0, {"limits_bound_by": {8: "floating point"}, "weight_bits": 8}, "125% (floating point) \\*"),
        (
            80.0,
            {"limits_bound_by": {8: "floating point"}, "weight_bits": 5, "arithmetic_bits": 16},
            "50% (floating point) |",
        ),
        (200.0, {"weight_bits": 8}, "125% \\*"),
        (80.0, {"limits_bound_by": {8: "memory"}, "weight_bits": 8}, "50% (memory) |"),
    ],
)
def test_the_table_says_what_share_of_which_limit_was_reached(
    rate: float, changes: dict[str, Any], cell: str
) -> None:
    """Never more than all of it without a reason."""
    fast = outcome("fast", [run(8, rate)], limits_tok_per_s={8: 160.0}, **changes)
    text = as_markdown([fast], [8], [])
    assert f"| {rate:.1f} ({rate:.1f}–{rate:.1f}) | {cell}" in text
    assert text.count("**of its limit**") == 1
    assert ("no rate of int8 was measured" in " ".join(text.split())) is ("*" in cell)


def test_a_table_without_limits_does_not_explain_them() -> None:
    assert "of its limit**" not in as_markdown([outcome("fast", [run(8, 80.0)])], [8], [])


def test_a_loop_that_would_take_too_long_is_left_out_with_its_reason() -> None:
    assert too_long(run(2, 10.0), 8, 16, 103.0) is None
    reason = too_long(run(2, 10.0), 8, 16, 102.0)
    assert reason == "left out: it would take about 102 s at 20.0 tok/s"
    assert too_long(run(1, 0.0), 8, 1, 204.0) is not None
    text = as_markdown([outcome("slow", [run(1, 10.0)], skipped={8: reason})], [1, 8], [])
    assert text.count(reason) == 1


def test_a_family_is_searched_at_its_fastest_under_the_highest_load() -> None:
    at_one, at_many = (
        outcome("a", [run(1, 60.0), run(32, 90.0)]),
        outcome("b", [run(1, 40.0), run(32, 100.0)]),
    )
    never = outcome("c", [run(1, 200.0)])
    assert fastest([at_one, at_many, never, outcome("d")]) is at_many
    assert fastest([outcome("d")]) is None
    assert fastest([outcome("e", [run(1, 9.0), invalid(32, 9.0, "it lagged")])]) is not None


def test_a_search_that_found_nothing_yet_is_not_a_zero() -> None:
    unfinished = Goodput(target=0.99, requests_per_s=None, ci_low=None, ci_high=None, is_converged=False)
    found = Goodput(target=0.99, requests_per_s=0.5, ci_low=None, ci_high=None, is_converged=True)
    outcomes = [
        outcome("baton", [run(1, 9.0)], goodput=[unfinished]),
        outcome("rival", [run(1, 9.0)], goodput=[found]),
        outcome("other", [run(1, 9.0)], goodput=[unfinished]),
    ]
    assert goodput_losses(outcomes) == [
        "Baton: of the rates probed none passed at 99%; Rival passed 0.5 req/s."
    ]
    text = as_markdown(outcomes, [1], [])
    assert "| Baton | 99% | not found | – | – | – | – |  |" in text
    assert "| Rival | 99% | 0.5 | – | – | – | 1.00 |  |" in text
    assert "Best peer: at 99% Rival." in text


def test_each_seed_of_a_search_tells_its_bracket() -> None:
    seeds = [
        SeedBracket(seed=0, passed=2.1, failed=2.5, end="found", is_converged=True),
        SeedBracket(seed=1, passed=None, failed=2.5, end="unfinished", is_converged=False, is_counted=False),
    ]
    found = Goodput(
        target=0.9,
        requests_per_s=2.1,
        ci_low=None,
        ci_high=None,
        is_converged=False,
        num_seeds=1,
        seeds=seeds,
    )
    text = as_markdown([outcome("baton", [run(1, 9.0)], goodput=[found])], [1], [])
    assert "| Baton | 90% | 2.1 | 2.1 – 2.5; none – 2.5 (not ended) | 1 (seed 0) |" in text


def bound(rate: float, target: float = 0.9) -> Goodput:
    return msgspec.structs.replace(goodput(rate, target), is_lower_bound=True)


@pytest.mark.parametrize(
    ("own", "best", "figure", "ratio"),
    [
        (goodput(2.0), goodput(4.0), "2", "0.50"),
        (bound(2.0), goodput(4.0), "≥ 2", "≥ 0.50"),
        (goodput(2.0), bound(4.0), "2", "≤ 0.50"),
        (bound(2.0), bound(4.0), "≥ 2", "–"),
    ],
)
def test_a_lower_bound_is_one_in_figure_ratio_and_losses(
    own: Goodput, best: Goodput, figure: str, ratio: str
) -> None:
    outcomes = [
        outcome("baton", [run(1, 9.0)], goodput=[own]),
        outcome("fast", [run(1, 9.0)], goodput=[best]),
    ]
    rows = [line.split(" | ") for line in as_markdown(outcomes, [1], []).splitlines()]
    (mine,) = [cells for cells in rows if cells[0] == "| Baton" and cells[1] == "90%"]
    assert (mine[2], mine[6]) == (figure, ratio)
    (loss,) = goodput_losses(outcomes)
    assert ("of at least 2 req/s" in loss) is own.is_lower_bound
    assert ("(at least 4 req/s)" in loss) is best.is_lower_bound
    assert (f"{ratio} times that" if ratio != "–" else "an unknown part") in loss


def test_a_target_out_of_reach_is_said_and_is_no_gap() -> None:
    note = "Seed 0: 99% is not reachable at any rate: at 0.3 req/s only 96.0% met every SLO."
    out_of_reach = Goodput(
        target=0.99,
        requests_per_s=0.0,
        ci_low=None,
        ci_high=None,
        is_converged=True,
        notes=[note],
        is_out_of_reach=True,
    )
    found = Goodput(target=0.99, requests_per_s=0.5, ci_low=None, ci_high=None, is_converged=True)
    outcomes = [
        outcome("baton", [run(1, 9.0)], goodput=[out_of_reach]),
        outcome("rival", [run(1, 9.0)], goodput=[found]),
    ]
    text = as_markdown(outcomes, [1], [])
    assert f"| Baton | 99% | 0: not reachable at any rate | – | – | – | 0.00 | {note} |" in text
    assert goodput_losses(outcomes) == ["Baton: 99% is not reachable at any rate; Rival reaches 0.5 req/s."]


def test_a_loop_that_was_not_repeated_says_why_and_where_the_time_went() -> None:
    one = outcome("rival", [run(1, 9.0)], once={1: "no further round: it is slow"}, took_s={"all": 61.4})
    text = as_markdown([one], [1], [])
    assert "no further round: it is slow |" in text
    assert "| Rival | – | – | 61 |" in text
    assert "## Where the time went" not in as_markdown([outcome("rival", [run(1, 9.0)])], [1], [])
