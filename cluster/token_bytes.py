"""The bytes behind a token: what a tokenizer's decoder does to one piece, as a pure table.

Both families of decoder that the supported models use are concatenations of per-token bytes, read as UTF-8:

- byte-level BPE (Llama 3, Qwen, SmolLM): every character of a piece stands for one byte;
- sentencepiece style (Llama 2, Mistral 7B): `▁` is a space, `<0xE6>` is one raw byte, and a leading space of
  the whole text is dropped.

Text is therefore decodable incrementally and exactly, token by token. A decoder of another kind is refused
when the tokenizer is loaded, not when the first odd token comes along.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_RAW_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[int, str]:
    """GPT-2's byte |-> printable character, the alphabet of byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(0x100 + index) for index, byte in enumerate(others)
    }


@dataclass(frozen=True, slots=True)
class PieceDecoder:
    """How pieces of a vocabulary turn into bytes.

    `alphabet` maps characters to bytes for byte-level vocabularies and is empty otherwise.
    `num_leading_spaces` is how many spaces at the start of a whole text are dropped.
    """

    alphabet: Mapping[str, int]
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    num_leading_spaces: int = 0

    def piece_bytes(self, piece: str) -> bytes:
        """The bytes one piece contributes to the text; not necessarily whole characters."""
        if self.alphabet:
            try:
                return bytes(self.alphabet[char] for char in piece)
            except KeyError:  # an added token spelled in plain text
                return piece.encode("utf-8", "replace")
        for pattern, content in self.replacements:
            piece = piece.replace(pattern, content)
        if self.byte_fallback and (match := _RAW_BYTE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        return piece.encode("utf-8", "replace")


def piece_decoder(decoder: Mapping[str, Any] | None) -> PieceDecoder:
    """Read the `decoder` section of a tokenizer.json.

    Raises:
        ValueError: naming the decoder step that is not byte-level or sentencepiece style.
    """
    if decoder is None:
        raise ValueError("it has no decoder")
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceDecoder(alphabet={char: byte for byte, char in byte_alphabet().items()})

    replacements: list[tuple[str, str]] = []
    byte_fallback = fused = False
    num_leading_spaces = 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if (
                not byte_fallback and not fused
            ):
                replacements.append((pattern, content))
            case {"type": "ByteFallback"} if not fused:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                num_leading_spaces = start
            case _:
                raise ValueError(f"decoder step `{step['type']}` is not supported here: {kinds}")
    if not fused:
        raise ValueError(f"decoder {kinds} joins tokens in a way that is not supported")
    return PieceDecoder({}, tuple(replacements), byte_fallback, num_leading_spaces)
