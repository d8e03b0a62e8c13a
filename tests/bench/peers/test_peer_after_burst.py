"""What is told of a closed loop after its first burst, from the records to the table and back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.load.records import RequestRecord, Status
from bench.peers.after_burst import AFTER_BURST, after_burst
from bench.peers.losses import losses
from bench.peers.outcome import AfterBurst, ClosedLoop, PeerOutcome, closed_loop_from_result, mean_of
from bench.peers.record import Part, Written, read_written, write_files
from bench.peers.table import as_markdown


def record(index: int, ttft_s: float, status: Status = Status.OK) -> RequestRecord:
    """Two tokens, the second 0.1 s after the first."""
    begun_s = 10.0 * index
    times_s = [begun_s + ttft_s, begun_s + ttft_s + 0.1]
    return RequestRecord(
        index=index,
        scheduled_s=begun_s,
        status=status,
        chunk_times_s=times_s,
        end_s=times_s[-1],
        output_tokens=2,
    )


def loop(rate: float, ttft: float = 100.0, later: float | None = 40.0, **extra: Any) -> ClosedLoop:
    fields = {"concurrency": 8, "num_requests": 24, "num_failed": 0, "valid": True} | extra
    if later is not None:
        fields["after_burst"] = AfterBurst(
            num_requests=16, ttft_p50_ms=later, ttft_p99_ms=2 * later, tpot_p50_ms=20.0, tpot_p99_ms=21.0
        )
    return ClosedLoop(
        output_tok_per_s=rate,
        ttft_p50_ms=ttft,
        ttft_p99_ms=2 * ttft,
        tpot_p50_ms=20.0,
        tpot_p99_ms=40.0,
        **fields,
    )


def outcome(name: str, *rounds: list[ClosedLoop]) -> PeerOutcome:
    return PeerOutcome(
        name=name,
        title=name.title(),
        precision="bf16",
        weight_bits=16.0,
        kv_bits=16.0,
        is_baton=name == "baton",
        settings={},
        rounds=list(rounds),
    )


def test_the_first_requests_are_left_out_and_what_failed() -> None:
    records = [record(0, 5.0), record(1, 4.0), record(2, 0.2), record(3, 9.0, Status.ERROR), record(4, 0.4)]
    found = after_burst(records, 2)
    assert found is not None
    assert found["num"] == 2
    assert found["median_ttft_ms"] == pytest.approx(300.0)
    assert found["p99_ttft_ms"] == pytest.approx(398.0)
    assert found["median_tpot_ms"] == pytest.approx(100.0)


def test_without_a_burst_or_anything_after_it_there_is_none() -> None:
    records = [record(index, 1.0) for index in range(3)]
    assert after_burst(records, 1) is None
    assert after_burst(records, 3) is None
    assert after_burst(records, 2) is not None


def test_nothing_that_succeeded_has_no_latencies() -> None:
    found = after_burst([record(0, 1.0), record(1, 1.0), record(2, 1.0, Status.TIMEOUT)], 2)
    assert found == {
        "num": 0,
        "median_ttft_ms": None,
        "p99_ttft_ms": None,
        "median_tpot_ms": None,
        "p99_tpot_ms": None,
    }


def test_a_result_with_it_and_one_without() -> None:
    result: dict[str, Any] = {
        "max_concurrency": 8,
        "num_prompts": 24,
        "failed": 0,
        "output_throughput": 300.0,
        "valid": True,
        "invalid_reasons": [],
    }
    result |= {f"{kind}_{name}_ms": 9.0 for kind in ("median", "p99") for name in ("ttft", "tpot")}
    assert closed_loop_from_result(result).after_burst is msgspec.UNSET
    assert closed_loop_from_result(result | {AFTER_BURST: None}).after_burst is msgspec.UNSET
    later = {"num": 16, "median_ttft_ms": 1.0, "p99_ttft_ms": 2.0, "median_tpot_ms": 3.0, "p99_tpot_ms": None}
    found = closed_loop_from_result(result | {AFTER_BURST: later}).after_burst
    assert isinstance(found, AfterBurst)
    assert (found.num_requests, found.ttft_p50_ms, found.ttft_p99_ms, found.tpot_p50_ms) == (16, 1, 2, 3)
    assert math.isnan(found.tpot_p99_ms)


def test_the_mean_is_over_the_rounds_that_have_it() -> None:
    mean = mean_of(outcome("x", [loop(10.0)], [loop(20.0, later=60.0)], [loop(30.0, later=None)]), 8)
    assert mean is not None
    assert mean.after_burst is not None
    assert (mean.after_burst.ttft_p50_ms, mean.after_burst.num_requests) == (50.0, 32)
    alone = mean_of(outcome("x", [loop(30.0, later=None)]), 8)
    assert alone is not None
    assert alone.after_burst is None


def test_columns_of_their_own_where_any_row_has_them() -> None:
    rows = [outcome("baton", [loop(60.0)]), outcome("older", [loop(50.0, later=None)]), outcome("none")]
    text = as_markdown(rows, [8], [])
    assert "| TPOT ms p50 / p99 | TTFT ms p50 / p99, after the first burst |" in text
    assert "| 100 / 200 | 20.0 / 40.0 | 40.0 / 80.0 | 20.0 / 21.0 | 1 × 24 |  |" in text
    assert "| 100 / 200 | 20.0 / 40.0 | – | – | 1 × 24 |  |" in text
    table = [line for line in text.splitlines() if line.startswith("|") and line.count("|") > 8]
    assert len({line.count("|") for line in table}) == 1
    assert "- **after the first burst**: a loop of N in flight begins with N requests at once" in text


def test_a_table_without_them_is_as_it_was() -> None:
    text = as_markdown([outcome("baton", [loop(60.0, later=None)])], [8], [])
    assert "after the first burst" not in text
    assert "A p99 of the 3 to 32 requests of a round is, in effect, their slowest one." in text


def test_a_loss_after_the_burst_is_said_as_such() -> None:
    rivals = [
        outcome("fast", [loop(50.0, ttft=200.0, later=20.0)]),
        outcome("older", [loop(50.0, later=None)]),
    ]
    assert losses([outcome("baton", [loop(60.0)]), *rivals], [8]) == [
        "Baton, 8 in flight: median TTFT after the first burst of 40 ms is 2.00 times that of Fast (20 ms).",
        "Baton, 8 in flight: p99 of TTFT after the first burst of 80 ms is 2.00 times that of Fast (40 ms).",
    ]


def test_files_give_it_back_even_what_did_not_exist(tmp_path: Path) -> None:
    nothing = AfterBurst(
        num_requests=0, ttft_p50_ms=math.nan, ttft_p99_ms=1.0, tpot_p50_ms=2.0, tpot_p99_ms=3.0
    )
    one = outcome("x", [msgspec.structs.replace(loop(10.0), after_burst=nothing)], [loop(10.0, later=None)])
    written = Written(peers=[one], parts=[Part(facts={}, machine={})], prompts="text")
    write_files(tmp_path / "table", written)
    again = read_written(tmp_path / "table.json")
    assert again.kind_of_prompts == "text"
    first, second = (runs[0] for runs in again.peers[0].rounds)
    assert isinstance(first.after_burst, AfterBurst)
    assert math.isnan(first.after_burst.ttft_p50_ms)
    assert first.after_burst.tpot_p99_ms == 3
    assert second.after_burst is msgspec.UNSET
    write_files(tmp_path / "again", again)
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "table.json").read_bytes()
