"""Chats turn by turn: how long the first token took, and how much of the input the server had cached."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.load.figures.latency import derive
from bench.load.records import RequestRecord
from bench.load.report.distribution_charts import measured
from bench.load.report.frame import Axis, Mark
from bench.load.report.scales import duration, quantity
from bench.load.report.values import Block, Figure, ReportRun, Table, common_slo
from bench.load.report.xy import Dot, Series, xy_chart

TITLES = ("TTFT by turn", "Cached share of the input by turn")
MAX_TURNS = 60
_PERCENTS = (50, 99)


def turn_charts(run: ReportRun) -> list[Block]:
    """[] where the run was no chat, or nothing of a second turn was measured."""
    by_turn: dict[int, list[RequestRecord]] = {}
    for record in measured(run):
        if record.session is not None and record.turn < MAX_TURNS:
            by_turn.setdefault(record.turn, []).append(record)
    turns = sorted(by_turn)
    if len(turns) < 2:
        return []
    ttft = _ttft_chart(run, [(turn + 1, _ttfts_ms(by_turn[turn])) for turn in turns])
    shares = [(turn + 1, *_tokens(by_turn[turn])) for turn in turns]
    return [ttft, _cached_chart(shares)] if any(cached for _, cached, _ in shares) else [ttft]


def _tokens(records: Sequence[RequestRecord]) -> tuple[int, int]:
    told = [(r.cached_tokens, r.input_tokens) for r in records]
    pairs = [(cached, total) for cached, total in told if cached is not None and total is not None]
    return sum(cached for cached, _ in pairs), sum(total for _, total in pairs)


def _ttfts_ms(records: Sequence[RequestRecord]) -> list[float]:
    return [ttft * 1e3 for record in records if (ttft := derive(record).ttft_s) is not None]


def _ttft_chart(run: ReportRun, samples: Sequence[tuple[int, list[float]]]) -> Block:
    told = [(turn, values) for turn, values in samples if values]
    quantiles = [(turn, len(values), *np.percentile(values, _PERCENTS).tolist()) for turn, values in told]
    series = [
        Series(
            f"p{percent}",
            line=[(float(row[0]), row[2 + i]) for row in quantiles],
            dots=[
                Dot(
                    row[0],
                    row[2 + i],
                    f"turn {row[0]}: p{percent} {duration(row[2 + i] / 1e3)}, n = {row[1]:,}",
                )
                for row in quantiles
            ],
            colour=i,
            dash=i,
            shape=i,
        )
        for i, percent in enumerate(_PERCENTS)
    ]
    bound_ms = common_slo([run], "ttft")
    across = [Mark(bound_ms, f"SLO {duration(bound_ms / 1e3)}", css="slo")] if bound_ms is not None else []
    chart = xy_chart(TITLES[0], series, _turns(), Axis("ms", lo=0.0), across=across, label_ends=True)
    rows = [
        [f"{turn}", f"{num:,}", *(quantity(value) for value in values)] for turn, num, *values in quantiles
    ]
    table = Table(["turn", "requests", *(f"p{percent} (ms)" for percent in _PERCENTS)], rows)
    note = (
        "Measured requests that ended OK. A turn counts from its own due time, after answer and think time."
    )
    return Figure(TITLES[0], note, chart, table)


def _cached_chart(shares: Sequence[tuple[int, int, int]]) -> Block:
    points = [(turn, 100 * cached / total) for turn, cached, total in shares if total]
    dots = [Dot(turn, share, f"turn {turn}: {quantity(share, '%')} cached") for turn, share in points]
    series = Series(
        "cached", line=[(float(turn), share) for turn, share in points], dots=dots, colour=2, shape=2
    )
    chart = xy_chart(TITLES[1], [series], _turns(), Axis("% of input tokens", lo=0.0, hi=100.0))
    rows = [[f"{turn}", f"{cached:,}", f"{total:,}"] for turn, cached, total in shares]
    note = "Cached tokens ÷ input tokens, as the server tells them."
    return Figure(TITLES[1], note, chart, Table(["turn", "cached tokens", "input tokens"], rows))


def _turns() -> Axis:
    return Axis("turn", lo=1.0, is_tight=True, is_whole=True)
