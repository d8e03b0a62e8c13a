"""Numbers and texts as people read them, for the command line. Pure."""

from __future__ import annotations


def duration(seconds: float | None) -> str:
    """0.0842 → "84 ms", 1.239 → "1.24 s"; None → "–"."""
    if seconds is None:
        return "–"
    milliseconds = seconds * 1000
    if milliseconds < 9.95:
        return f"{milliseconds:.1f} ms"
    if milliseconds < 999.5:
        return f"{milliseconds:.0f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    return f"{seconds:.1f} s" if seconds < 99.95 else f"{seconds:.0f} s"


def percent(part: float | None) -> str:
    """0.984 → "98.4 %"; None → "–". Only 1 is 100 %."""
    if part is None:
        return "–"
    return "100 %" if part >= 1 else f"{min(99.9, part * 100):.1f} %"


def plural(number: int, noun: str) -> str:
    """1 → "1 token", 2 → "2 tokens"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def visible(text: str) -> str:
    """The text on one line, with an escape such as `\\x1b` for each character that has no look of its own."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
