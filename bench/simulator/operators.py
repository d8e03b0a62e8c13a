"""How long steps of Llama-3-8B take by a table of measured operator latencies: a CSV file with the columns
`table,source,a,b,c,latency_ms`; what a, b and c are goes by the table (`TABLES`). Attention is that of one
layer, with 32 query and 8 KV heads of 128. Rows of one point from several sources count with their mean.

    step_ms = fixed + 32 * (gemms(m) + decode_attn(rows, context / rows) + prefill_attn) + logits

1. gemms(m): n x k of 6,144 x 4,096 (queries, keys, values), 4,096 x 4,096 (output), 28,672 x 4,096 (gate and
   up) and 4,096 x 14,336 (down). A shape that the table lacks takes as long as the nearest one (by ratios of
   n and k), scaled by n * k: AIConfigurator's H100 table has the first two; for the others it gives 16,384 x
   4,096 (times 1.75) and 4,096 x 16,384 (times 0.875). Logits, 128,256 x 4,096 (there: 65,536 x 4,096 times
   1.96), are those of one row per decode row and one for all chunks.
2. prefill_attn: the table has whole prompts, a step has tokens and pairs in all. One chunk after others takes
   as long as a prompt with as many pairs; where pairs are fewer than one prompt's, they are equal prompts.
3. Between points all is linear in m, rows, keys and pairs, so exact at points; beyond the last by the last
   slope, before the first as at the first. Noise of the measurements stays: more may take a little less.
4. fixed: whatever the table lacks (norms, rotary, activation, launches, sampling): a constant, not measured.
5. Links: the median rate of sends between hosts, of half the largest size or more (sources named `inter`; if
   none is, all). Their latency is part of what a hand-off costs anyway. None: the default.

`learned_model` is what policies plan with, fitted to such steps as a worker fits its own. With that H100
table it errs by 4 to 5 % in the median and 21 % at worst (a prompt of 512 tokens alone is planned too long).
"""

from __future__ import annotations

import csv
import difflib
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from cluster.errors import ConfigError
from cluster.step_fit import StepModelFit
from cluster.step_model import StepModel, StepWork, chunk_attention

COLUMNS = ("table", "source", "a", "b", "c", "latency_ms")
GEMM, DECODE, PREFILL, SENDS = "gemm_m_n_k", "decode_attn_B_S", "prefill_attn_B_P", "nccl_p2p_bytes"
TABLES = {GEMM: ("a", "b", "c"), DECODE: ("a", "b"), PREFILL: ("a", "b"), SENDS: ("a",)}
NUM_LAYERS = 32
LAYER_SHAPES = ((6_144, 4_096), (4_096, 4_096), (28_672, 4_096), (4_096, 14_336))  # n, k
LOGITS_SHAPE = (128_256, 4_096)
LEAST_MS, MOST = 1e-6, 1e12  # of numbers in a table
_GROWTH_KEYS = 64  # over which a run's growth is taken

