"""Traces of real traffic: a file becomes rows of (time, input tokens, output tokens), whoever recorded it.

1. `read_trace` reads the file once (its sha256 goes into the result) and detects the format, unless it is
   named.
2. The parser of `trace_formats` makes each line a `TraceRow`; a line that is not of the format is an error
   that names file, line and what was expected.
3. Rows without input or output tokens (failed requests of BurstGPT, say) are left out and counted.
4. Rows are sorted by time (stable; how many were out of order is told) and their times count from the first
   one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from bench.load.plans.trace_formats import FORMATS, LineError, TraceFormat, TraceRow, detect
from bench.load.plans.trace_times import num_out_of_order
from cluster.errors import BatonError
from cluster.readable import visible

MAX_SHOWN = 200  # characters of a file in an error


class TraceError(BatonError):
    """A trace or a conversation file cannot be read; the message names file, line and what was expected."""


@dataclass(frozen=True, slots=True)
class Trace:
    path: str
    sha256: str
    format: str
    rows: tuple[TraceRow, ...]  # by time, the first at 0
    num_empty: int  # rows left out because they have no input or no output tokens
    num_out_of_order: int  # rows, empty ones too, that are earlier than one above them in the file
    unknown_fields: tuple[str, ...]  # names in the file that nothing here reads

    @property
    def was_sorted(self) -> bool:
        return not self.num_out_of_order


def read_bytes(path: Path) -> bytes:
    """The file's content.

    Raises:
        TraceError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise TraceError(f"The trace {path} cannot be read: {error.strerror or error}.") from error


def read_trace(path: Path, format_name: str | None = None) -> Trace:
    """All usable rows of `path`, in the format named (azure, mooncake, burstgpt, canonical) or detected.

    Raises:
        TraceError: the file cannot be read, is of no known format, has a malformed line, or no usable row.
    """
    content = read_bytes(path)
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    trace_format = _format(path, lines, format_name)
    parse = trace_format.parser()
    rows: list[TraceRow] = []
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line:
            continue
        try:
            row = parse(line)
        except LineError as error:
            raise TraceError(
                f"{path}:{number}: {_shown(str(error))}; {trace_format.name} lines look like "
                f"{trace_format.example}"
            ) from None
        if row is not None:
            rows.append(row)
    ordered = [replace(row, position=i) for i, row in enumerate(sorted(rows, key=lambda row: row.time_s))]
    usable = [row for row in ordered if row.input_tokens > 0 and row.output_tokens > 0]
    if not usable:
        raise TraceError(
            f"The trace {path} has no row with input and output tokens: there is nothing to offer."
        )
    start_s = usable[0].time_s
    return Trace(
        path=str(path),
        sha256=sha256(content).hexdigest(),
        format=trace_format.name,
        rows=tuple(replace(row, time_s=row.time_s - start_s) for row in usable),
        num_empty=len(rows) - len(usable),
        num_out_of_order=num_out_of_order(row.time_s for row in rows),
        unknown_fields=parse.unknown_fields(),
    )


def _format(path: Path, lines: list[bytes], name: str | None) -> TraceFormat:
    known = ", ".join(FORMATS)
    if name is not None:
        if name not in FORMATS:
            raise TraceError(f"Trace format `{name}` is unknown: use {known}.")
        return FORMATS[name]
    first = next((line.strip() for line in lines if line.strip()), None)
    if first is None:
        raise TraceError(f"The trace {path} is empty.")
    found = detect(first)
    if found is not None:
        return FORMATS[found]
    if not _is_text(first):
        raise TraceError(
            f"The trace {path} is no text, but a binary or compressed file: give one of the formats {known}, "
            "unpacked."
        )
    shown = _shown(first.decode("utf-8"))
    raise TraceError(f"The trace {path} begins with `{shown}`, which is none of the formats {known}.")


def _is_text(line: bytes) -> bool:
    try:
        return "\0" not in line.decode("utf-8")
    except UnicodeDecodeError:
        return False


def _shown(text: str) -> str:
    """What a line says may be anything, and long: shown as one short line that a terminal does not obey."""
    text = visible(text)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
