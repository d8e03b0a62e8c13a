"""The public trace formats, one parser each: a line of bytes in, a `TraceRow` out.

- `azure`: CSV `TIMESTAMP,ContextTokens,GeneratedTokens`; calendar timestamps with up to 9 fractional digits
  and perhaps a UTC offset (Azure LLM inference traces of 2023 and 2024).
- `burstgpt`: CSV `Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log
  Type`, or the same without `Session ID` and `Elapsed time`; timestamps in seconds. Failed requests have 0
  response tokens.
- `canonical`: JSON lines `{"timestamp", "input_length", "output_length", "session_id"?, "hash_ids"?}`;
  timestamps in milliseconds. `hash_ids` name the prompt's blocks; equal ids are equal prefixes.
- `mooncake`: the same with `hash_ids` in every row, one per 512 tokens (Mooncake traces of FAST'25).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Protocol

import msgspec

from bench.load.plans.lengths import MAX_TOKENS

_CALENDAR = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


class LineError(Exception):
    """Why a line is not of its format: a clause without file and line, which the reader adds."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    time_s: float
    input_tokens: int
    output_tokens: int
    session: str | None = None  # rows of one conversation
    hash_ids: tuple[int, ...] | None = None  # one per block of the prompt
    position: int = field(default=0, compare=False)  # among all rows of the file by time, unusable ones too


class Parser(Protocol):
    """Reads the lines of one file in order; a header line gives None."""

    def __call__(self, line: bytes) -> TraceRow | None: ...

    def unknown_fields(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class TraceFormat:
    name: str
    example: str
    parser: Callable[[], Parser]


class _Azure:
    def __init__(self) -> None:
        self._has_header = False

    def __call__(self, line: bytes) -> TraceRow | None:
        fields = _fields(line)
        if not self._has_header:
            _check_header(fields, _AZURE_HEADER)
            self._has_header = True
            return None
        if len(fields) != 3:
            raise LineError(f"{len(fields)} fields, but 3 were expected")
        return TraceRow(
            time_s=_calendar_s(fields[0]),
            input_tokens=_count(fields[1], "ContextTokens"),
            output_tokens=_count(fields[2], "GeneratedTokens"),
        )

    def unknown_fields(self) -> tuple[str, ...]:
        return ()


class _BurstGpt:
    def __init__(self) -> None:
        self._header: list[str] = []

    def __call__(self, line: bytes) -> TraceRow | None:
        fields = _fields(line)
        if not self._header:
            _check_header(fields, _BURSTGPT_COLUMNS)
            self._header = fields
            return None
        if len(fields) != len(self._header):
            raise LineError(f"{len(fields)} fields, but the header has {len(self._header)}")
        row = dict(zip(self._header, fields, strict=True))
        return TraceRow(
            time_s=_seconds(row["Timestamp"]),
            input_tokens=_count(row["Request tokens"], "Request tokens"),
            output_tokens=_count(row["Response tokens"], "Response tokens"),
            session=row.get("Session ID") or None,
        )

    def unknown_fields(self) -> tuple[str, ...]:
        return ()


class _JsonRow(msgspec.Struct):
    timestamp: int | float
    input_length: int
    output_length: int
    session_id: str | int | None = None
    hash_ids: list[Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]] | None = None


class _JsonLines:
    def __init__(self, *, needs_hash_ids: bool = False) -> None:
        self._needs_hash_ids = needs_hash_ids
        self._unknown: set[str] = set()

    def __call__(self, line: bytes) -> TraceRow | None:
        try:
            raw = msgspec.json.decode(line)
            row = msgspec.convert(raw, _JsonRow)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise LineError(str(error)) from None
        if self._needs_hash_ids and row.hash_ids is None:
            raise LineError("`hash_ids` is missing")
        if not math.isfinite(row.timestamp):
            raise LineError(f"`timestamp` {row.timestamp} is no time")
        for name, value in (("input_length", row.input_length), ("output_length", row.output_length)):
            if value < 0:
                raise LineError(f"`{name}` {value} is below 0")
            if value > MAX_TOKENS:
                raise LineError(f"`{name}` {value} is above {MAX_TOKENS:,}, more than any context")
        self._unknown.update(raw.keys() - set(_JsonRow.__struct_fields__))
        return TraceRow(
            time_s=row.timestamp / 1000,
            input_tokens=row.input_length,
            output_tokens=row.output_length,
            session=None if row.session_id is None else str(row.session_id),
            hash_ids=None if row.hash_ids is None else tuple(row.hash_ids),
        )

    def unknown_fields(self) -> tuple[str, ...]:
        return tuple(sorted(self._unknown))


FORMATS: dict[str, TraceFormat] = {
    "azure": TraceFormat("azure", "`2023-11-16 18:15:46.6805900,374,44`", _Azure),
    "mooncake": TraceFormat(
        "mooncake",
        '`{"timestamp": 27482, "input_length": 900, "output_length": 52, "hash_ids": [46, 47]}`',
        lambda: _JsonLines(needs_hash_ids=True),
    ),
    "burstgpt": TraceFormat(
        "burstgpt", "`45,,9.2,ChatGPT,472,18,490,Conversation log` below their header", _BurstGpt
    ),
    "canonical": TraceFormat(
        "canonical",
        '`{"timestamp": 27482, "input_length": 900, "output_length": 52}` (plus `session_id`, `hash_ids`)',
        _JsonLines,
    ),
}


def detect(first_line: bytes) -> str | None:
    """The format whose files begin with `first_line`, or None."""
    if first_line.startswith(b"{"):
        try:
            raw = msgspec.json.decode(first_line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return "canonical"  # its parser says what is wrong with the line
        return "mooncake" if "hash_ids" in raw and "session_id" not in raw else "canonical"
    names = [name.strip() for name in first_line.decode("utf-8", "replace").split(",")]
    if tuple(names[:3]) == _AZURE_HEADER:
        return "azure"
    return "burstgpt" if set(_BURSTGPT_COLUMNS) <= set(names) else None


def _fields(line: bytes) -> list[str]:
    try:
        return [field.strip() for field in line.decode("utf-8").split(",")]
    except UnicodeDecodeError:
        raise LineError("the line is not UTF-8 text") from None


def _check_header(fields: list[str], needed: tuple[str, ...]) -> None:
    missing = [name for name in needed if name not in fields]
    if missing:
        raise LineError(f"the header lacks {', '.join(f'`{name}`' for name in missing)}")


def _count(value: str, name: str) -> int:
    whole = value.removesuffix(".0")  # some exports write counts as floats
    if not (whole.isascii() and whole.isdigit()) or len(whole) > 12:
        raise LineError(f"{name} `{value}` is not a number of tokens")
    if int(whole) > MAX_TOKENS:
        raise LineError(f"{name} {whole} is above {MAX_TOKENS:,}, more than any context")
    return int(whole)


def _seconds(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise LineError(f"Timestamp `{value}` is not a number of seconds")
    return number


def _calendar_s(value: str) -> float:
    match = _CALENDAR.fullmatch(value)
    try:
        if match is None:
            raise ValueError
        moment = datetime.fromisoformat(match[1] + (match[3] or ""))
    except ValueError:
        raise LineError(f"TIMESTAMP `{value}` is not a time such as 2023-11-16 18:15:46.6805900") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp() + float(match[2] or 0)
