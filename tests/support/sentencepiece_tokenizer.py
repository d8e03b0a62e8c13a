"""A tiny sentencepiece style tokenizer (as Llama 2 and Mistral 7B have): `▁` for a space, byte fallback, and
a leading space that is dropped at the start of a text. Id 3 + b is the raw byte b."""

from __future__ import annotations

import json
from pathlib import Path

UNK, BOS, EOS = 0, 1, 2
FIRST_BYTE = 3
PIECES = ("▁", "▁Hello", "▁world", "▁▁", "▁▁▁", "é", "lo", "▁漢", "!", "▁<", "<0x41>x")
FIRST_PIECE = FIRST_BYTE + 256
TOOL = FIRST_PIECE + len(PIECES)  # an added token, not special
VOCAB_SIZE = TOOL + 1


def write_sentencepiece_tokenizer(directory: Path) -> Path:
    """Write tokenizer.json and tokenizer_config.json; returns `directory`."""
    names = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES)
    added = [
        {
            "id": token_id,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token_id < FIRST_BYTE,
        }
        for token_id, content in ((UNK, "<unk>"), (BOS, "<s>"), (EOS, "</s>"), (TOOL, "[TOOL ▁]"))
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {name: token_id for token_id, name in enumerate(names)},
            "merges": [],
        },
    }
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
