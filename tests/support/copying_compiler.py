"""A fast compiler: one that copies the library this machine has already compiled."""

from __future__ import annotations

from pathlib import Path


def copying_compiler(directory: Path, library: Path, log: Path) -> Path:
    """A program for `CXX` that puts `library` wherever it is told; it adds a line to `log` per linking."""
    program = directory / "compiler"
    program.write_text(
        f'#!/bin/sh\ncase " $* " in *" -shared "*) echo run >> "{log}"; sleep 0.3;; esac\n'
        f'for last; do :; done\ncp "{library}" "$last"\n'
    )
    program.chmod(0o755)
    return program
