"""ByteTok: a model directory's tokenizer files with one token per byte, for tests.

Id i (0..255) is the byte i, so every non-ASCII character spans several tokens and a scripted text is just
`text.encode()`. Specials follow: see the constants. The directory has the same files as a real model's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from cluster.token_bytes import byte_alphabet

BOS, EOS, IM_START, IM_END, THINK = range(256, 261)
SPECIALS = {BOS: "<|bos|>", EOS: "<|eos|>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}
ADDED = {THINK: "<think>"}  # an added token that is not special: it stays in the text
VOCAB_SIZE = 261

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_WITH_BOS = "{{ bos_token }}" + CHATML


def write_byte_tokenizer(
    directory: Path,
    *,
    add_bos: bool = False,
    eos_ids: int | Sequence[int] | None = EOS,
    chat_template: str | None = CHATML,
) -> Path:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json; returns `directory`.

    `eos_ids` goes into generation_config.json as it is; the tokenizer's own EOS is `<|eos|>`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    added = [
        {
            "id": token_id,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token_id in SPECIALS,
        }
        for token_id, text in (SPECIALS | ADDED).items()
    ]
    bos, text = {"SpecialToken": {"id": SPECIALS[BOS], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    post_processor = {
        "type": "TemplateProcessing",
        "single": [bos, text] if add_bos else [text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {SPECIALS[BOS]: {"id": SPECIALS[BOS], "ids": [BOS], "tokens": [SPECIALS[BOS]]}},
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": post_processor,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {char: byte for byte, char in byte_alphabet().items()},
            "merges": [],
        },
    }
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[BOS],
        "eos_token": SPECIALS[EOS],
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    generation: dict[str, object] = {"bos_token_id": BOS}
    if eos_ids is not None:
        generation["eos_token_id"] = eos_ids if isinstance(eos_ids, int) else list(eos_ids)
    for name, value in (
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", config),
        ("generation_config.json", generation),
    ):
        (directory / name).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    return directory
