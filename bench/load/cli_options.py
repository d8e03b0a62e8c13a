"""Options of a command from a frozen dataclass: one table for the command line, its help and the code.

`options(type)` turns `def command(given: Options) -> None` into a function whose signature has one option per
field; typer reads it. A field is `option(default, help, panel)`; its flag is its name with dashes.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

import typer

Options = TypeVar("Options")


def option(default: Any, help: str, panel: str, flag: str | None = None) -> Any:
    """A dataclass field that is also a command-line option. A default of `...` makes it required.

    The help tells every default: typer adds those that are values, the text itself one that follows from
    other things, as `(default: …)`, and what is off or absent is said here.
    """
    if default is False:
        help += " (default: off)"
    elif default is None and "(default: " not in help:
        help += " (default: none)"
    metadata = {"help": help, "panel": panel, "flag": flag}
    if default is ...:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def options(kind: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Decorate a command that takes one `kind`, a dataclass whose fields were made by `option`."""

    def decorate(function: Callable[[Options], None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            function(kind(**given))

        hints = get_type_hints(kind)
        parameters = []
        for field in dataclasses.fields(kind):  # type: ignore[arg-type]
            metadata = field.metadata
            is_required = field.default is dataclasses.MISSING
            default = typer.Option(
                ... if is_required else field.default,
                metadata["flag"] or f"--{field.name.replace('_', '-')}",
                help=metadata["help"],
                rich_help_panel=metadata["panel"],
            )
            parameters.append(
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name]
                )
            )
        command.__doc__ = function.__doc__
        command.__name__ = function.__name__
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate
