"""How `baton simulate --trace` and `baton plan` speak: what a user wrote, or what is in the user's file, is
shown as text. It is no markup, and nothing that a terminal would obey.
"""

from __future__ import annotations

import typer


def visible(text: str) -> str:
    """The text on one line, with an escape such as `\\x1b` for each character that has no look of its own."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def line(text: str) -> None:
    """A line of the result."""
    typer.echo(visible(text))


def warn(text: str) -> None:
    """What a reader of the result should know."""
    typer.secho(visible(text), fg="yellow", err=True)


def fail(error: Exception) -> None:
    """Why the command cannot work."""
    typer.secho(f"{visible(str(error).rstrip('.'))}.", fg="red", err=True)
