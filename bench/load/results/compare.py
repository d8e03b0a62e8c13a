"""Runs side by side: each headline figure per run, its ratio to the first run, and what makes them unlike.

1. `compare_results` takes results as `result.read_result` gives them.
2. It warns where the runs did not do the same work, and passes on each run's cautions. Unless both were
   offered one plan, of which the same part was measured, a ratio is no merit: it stands without a verdict
   where the model, the workload, the arrivals, a seed, the number of requests or the window differs. A run
   that is not valid
   or incomplete, or in which nothing succeeded, is shown, but has no ratios, and nothing is held against it;
   nor have figures of SLOs, between runs with different ones.
3. `as_text` is for a terminal, `as_dict` for a file.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec

from bench.load.results.files import json_safe
from bench.load.results.likeness import OFFERED, SAME, differences, in_words, offered_otherwise, value_at
from cluster.errors import ConfigError


class Better(Enum):
    HIGHER = "higher"
    LOWER = "lower"


class Metric(msgspec.Struct, frozen=True):
    key: str  # of the result file; a dot leads into an object
    title: str
    unit: str
    better: Better
    is_of_slos: bool = False  # of runs with other SLOs it is another figure


class Row(msgspec.Struct, frozen=True, kw_only=True):
    metric: Metric
    values: tuple[float | None, ...]  # per run
    ratios: tuple[
        float | None, ...
    ]  # value / value of the first run; None where one is missing or not valid, or the first is 0
    alike: tuple[bool, ...]  # per run: it was offered the same as the first run

    def verdict(self, index: int) -> str:
        """ "better" or "worse" than the first run; "" if equal, not known, or not the same work."""
        ratio = self.ratios[index]
        if ratio is None or ratio == 1 or not self.alike[index]:
            return ""
        return "better" if (ratio > 1) is (self.metric.better is Better.HIGHER) else "worse"


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    labels: tuple[str, ...]
    valid: tuple[
        bool, ...
    ]  # per run; a run that is not valid has its values here, and nothing judged by them
    complete: tuple[bool, ...]  # per run; the same for one that ended before everything was offered
    rows: tuple[Row, ...]
    warnings: tuple[str, ...]

    @property
    def is_judged(self) -> bool:
        """Whether any run has a ratio to the first that says which is better."""
        judged = (zip(row.ratios[1:], row.alike[1:], strict=True) for row in self.rows)
        return any(ratio is not None and is_alike for row in judged for ratio, is_alike in row)


def _latency(name: str, title: str) -> tuple[Metric, ...]:
    return tuple(
        Metric(f"{prefix}_{name}_ms", f"{title} {word}", "ms", Better.LOWER)
        for prefix, word in (("median", "median"), ("p99", "p99"))
    )


METRICS: tuple[Metric, ...] = (
    Metric("request_goodput", "goodput", "req/s", Better.HIGHER, is_of_slos=True),
    Metric("slo_attainment", "SLO attainment", "share", Better.HIGHER, is_of_slos=True),
    Metric("token_goodput", "token goodput", "tok/s", Better.HIGHER, is_of_slos=True),
    Metric("request_throughput", "requests", "req/s", Better.HIGHER),
    Metric("output_throughput", "output tokens", "tok/s", Better.HIGHER),
    Metric("total_token_throughput", "input + output tokens", "tok/s", Better.HIGHER),
    Metric("per_core.output_throughput", "output tokens per core", "tok/s", Better.HIGHER),
    Metric("goodput_per_gpu", "goodput per accelerator", "req/s", Better.HIGHER, is_of_slos=True),
    *_latency("ttft", "TTFT"),
    *_latency("tpot", "TPOT"),
    *_latency("itl", "ITL"),
    *_latency("gap", "worst gap"),
    *_latency("e2el", "E2E"),
    Metric("failed", "failed requests", "", Better.LOWER),
    Metric("send_lag_ms.p99", "client send lag p99", "ms", Better.LOWER),
)


def compare_results(results: Sequence[Mapping[str, Any]], labels: Sequence[str] | None = None) -> Comparison:
    """Ratios to the first result. `labels` defaults to each result's own label, else its backend.

    Raises:
        ConfigError: fewer than two results, or another number of labels.
    """
    if len(results) < 2:
        raise ConfigError(f"compare: {len(results)} result(s) given; give two or more")
    if labels is not None and len(labels) != len(results):
        raise ConfigError(f"compare: {len(labels)} labels for {len(results)} results; give one per result")
    names = _distinct(labels or [str(one.get("label") or one.get("backend") or "run") for one in results])
    valid = tuple(result.get("valid") is not False for result in results)
    complete = tuple(result.get("is_complete") is not False for result in results)
    succeeded = tuple(result.get("completed") != 0 for result in results)
    judged = tuple(map(all, zip(valid, complete, succeeded, strict=True)))
    alike = tuple(not offered_otherwise(results[0], result) for result in results)
    rows = [_row(metric, results, judged, alike) for metric in METRICS]
    return Comparison(
        labels=names,
        valid=valid,
        complete=complete,
        rows=tuple(row for row in rows if any(value is not None for value in row.values)),
        warnings=(*_differences(results, names), *_doubts(results, names)),
    )


def as_dict(comparison: Comparison) -> dict[str, Any]:
    rows = [
        {
            "metric": row.metric.key,
            "title": row.metric.title,
            "unit": row.metric.unit,
            "better": row.metric.better.value,
            "values": list(row.values),
            "ratios": list(row.ratios),
            "alike": list(row.alike),
        }
        for row in comparison.rows
    ]
    safe: dict[str, Any] = json_safe(
        {
            "labels": comparison.labels,
            "valid": comparison.valid,
            "complete": comparison.complete,
            "is_judged": comparison.is_judged,
            "rows": rows,
            "warnings": comparison.warnings,
        }
    )
    return safe


def as_text(comparison: Comparison) -> str:
    """A table of plain characters; warnings below it."""
    marks = map(_mark, comparison.valid, comparison.complete)
    header = ["", *map(operator.add, comparison.labels, marks)]
    table = [header] + [
        [
            f"{row.metric.title} ({row.metric.unit})" if row.metric.unit else row.metric.title,
            *(_cell(row, index) for index in range(len(row.values))),
        ]
        for row in comparison.rows
    ]
    widths = [max(len(line[column]) for line in table) for column in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines += [f"warning: {warning}" for warning in comparison.warnings]
    if not comparison.is_judged:
        lines.append(f"Nothing could be judged against `{comparison.labels[0]}`.")
    return "\n".join(lines) + "\n"


def _mark(is_valid: bool, is_complete: bool) -> str:
    words = [*([] if is_valid else ["INVALID"]), *([] if is_complete else ["INCOMPLETE"])]
    return f" ({', '.join(words)})" if words else ""


def _cell(row: Row, index: int) -> str:
    value, ratio = row.values[index], row.ratios[index]
    if value is None:
        return "–"
    if index == 0 or ratio is None:
        return plain(value)
    times = ratio_text(ratio)
    verdict = "" if times == ratio_text(1.0) else row.verdict(index)
    return f"{plain(value)}  {times}{f' ({verdict})' if verdict else ''}"


def plain(value: float) -> str:
    """Four significant digits without an exponent, thousands with commas: 11,290, 123.4, 0.00012."""
    size = abs(value)
    if size >= 1000 or value == 0:
        return f"{value:,.0f}"
    decimals = 3 - math.floor(math.log10(size))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def ratio_text(ratio: float) -> str:
    """The factor to the first run: ×1.50; ×20 from ten on; ×1/20 below a tenth."""
    if 0 < ratio < 0.1:
        return f"×1/{plain(round(1 / ratio))}"
    return f"×{round(ratio):,}" if ratio >= 10 else f"×{ratio:.2f}"


def _row(
    metric: Metric, results: Sequence[Mapping[str, Any]], judged: Sequence[bool], alike: tuple[bool, ...]
) -> Row:
    values = tuple(_number(value_at(result, metric.key)) for result in results)
    first, slos = values[0], results[0].get("slos_ms")
    ratios = tuple(
        value / first
        if value is not None and first and is_judged and judged[0] and not is_other_figure
        else None
        for value, is_judged, is_other_figure in zip(
            values,
            judged,
            (metric.is_of_slos and result.get("slos_ms") != slos for result in results),
            strict=True,
        )
    )
    return Row(metric=metric, values=values, ratios=ratios, alike=alike)


def _differences(results: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    warnings = []
    for what, read in SAME:
        first = read(results[0])
        for name, result in zip(names[1:], results[1:], strict=True):
            if told := differences(first, read(result)):
                so = "; no ratio between them is better or worse" if what in OFFERED else ""
                warnings.append(f"`{names[0]}` and `{name}` differ in {what}: {in_words(told)}{so}")
    return warnings


def _doubts(results: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    warnings = []
    for name, result in zip(names, results, strict=True):
        and_so = "no run is judged by it" if result is results[0] else "it is not judged"
        if result.get("is_complete") is False:
            warnings.append(
                f"`{name}` is incomplete, so {and_so}: it ended before everything planned was offered"
            )
        if result.get("valid") is False:
            reasons = " ".join(
                str(reason) for reason in result.get("invalid_reasons") or ["no reason is given"]
            )
            warnings.append(f"`{name}` is not valid, so {and_so}: {reasons}")
        warnings += [f"`{name}`, caution: {caution}" for caution in result.get("cautions") or ()]
        if result.get("completed") == 0:
            warnings.append(f"`{name}` has no request that ended OK, so {and_so}")
    return warnings


def _distinct(labels: Sequence[str]) -> tuple[str, ...]:
    """A second label of the same name becomes `name #2`."""
    return tuple(
        label if label not in labels[:index] else f"{label} #{list(labels[: index + 1]).count(label)}"
        for index, label in enumerate(labels)
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
