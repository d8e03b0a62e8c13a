"""What the gateway knows of the served model: its name, its size, and the sampling defaults it ships with.

Defaults: a request's own value, else the model's `generation_config.json`, else OpenAI's. `/v1/models` shows
the resolved defaults, so that nobody is surprised by a temperature they did not set.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import ModelError


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values of fields that a request leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """`root` is what the operator asked to serve, shown in `/v1/models`; `created` is Unix seconds."""

    name: str
    root: str
    created: int
    vocab_size: int
    max_model_len: int  # most tokens of prompt and output together
    defaults: SamplingDefaults = SamplingDefaults()


def read_sampling_defaults(model_dir: Path) -> SamplingDefaults:
    """The sampling part of `generation_config.json`; OpenAI's defaults where there is none.

    Raises:
        ModelError: the file is broken or holds a value that no request could ask for.
    """
    path = model_dir / "generation_config.json"
    if not path.is_file():
        return SamplingDefaults()
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"cannot read {path}: not a JSON object")

    def number(name: str, default: float, low: float, high: float) -> float:
        value: Any = config.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ModelError(f"`{name}` in {path} must be a number from {low:g} to {high:g}: {value!r}")
        return float(value)

    return SamplingDefaults(
        temperature=number("temperature", 1.0, 0, 2),
        top_p=number("top_p", 1.0, 1e-9, 1),
        top_k=max(0, int(number("top_k", 0, -1, 2**31 - 1))),
        min_p=number("min_p", 0.0, 0, 1),
        repetition_penalty=number("repetition_penalty", 1.0, 1e-9, 1e6),
    )
