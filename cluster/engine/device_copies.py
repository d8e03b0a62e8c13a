"""Host memory that a device copies from by itself, and points in its work to wait for; plain on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def host_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the host; pinned if `device` is a GPU, so that copies to and from it do not wait for the host."""
    return torch.zeros(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")


class Mark:
    """A point in the current stream. One that was never set is passed."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def set(self) -> None:
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Until the device has passed it; without the GIL."""
        if self._event is not None:
            self._event.synchronize()
