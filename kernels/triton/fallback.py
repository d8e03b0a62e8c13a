"""What happens to a call that no kernel takes: the reference computes it, and the log says so once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from kernels.triton.launch import KernelError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Fallbacks:
    """One backend's memory of what went to the reference. A kernel that does not compile is not tried
    again."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()
        self._broken: dict[str, str] = {}  # operation |-> what its kernel said
        self.num_calls = 0  # that went to the reference so far

    def run(
        self, operation: str, why_not: str | None, kernel: Callable[[], T], reference: Callable[[], T]
    ) -> T:
        """`kernel()`, or `reference()` if there is a reason not to, or the kernel cannot run here."""
        why_not = why_not or self._broken.get(operation)
        if why_not is None:
            try:
                return kernel()
            except KernelError as error:
                why_not = self._broken[operation] = f"this device: {error}"
        self.num_calls += 1
        if (operation, why_not) not in self._told:
            self._told.add((operation, why_not))
            logger.warning(
                "`%s` runs in plain torch, slower; its kernel does not take %s", operation, why_not
            )
        return reference()
