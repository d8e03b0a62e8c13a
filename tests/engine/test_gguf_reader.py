"""The reader that passes over a vocabulary: of all else it finds what the package's own finds."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFEndian, GGUFValueType

from cluster.engine.gguf_reader import GgufReader

LONG = 1025
NUMBERS = [kind for kind in GGUFValueType if kind not in (GGUFValueType.STRING, GGUFValueType.ARRAY)]
LONG_NUMBERS = {f"numbers.{kind.name}.{LONG}" for kind in NUMBERS}


def write(path: Path, lengths: tuple[int, ...], endian: GGUFEndian = GGUFEndian.LITTLE) -> Path:
    """Arrays of every kind and length, with a field behind them."""
    writer = gguf.GGUFWriter(path, "llama", endianess=endian)
    for length in lengths:
        for kind in NUMBERS:
            one = kind is GGUFValueType.BOOL
            writer.add_key_value(
                f"numbers.{kind.name}.{length}", [one] * length, GGUFValueType.ARRAY, sub_type=kind
            )
        writer.add_array(f"strings.{length}", ["é" * (index % 300) for index in range(length)])
        writer.add_uint32(f"behind.{length}", length)
    writer.add_string("last", "of all")
    for name, shape in (("a", (4, 64)), ("b", (3,))):
        values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("endian", list(GGUFEndian), ids=lambda endian: endian.name)
def test_all_but_vocabularies_is_what_the_package_reads(tmp_path: Path, endian: GGUFEndian) -> None:
    path = write(tmp_path / "made.gguf", (1, 3, LONG - 1, LONG), endian)
    ours, theirs = GgufReader(path), gguf.GGUFReader(path)
    assert list(ours.fields) == list(theirs.fields)
    for name, field in theirs.fields.items():
        is_passed_over = name.startswith("strings.") or name in LONG_NUMBERS
        assert ours.fields[name].contents() == ([] if is_passed_over else field.contents())
        assert ours.fields[name].types == field.types
    assert len(ours.tensors) == 2
    for tensor, expected in zip(ours.tensors, theirs.tensors, strict=True):
        assert (tensor.name, tensor.tensor_type, tensor.data_offset) == (
            expected.name,
            expected.tensor_type,
            expected.data_offset,
        )
        assert np.array_equal(tensor.data, expected.data)


def test_a_file_that_ends_within_an_array_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "made.gguf", (LONG,))
    starts = [field.offset for field in gguf.GGUFReader(path).fields.values() if "." in field.name]
    for start, end in reversed(list(pairwise(starts))):
        for size in (end - 1, start + 2 * (end - start) // 3):
            os.truncate(path, size)
            with pytest.raises((ValueError, IndexError)):
                GgufReader(path)


@pytest.mark.parametrize("length", [2**40, 2**63 + 5])
@pytest.mark.parametrize("kind", [GGUFValueType.STRING, GGUFValueType.UINT8], ids=lambda kind: kind.name)
def test_a_length_that_no_file_has_is_refused_at_once(tmp_path: Path, kind: Any, length: int) -> None:
    path = tmp_path / "made.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values: list[Any] = ["ab"] * 9 if kind is GGUFValueType.STRING else [1] * LONG
    writer.add_key_value("array", values, GGUFValueType.ARRAY, sub_type=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    content = path.read_bytes()
    told = int(kind).to_bytes(4, "little") + len(values).to_bytes(8, "little")
    assert content.count(told) == 1
    path.write_bytes(content.replace(told, told[:4] + length.to_bytes(8, "little")))
    with pytest.raises(ValueError, match="goes on behind the file's end"):
        GgufReader(path)
