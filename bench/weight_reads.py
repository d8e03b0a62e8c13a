"""How many bytes per element a product reads of each matrix of a prepared model, as it is packed.

Matrices of a GGUF file may be kept as codes, with decoded ones beside them for steps of many rows: which of
the two a step reads depends on its rows (`kernels/cpu/gemm_coded.h`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from cluster.engine.weights_file import map_weights
from kernels.cpu.weight_kind import WeightKind

STAGES: Final = {  # the last part of a matrix's name → the stage that multiplies with it
    "qkv": "qkv",
    "output": "output",
    "gate_up": "gate and up",
    "down": "down",
    "lm_head": "logits",
}
_CODED: Final = {  # bytes per element, scales and minima included; the most rows that meet codes rather than
    # decoded weights: `kFusedRows`, `kAmxCodedRows`
    WeightKind.NIBBLES: (20 / 32, 8),
    WeightKind.BYTES: (34 / 32, 8),
    WeightKind.AMX_NIBBLES: (20 / 32, 128),
    WeightKind.AMX_BYTES: (34 / 32, 128),
}
_KIND, _EXPANDED = 5, 6  # where `PackedHeader` has them, in words of 64 bits


@dataclass(frozen=True, slots=True)
class Reads:
    """Bytes per element of steps up to `most_rows`, and of longer ones."""

    few: float
    most_rows: int
    many: float

    def of(self, num_rows: int) -> float:
        return self.few if num_rows <= self.most_rows else self.many


WeightReads = Mapping[str, Reads]  # by stage


def uniform(num_bytes: float) -> WeightReads:
    """As many bytes of every element, whatever the rows."""
    return dict.fromkeys(STAGES.values(), Reads(num_bytes, 0, num_bytes))


def weight_reads(directory: Path, otherwise: float) -> WeightReads:
    """Of a prepared model; `otherwise` bytes per element where nothing is coded."""
    found: dict[str, list[Reads]] = {}
    for name, tensor in map_weights(directory).tensors.items():
        stage = STAGES.get(name.rpartition(".")[2])
        if stage is not None:
            found.setdefault(stage, []).append(_reads(tensor, otherwise))
    return dict(uniform(otherwise)) | {stage: _mean(of_layers) for stage, of_layers in found.items()}


def _mean(reads: list[Reads]) -> Reads:
    """Of layers, whose matrices have the same shape."""
    few, many = (sum(values) / len(reads) for values in ([r.few for r in reads], [r.many for r in reads]))
    return Reads(few, max(read.most_rows for read in reads), many)


def _reads(packed: Tensor, otherwise: float) -> Reads:
    header = packed.flatten().view(torch.uint8)[:64].clone().view(torch.int64).tolist()
    for kind, (few, most_rows) in _CODED.items():
        if packed.dtype is torch.uint8 and header[_KIND] == kind:
            return Reads(few, most_rows, otherwise if header[_EXPANDED] > 0 else few)
    return Reads(otherwise, 0, otherwise)
