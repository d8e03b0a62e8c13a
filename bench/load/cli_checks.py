"""What can be known to be wrong before anything is measured: options that contradict each other or do
nothing, numbers out of range, outputs that cannot be written. Each is one sentence that names the flags.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from bench.load.cli_load import LoadOptions, is_given
from bench.load.plans.arrivals import check_rate
from bench.load.plans.trace_formats import FORMATS
from bench.load.results.files import check_output
from bench.load.results.result import requests_path
from cluster.errors import BatonError, ConfigError

# Options that do something only with another one.
_PARTNERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("speed_up", "trace_offset", "trace_format", "scale_lengths"), "trace"),
    (("prefix_tokens", "prefix_skew"), "prefix_groups"),
    (("think", "random_think", "system_tokens"), "turns"),
    (("random_think",), "think"),
    (("keep_text", "save_detailed"), "out"),
    (("target",), "strict"),
    (("strict",), "slo"),
)
# Options that describe the same thing in two ways, and why only one can hold.
_RIVALS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("trace", ("input_tokens", "output_tokens"), "--trace has its own lengths"),
    ("sharegpt", ("input_tokens",), "--sharegpt has its own questions"),
    ("sharegpt", ("system_tokens",), "--sharegpt has its own system messages"),
    ("sharegpt", ("random_think",), "--sharegpt has the fixed think time of --think"),
    ("closed_loop", ("rate", "arrival", "burstiness"), "--closed-loop has no arrivals of its own"),
    (
        "closed_loop",
        ("duration",),
        "--closed-loop sends the next request when one has ended, so how many a duration takes is not known "
        "before: give --requests N",
    ),
    ("rate", ("speed_up",), "--rate and --speed-up both set the pace of a trace"),
    ("steady", ("warmup", "cooldown"), "--steady finds its own window"),
    ("burstiness", ("arrival",), "--burstiness is short for --arrival gamma:B"),
)
_WORKLOADS = ("trace", "sharegpt", "prefix_groups", "turns")
_RANGE = {
    "requests": (1, 10**9),
    "processes": (1, 10**4),
    "cores": (1, 10**6),
    "accelerators": (0, 10**6),
    "max_model_len": (2, 10**9),
    "prefix_groups": (1, 10**6),
    "seed": (-(2**53), 2**53),  # every reader of JSON has these numbers
    "salt": (-(2**63), 2**63),
}
_PLAIN_BOUND = re.compile(
    r"\b(ttft|e2el?)\s*[=:]\s*(\d*\.?\d+)(?=[\s,]|$)(?!\s*(?:[uµμm]?s|m)\b)", re.IGNORECASE
)


def check_options(given: LoadOptions) -> None:
    """
    Raises:
        ConfigError: an option that does nothing, contradicts another or is out of range.
        BatonError: a file that cannot be read.
    """
    named = [name for name in _WORKLOADS if is_given(given, name)]
    if len(named) > 1 and named != ["sharegpt", "turns"]:
        flags = " and ".join(map(flag, named))
        raise ConfigError(f"{flags} are different workloads: give only one of them.")
    for names, partner in _PARTNERS:
        idle = [flag(name) for name in names if is_given(given, name)]
        if idle and not is_given(given, partner):
            raise ConfigError(f"{' and '.join(idle)} would do nothing: give {flag(partner)} too.")
    for one, others, why in _RIVALS:
        unwanted = [flag(name) for name in others if is_given(given, name)]
        if is_given(given, one) and unwanted:
            raise ConfigError(f"{why}: leave {' and '.join(unwanted)} out.")
    for name, (least, most) in _RANGE.items():
        value = getattr(given, name)
        if value is not None and value < least:
            raise ConfigError(f"{flag(name)} {value}: give {least} or more.")
        if value is not None and value > most:
            raise ConfigError(f"{flag(name)} is above {most:,}: give that or less.")
    if not 0 <= given.temperature < math.inf:  # NaN too
        raise ConfigError(f"--temperature {given.temperature:g}: give a number of 0 or more.")
    if not 0 < getattr(given, "target", 1.0) <= 1:  # NaN too
        raise ConfigError("--target: give a share above 0, up to 1, such as 0.9.")
    if given.rate is not None and math.isinf(given.rate):
        raise ConfigError("--rate inf: all at once is --arrival burst, with --requests N and no --rate.")
    if given.rate is not None:
        check_rate(given.rate)
    if given.trace_format is not None and given.trace_format not in FORMATS:
        raise ConfigError(f"--trace-format {given.trace_format}: use {', '.join(FORMATS)}.")
    for name in ("out", "report"):
        if is_given(given, name) and not getattr(given, name).name:
            raise ConfigError(f"Cannot write {flag(name)} `{getattr(given, name)}`: give the name of a file.")
    for name in ("trace", "sharegpt"):
        path: Path | None = getattr(given, name)
        if path is not None:
            _check_input(flag(name), path)


def _check_input(name: str, path: Path) -> None:
    """
    Raises:
        BatonError: the file that is there, or not, refuses.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise BatonError(f"{name} {path}: there is no such file.") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BatonError(f"{name} {str(path)[:80]!r}: it cannot be read ({why}).") from None
    if stat.S_ISDIR(mode):
        raise BatonError(f"{name} {path}: that is a directory; give the file in it.")
    if not stat.S_ISREG(mode):
        raise BatonError(f"{name} {path}: that is no ordinary file; write what it gives into one.")
    if not os.access(path, os.R_OK):
        raise BatonError(f"{name} {path}: it may not be read; change its permissions.")


