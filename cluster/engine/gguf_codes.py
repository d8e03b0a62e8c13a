"""The blocks of a GGUF tensor taken apart: whole numbers, and fp16 scales and minima per 32 of them.

Types whose blocks are that and nothing more (ggml's `block_q4_0`, `block_q4_1`, `block_q5_0`, `block_q8_0`);
of all others, K-quants with their scales of scales among them, there are only values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from cluster.engine.gguf_reader import GgufReader
from kernels.coded import BLOCK_SIZE, CodedMatrix

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_BLOCK_BYTES = {Type.Q4_0: 18, Type.Q4_1: 20, Type.Q5_0: 22, Type.Q8_0: 34}  # of a block
_PACKED_BITS = {Type.Q4_0: 5.0, Type.Q4_1: 5.0, Type.Q5_0: 8.5, Type.Q8_0: 8.5}  # scales and minima included


def kept_bits(file: Path) -> float | None:
    """Per weight of a file's matrices, in the mean, where kernels keep codes: other types become 16 bits.
    None if no matrix has codes."""
    matrices = [tensor for tensor in GgufReader(file).tensors if len(tensor.shape) == 2]
    if not any(tensor.tensor_type in _PACKED_BITS for tensor in matrices):
        return None
    bits = sum(_PACKED_BITS.get(one.tensor_type, 16.0) * int(one.n_elements) for one in matrices)
    return bits / sum(int(one.n_elements) for one in matrices)


def take_apart(data: _Bytes, kind: Type) -> CodedMatrix | None:
    """`data` [out, bytes of a row]; None of types without such blocks."""
    if kind not in _BLOCK_BYTES or data.dtype != np.uint8 or data.ndim != 2:
        return None
    blocks = data.reshape(data.shape[0], -1, _BLOCK_BYTES[kind])
    scales = blocks[..., :2].copy().view(np.float16)[..., 0]
    codes: np.ndarray[Any, Any]
    minima: np.ndarray[Any, Any] | None = None
    if kind is Type.Q4_0:  # (code - 8) · scale
        with np.errstate(over="ignore"):  # an infinite minimum is looked for later
            codes, minima = _nibbles(blocks[..., 2:]), np.float16(-8) * scales
    elif kind is Type.Q4_1:
        codes, minima = _nibbles(blocks[..., 4:]), blocks[..., 2:4].copy().view(np.float16)[..., 0]
    elif kind is Type.Q5_0:  # the fifth bits of all codes come first
        high = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
        codes = (_nibbles(blocks[..., 6:]) | high << 4).astype(np.int8) - np.int8(16)
    else:
        codes = blocks[..., 2:].view(np.int8)
    return CodedMatrix(
        torch.from_numpy(np.ascontiguousarray(codes)).flatten(1),
        torch.from_numpy(np.ascontiguousarray(scales)),
        None if minima is None else torch.from_numpy(np.ascontiguousarray(minima)),
    )


def _nibbles(packed: _Bytes) -> _Bytes:
    """[..., 16] → [..., 32]: the low halves of all bytes, then the high ones."""
    assert packed.shape[-1] * 2 == BLOCK_SIZE
    return np.concatenate([packed & 15, packed >> 4], axis=-1)
