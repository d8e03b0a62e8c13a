"""Text to token ids and back: the one file that knows transformers.

1. Model preparation writes a directory with `tokenizer.json`, `tokenizer_config.json` (and
   `chat_template.jinja`) and `generation_config.json`; from a GGUF file through `export_gguf_tokenizer`.
2. The router loads it with `Tokenizer.load`: `tokenizers` only, a fraction of a second, no torch.
3. `warm_up` imports transformers' sandboxed template renderer and compiles the chat template, before the
   server calls itself ready. A template that does not compile ends the start with a `ModelError`.
4. A request is rendered and tokenized once (`render_chat`, `encode`); workers only ever see ids.
5. Ids come back as text through `cluster.detokenizer`, whose rules `decode` shares.
"""

from __future__ import annotations

import json
from pathlib import Path

from cluster.errors import ModelError

# llama.cpp's names of byte-level pre-tokenizers that isolate every digit before GPT-2's split.
# transformers' GGUF conversion does not know them and would leave GPT-2's split alone.
_SINGLE_DIGIT_PRE_TOKENIZERS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)


def export_gguf_tokenizer(gguf_path: Path, out_dir: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` (chat template inside) and `generation_config.json`
    for the tokenizer a GGUF file describes.

    Runs once, at model preparation; transformers' conversion imports torch.

    Raises:
        ModelError: the file is not GGUF or describes a tokenizer that cannot be converted.
    """
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import get_gguf_tokenizer

    try:
        _, description, config = get_gguf_tokenizer(str(gguf_path))
        converted = PreTrainedTokenizerFast.from_pretrained(
            str(gguf_path.parent), gguf_file=gguf_path.name, local_files_only=True
        )
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelError(f"no usable tokenizer in {gguf_path}: {error}") from error

    backend = converted.backend_tokenizer
    if description.get("pre_tokenizer_type") in _SINGLE_DIGIT_PRE_TOKENIZERS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    special_ids = {
        name: getattr(converted, f"{name}_id")
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(config.get("add_bos_token", False)),
        "add_eos_token": bool(config.get("add_eos_token", False)),
        **{name: getattr(converted, name) for name, id_ in special_ids.items() if id_ is not None},
    }
    if config.get("chat_template"):
        tokenizer_config["chat_template"] = config["chat_template"]
    generation_config = {f"{name}_id": id_ for name, id_ in special_ids.items() if id_ is not None}
    generation_config.pop("unk_token_id", None)

    out_dir.mkdir(parents=True, exist_ok=True)
    backend.save(str(out_dir / "tokenizer.json"), pretty=False)
    _write_json(out_dir / "tokenizer_config.json", tokenizer_config)
    _write_json(out_dir / "generation_config.json", generation_config)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
