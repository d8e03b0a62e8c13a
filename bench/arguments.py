"""Whole numbers on the command lines of benchmarks: what makes no sense is refused before anything starts."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """At least 1, for `add_argument(type=...)`."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """At least 0."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a whole number: {text!r}") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, not {value}")
    return value
