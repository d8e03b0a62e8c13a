"""A GGUF file's fields and tensors, without its vocabulary.

The package takes an array apart element by element, with several objects for each: seconds for the tokens and
merges of a usual model, which nobody asks for here (`cluster.tokenizer` has them from `transformers`).
"""

from __future__ import annotations

import sys
from typing import Any

import gguf
import numpy as np
from gguf import GGUFValueType as Kind

_LONG = 1024  # elements; numbers of a configuration are one for each layer, or for each pair of a head
_HEAD_BYTES = 12  # of an array: the kind of its elements and their number


class GgufReader(gguf.GGUFReader):  # type: ignore[misc]  # the package is untyped
    """Arrays of strings and those longer than `_LONG` are passed over: their fields are there, and empty."""

    @property
    def data(self) -> np.ndarray[Any, Any]:
        """A plain view of the mapped file: each slice of an `np.memmap` is dear."""
        return self._view

    @data.setter
    def data(self, mapped: np.ndarray[Any, Any]) -> None:
        self._view = np.asarray(mapped)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type == Kind.ARRAY:
            kind = Kind(self._get(orig_offs, np.uint32)[0])
            length = int(self._get(orig_offs + 4, np.uint64)[0])
            if kind == Kind.STRING or (length > _LONG and kind != Kind.ARRAY):
                end = self._end_of(orig_offs + _HEAD_BYTES, kind, length)
                return end - orig_offs, [], [], [Kind.ARRAY, kind]
        whole: tuple[int, list[Any], list[int], list[Any]] = super()._get_field_parts(orig_offs, raw_type)
        return whole

    def _end_of(self, offset: int, kind: Kind, length: int) -> int:
        """Where `length` elements of `kind` end that begin at `offset`."""
        if kind != Kind.STRING:
            return self._inside(offset + length * np.dtype(self.gguf_scalar_to_np[kind]).itemsize)
        bytes_of_file = self._view.data
        is_little = (sys.byteorder == "little") == (self.byte_order == "I")
        for _ in range(length):
            start = self._inside(offset + 8)
            offset = start + int.from_bytes(bytes_of_file[offset:start], "little" if is_little else "big")
        return self._inside(offset)

    def _inside(self, offset: int) -> int:
        if offset > len(self._view):
            raise ValueError("an array goes on behind the file's end")
        return offset
