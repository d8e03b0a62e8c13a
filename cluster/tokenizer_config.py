"""What tokenizer_config.json adds to tokenizer.json, applied the way transformers applies it.

The two files overlap: special tokens may be named in one and flagged in the other. Whether BOS or EOS is
inserted is tokenizer.json's to say (its post-processor). Equality with transformers is tested.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from cluster.errors import ModelError

_NAMED_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is no file.

    Raises:
        ModelError: the file is not readable or not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"cannot read {path}: not a JSON object")
    return value


def special_tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... |-> text, for those the config defines."""
    return {name: text for name in _NAMED_SPECIALS if (text := _token_text(config.get(name)))}


def add_configured_tokens(
    backend: Backend, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Add the tokens that only the config knows: `added_tokens_decoder` and the named specials."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    tokens = [
        AddedToken(
            entry["content"],
            **{
                flag: entry[flag]
                for flag in ("single_word", "lstrip", "rstrip", "normalized")
                if flag in entry
            },
            special=bool(entry.get("special")) or entry["content"] in special_tokens.values(),
        )
        for _, entry in sorted(listed.items(), key=lambda item: int(item[0]))
    ]
    extra: Any = config.get("additional_special_tokens") or config.get("extra_special_tokens") or ()
    extra = extra.values() if isinstance(extra, Mapping) else extra
    names = [*special_tokens.values(), *filter(None, map(_token_text, extra))]
    tokens += [AddedToken(text, special=True, normalized=False) for text in dict.fromkeys(names)]
    for token in tokens:
        if token.content not in known:
            known.add(token.content)
            backend.add_tokens([token])


def default_template(model_dir: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: chat_template.jinja, or else the config's (its `default` one of several)."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _token_text(value: object) -> str | None:
    """A token is written as its text, or as an object with a `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None