def check_unvaried(given: LoadOptions, command: str) -> None:
    """A command that varies the rate itself takes no other pace.

    Raises:
        ConfigError: one was given.
    """
    for name in ("rate", "closed_loop", "speed_up"):
        if is_given(given, name):
            raise ConfigError(f"{command} sets the rate itself: leave {flag(name)} out.")


def check_outputs(*paths: Path | None, requests_of: Sequence[Path] = ()) -> None:
    """Every file that a command will write; `requests_of` are results with a requests file beside them.

    Raises:
        ConfigError: two are the same.
        BatonError: one cannot be written.
    """
    wanted = [path for path in paths if path is not None]
    wanted += [one for path in requests_of for one in (path, requests_path(path))]
    places = [os.path.realpath(path) for path in wanted]
    for number, path in enumerate(wanted):
        if places[number] in places[:number]:
            raise ConfigError(f"`{path}` would be written twice: give each output a file of its own.")
        check_output(path)


def overwritten(*paths: Path | None, requests_of: Sequence[Path] = ()) -> list[str]:
    """One line where results of an earlier run will be replaced."""
    wanted = [*(path for path in paths if path is not None), *requests_of]
    there = [f"`{path}`" for path in wanted if path.exists()]
    return [f"{', '.join(there)} will be overwritten"] if there else []


def parse_numbers(name: str, text: str) -> list[float]:
    """Numbers with commas between them, none twice.

    Raises:
        ConfigError: they are not.
    """
    try:
        numbers = [float(item) for item in text.split(",")]
    except ValueError:
        raise ConfigError(f"{name} {text}: give numbers with commas between them, such as 1,2,4.") from None
    if len({f"{one:g}" for one in numbers}) < len(numbers):
        raise ConfigError(f"{name} {text}: give each number once.")
    return numbers


def parse_rates(name: str, text: str) -> list[float]:
    """
    Raises:
        ConfigError: not numbers, or one that is no rate.
    """
    return [check_rate(rate) for rate in parse_numbers(name, text)]


def parse_percentiles(name: str, text: str) -> tuple[float, ...]:
    """
    Raises:
        ConfigError: not numbers from 0 to 100.
    """
    numbers = parse_numbers(name, text)
    if not all(0 <= number <= 100 for number in numbers):  # NaN too
        raise ConfigError(f"{name} {text}: give numbers from 0 to 100, such as 50,90,99.")
    return tuple(numbers)


def slo_notes(text: str | None) -> list[str]:
    """A plain number is milliseconds, as in vLLM; whoever wrote a small one may have meant seconds."""
    return [
        f"--slo {found[0].strip()} is read as {found[2]} ms; for seconds write {found[1]}={found[2]}s."
        for found in _PLAIN_BOUND.finditer(text or "")
        if float(found[2]) < 10
    ]


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
