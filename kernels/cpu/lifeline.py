"""A socket apart from the other files of this process (`lifeline.cpp`), so that its death is known at once.

When the process is killed, either this socket or the others are closed before its memory is taken apart.
Where the compiled library or the system cannot do it, there is none: all are then closed after that.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from kernels.cpu.build import BuildError, load_library
from kernels.cpu.native import bind


class Lifeline:
    """Made by `hold`; `close` ends it on purpose."""

    def __init__(self, library: Any, handle: int) -> None:
        self._finalizer = weakref.finalize(self, library.baton_lifeline_release, handle)

    def close(self) -> None:
        """Idempotent."""
        self._finalizer()


@functools.cache
def _library() -> Any:
    """As it is when the process begins: its files may be another version's by the time a link breaks, and to
    compile those would hold up the event loop.

    Raises:
        BuildError: see `load_library` and `bind`.
    """
    return bind(load_library())


def hold(file_descriptor: int) -> Lifeline | None:
    """Take the socket over. None, and the descriptor stays the caller's, where it cannot be done."""
    try:
        library = _library()
    except BuildError:
        return None
    handle = library.baton_lifeline_hold(file_descriptor)
    return None if handle is None else Lifeline(library, handle)