_Point = tuple[float, ...]
_Tables = dict[str, dict[_Point, float]]  # table |-> point |-> seconds


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """Straight between two or more points."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    def at(self, x: float) -> float:
        xs, ys = self.xs, self.ys
        if x <= xs[0]:
            return ys[0]
        index = min(bisect_right(xs, x), len(xs) - 1)
        return _between(xs[index - 1], ys[index - 1], xs[index], ys[index], x)


@dataclass(frozen=True, slots=True, eq=False)
class Surface:
    """A line for each of two or more batch sizes, straight between them."""

    batches: tuple[float, ...]
    lines: tuple[Line, ...]

    def at(self, batch: float, length: float) -> float:
        batches, lines = self.batches, self.lines
        if batch <= batches[0]:
            return lines[0].at(length)
        index = min(bisect_right(batches, batch), len(batches) - 1)
        low, high = lines[index - 1].at(length), lines[index].at(length)
        return _between(batches[index - 1], low, batches[index], high, batch)


def _between(x0: float, y0: float, x1: float, y1: float, x: float) -> float:
    """Beyond `x1` it never falls: nothing takes less than no time, however long it is."""
    slope = (y1 - y0) / (x1 - x0)
    return y1 + (slope if x < x1 else max(0.0, slope)) * (x - x1)


@dataclass(frozen=True, slots=True, eq=False)
class OperatorTimes:
    """Seconds of a step; `bench.simulator.hardware.StepTimes`. Fields are in seconds, of all layers."""

    fixed_s: float
    gemms: Line
    logits: Line
    decode: Surface
    prefill: Surface  # batch, pairs of each
    link_bytes_s: float | None  # None: the table has no sends

    def step_s(self, num_rows: int, context: int, num_chunk_tokens: int, attention: float) -> float:
        seconds = self.fixed_s + self.gemms.at(num_rows + num_chunk_tokens)
        if num_rows:
            seconds += self.decode.at(num_rows, context / num_rows)
        if not num_chunk_tokens:
            return seconds + self.logits.at(num_rows)
        length = 2 * attention / num_chunk_tokens - 1  # of equal prompts with so many tokens and pairs
        batch = max(1.0, num_chunk_tokens / max(1.0, length))
        return seconds + self.prefill.at(batch, attention / batch) + self.logits.at(num_rows + 1)

    def growth_s(self, num_rows: int, context: int) -> float:
        """What each step of a run of decode steps takes longer than the last: a row reads a key more."""
        keys = context / num_rows if num_rows else 0.0
        grown_s = self.decode.at(num_rows, keys + _GROWTH_KEYS) - self.decode.at(num_rows, keys)
        return max(0.0, grown_s) / _GROWTH_KEYS


def read_times(path: Path, fixed_s: float) -> OperatorTimes:
    """The table in a file.

    Raises:
        ConfigError: it cannot be read, or is no such table.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            tables, link_bytes_s = _read(csv.DictReader(file))
        shapes = _lines(GEMM, [(point[1:], point[0], s) for point, s in tables[GEMM].items()])
        pairs = [((b,), chunk_attention(0, int(p)), s) for (b, p), s in tables[PREFILL].items()]
        return OperatorTimes(
            fixed_s,
            _sum([_scaled(shapes, shape, NUM_LAYERS) for shape in LAYER_SHAPES]),
            _scaled(shapes, LOGITS_SHAPE, 1),
            _surface(DECODE, [((b,), keys, s) for (b, keys), s in tables[DECODE].items()]),
            _surface(PREFILL, pairs),
            link_bytes_s,
        )
    except OSError as error:
        raise ConfigError(f"--hardware {path}: the file cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"--hardware {path}: not a table of operator latencies in CSV: {error}") from None
    except _BadTableError as error:
        raise ConfigError(f"--hardware {path}: {error}") from None


class _BadTableError(Exception):
    """What is wrong with it."""


def _read(reader: csv.DictReader[str]) -> tuple[_Tables, float | None]:
    """Means of all sources, and the rate of sends."""
    if reader.fieldnames is None:
        raise _BadTableError(f"the file is empty; its first line should be {','.join(COLUMNS)}")
    missing = [name for name in COLUMNS if name not in reader.fieldnames]
    if missing:
        raise _BadTableError(f"line 1: no column {', '.join(missing)}; write {','.join(COLUMNS)}")
    found: dict[str, dict[_Point, list[float]]] = {table: defaultdict(list) for table in TABLES}
    sends: list[tuple[str, float, float]] = []
    for row in reader:
        table, line = row["table"] or "", reader.line_num  # None in a short row
        if table not in TABLES:
            close = difflib.get_close_matches(table, TABLES, n=1)
            meant = f" (did you mean `{close[0]}`?)" if close else ""
            raise _BadTableError(f"line {line}: unknown table `{table[:40]}`{meant}; use {', '.join(TABLES)}")
        point = tuple(_count(row[name], name, line) for name in TABLES[table])
        seconds = _milliseconds(row["latency_ms"], line) / 1e3
        found[table][point].append(seconds)
        if table == SENDS:
            sends.append((row["source"] or "", point[0], seconds))
    for table in (GEMM, DECODE, PREFILL):
        if not found[table]:
            raise _BadTableError(f"no `{table}` rows, and a step's time needs them")
    means = {table: {point: fmean(all_s) for point, all_s in of.items()} for table, of in found.items()}
    return means, _link_bytes_s(sends)


def _count(text: str | None, name: str, line: int) -> float:
    value = _number(text)
    if not (1 <= value <= MOST and value.is_integer()):
        raise _BadTableError(f"line {line}: {name} is {_shown(text)}, not a whole number from 1 to {MOST:g}")
    return value


def _milliseconds(text: str | None, line: int) -> float:
    value = _number(text)
    if not LEAST_MS <= value <= MOST:
        raise _BadTableError(
            f"line {line}: latency_ms is {_shown(text)}, not a number from {LEAST_MS:g} to {MOST:g}"
        )
    return value


def _number(text: str | None) -> float:
    """NaN if it is none."""
    try:
        return float(text or "")
    except ValueError:
        return math.nan


def _shown(text: str | None) -> str:
    return repr(text or "")[:40]


def _link_bytes_s(sends: Sequence[tuple[str, float, float]]) -> float | None:
    between_hosts = [send for send in sends if "inter" in send[0]] or sends
    if not between_hosts:
        return None
    large = max(size for _, size, _ in between_hosts) / 2
    return median(size / seconds for _, size, seconds in between_hosts if size >= large)


def _lines(table: str, points: Iterable[tuple[_Point, float, float]]) -> dict[_Point, Line]:
    """Of (which line, x, y)."""
    found: dict[_Point, list[tuple[float, float]]] = defaultdict(list)
    for key, x, y in points:
        found[key].append((x, y))
    for key, line in found.items():
        if len(line) < 2:
            of = ", ".join(f"{value:g}" for value in key)
            raise _BadTableError(f"`{table}` has one point only of {of}; two or more make a line")
    return {key: Line(*zip(*sorted(line), strict=True)) for key, line in sorted(found.items())}


def _surface(table: str, points: Iterable[tuple[_Point, float, float]]) -> Surface:
    """Of all layers."""
    lines = _lines(table, ((key, x, NUM_LAYERS * y) for key, x, y in points))
    if len(lines) < 2:
        raise _BadTableError(f"`{table}` has one batch size only; two or more are needed")
    return Surface(tuple(batch for (batch,) in lines), tuple(lines.values()))


def _scaled(shapes: dict[_Point, Line], wanted: tuple[int, int], times: int) -> Line:
    """`times` products of a shape; see the module."""

    def distance(shape: _Point) -> float:
        return sum(abs(math.log(one / other)) for one, other in zip(shape, wanted, strict=True))

    nearest = min(shapes, key=distance)
    factor = times * math.prod(wanted) / math.prod(nearest)
    return Line(shapes[nearest].xs, tuple(y * factor for y in shapes[nearest].ys))


def _sum(lines: Sequence[Line]) -> Line:
    xs = sorted({x for line in lines for x in line.xs})
    return Line(tuple(xs), tuple(sum(line.at(x) for line in lines) for x in xs))


_ROWS, _KEYS, _ROOM = (1, 4, 8, 16, 32, 64, 96, 128, 192, 256), (128, 256, 512, 1024, 2048, 4096), 430_000
_CHUNKS = (16, 64, 128, 256, 512, 768, 1024, 2048)


def learned_model(times: OperatorTimes, base: StepModel) -> StepModel:
    """See the module. `base`: what holds where steps say nothing."""
    fit = StepModelFit(base)
    for rows in _ROWS:
        for context in (rows * keys for keys in _KEYS if rows * keys <= _ROOM):
            fit.add(StepWork(rows, context), times.step_s(rows, context, 0, 0.0))
    for chunk in _CHUNKS:
        for start in (0, 2048):
            pairs = chunk_attention(start, chunk)
            for rows in (0, 16, 64, 128):
                context = rows * 1024
                seconds = times.step_s(rows, context, chunk, pairs)
                fit.add(StepWork(rows + chunk, context, pairs), seconds)
    return fit.fit()
