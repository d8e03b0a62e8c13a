"""Figures that no worker can have: what one of them mismeasures must not become the router's trouble.

A figure is unbelievable if it is no number, negative, or larger than anything there is. The last believable
one stands then; the router's log says so once (`router.worker_links`).
"""

from __future__ import annotations

from typing import Final

import msgspec

from cluster.step_model import StepModel
from cluster.wire.messages import WorkerLoad

MOST: Final = 1e12  # seconds, or tokens per second
_SIGNED: Final = {"step_error_p90"}  # steps may be shorter than predicted; for people only
FIGURES: Final = tuple(
    field.name
    for field in msgspec.structs.fields(WorkerLoad)
    if field.type is float and field.name not in _SIGNED
)
_OF_MODEL: Final = StepModel.__struct_fields__


def unbelievable(load: WorkerLoad) -> list[str]:
    """Names of the figures that cannot be."""
    names = [name for name in FIGURES if not 0.0 <= getattr(load, name) <= MOST]
    model = load.step_model
    if model is not None and not all(0.0 <= getattr(model, name) <= MOST for name in _OF_MODEL):
        names.append("step_model")
    return names


def believable(load: WorkerLoad, last: WorkerLoad) -> WorkerLoad:
    """`load`, with the figures of `last` where it has unbelievable ones."""
    names = unbelievable(load)
    if not names:
        return load
    return msgspec.structs.replace(load, **{name: getattr(last, name) for name in names})
