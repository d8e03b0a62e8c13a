"""The step after a step in one call of the compiled library (`step_on.cpp`).

1. A step was computed by the forward pass and its tokens chosen by the sampler; both keep what they were
   called with (`may_follow`).
2. A call moves that step's batch on by one, in its own memory, computes it and chooses its tokens.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from kernels.cpu.native_sampling import NativeSampler

if TYPE_CHECKING:
    from kernels.cpu.native_forward import Computed, NativeForward


class NativeSteps:
    """`kernels.ops.FusedSteps`."""

    def __init__(self, library: Any, model: int, forward: NativeForward, sampler: NativeSampler) -> None:
        self._forward, self._sampler = forward, sampler
        self._index = ctypes.c_int64()
        fields = (model, 0, *sampler.addresses, ctypes.addressof(self._index))
        self._fields = (ctypes.c_int64 * len(fields))(*fields)  # `StepOn` in step_on.cpp
        self._address = ctypes.addressof(self._fields)
        self._step_on = library.baton_step_on
        self._has_guests = forward.has_guests
        self._computed: Computed | None = None  # what goes on, with its fields
        self._chosen = memoryview(b"")

    def may_follow(self) -> bool:
        computed = self._computed = self._forward.computed
        if computed is None:
            return False
        num_tokens, num_seqs, _, num_rows = computed.fields[:4]
        if not num_tokens == num_seqs == num_rows or not self._sampler.is_plain(computed.result):
            return False
        self._fields[1] = ctypes.addressof(computed.fields)
        self._chosen = self._sampler.chosen
        return True

    def __call__(self) -> tuple[list[int], int]:
        """Raises:
        IndexError: a token, position or slot is out of range, a row's block table has no room, or an id in
        `best` names no logit; nothing was chosen.
        """
        num_broken = self._step_on(self._address)
        if self._has_guests:
            self._forward.look_at_guests()
        if num_broken < 0:
            assert self._computed is not None
            raise self._forward.fault(-num_broken, self._index.value, self._computed)
        return self._chosen.tolist(), num_broken
