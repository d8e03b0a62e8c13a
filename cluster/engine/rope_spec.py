"""How positions become rotation frequencies: rotary embedding and its published scalings. No torch.

Both spellings are read: `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters`
(transformers 5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from cluster.errors import ModelError


class RopeType(Enum):
    """The value is the `rope_type` of config.json."""

    DEFAULT = "default"
    LINEAR = "linear"  # every frequency divided by a factor (Chen et al. 2023)
    LLAMA3 = "llama3"  # long wavelengths divided, short kept, a ramp between (Llama 3.1)
    YARN = "yarn"  # NTK-by-parts and an attention temperature (Peng et al. 2023)
    FACTORS = "longrope"  # one divisor per frequency, the same at every length (GGUF `rope_freqs`)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary parameters; fields beyond `theta` mean something only for the types named beside them."""

    theta: float
    rope_type: RopeType = RopeType.DEFAULT
    factor: float = 1.0  # linear, llama3, yarn
    original_max_position: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float = 1.0  # yarn: cos and sin are multiplied by it
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    frequency_factors: tuple[float, ...] = field(default=())  # factors: head_dim // 2 divisors

    @classmethod
    def from_hf_config(
        cls, config: Mapping[str, Any], max_position: int, head_dim: int, source: str
    ) -> RopeSpec:
        """The rotary parameters of a parsed config.json; `source` is its path, for messages.

        Raises:
            ModelError: a rope type or parameter that is not supported.
        """
        given = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(given, Mapping) or any(isinstance(v, Mapping) for v in given.values()):
            raise ModelError(f"{source}: rope parameters per layer type are not supported")
        # what is not among the rope parameters may stand at the top level, except that the original length
        # takes precedence there
        parameters = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")} | dict(given)
        if config.get("original_max_position_embeddings") is not None:
            parameters["original_max_position_embeddings"] = config["original_max_position_embeddings"]
        if parameters["partial_rotary_factor"] not in (None, 1, 1.0):
            raise ModelError(f"{source}: partial rotary embedding (`partial_rotary_factor`) is not supported")
        if parameters.get("mrope_section"):
            raise ModelError(f"{source}: multimodal rope (`mrope_section`) is not supported")
        read = _RopeReader(parameters, source)
        name = parameters.get("rope_type", parameters.get("type", RopeType.DEFAULT.value))
        theta = read.number("rope_theta", default=10_000.0)
        original = int(read.number("original_max_position_embeddings", default=max_position))
        if name == RopeType.DEFAULT.value:
            return cls(theta)
        if name == RopeType.LINEAR.value:
            return cls(theta, RopeType.LINEAR, factor=read.number("factor"))
        if name == RopeType.LLAMA3.value:
            return cls(
                theta,
                RopeType.LLAMA3,
                factor=read.number("factor"),
                original_max_position=original,
                low_freq_factor=read.number("low_freq_factor"),
                high_freq_factor=read.number("high_freq_factor"),
            )
        if name == RopeType.YARN.value:
            return cls._yarn(theta, read, max_position, original)
        if name == RopeType.FACTORS.value:
            return cls._factors(theta, parameters, head_dim, source)
        supported = ", ".join(t.value for t in RopeType)
        raise ModelError(f"{source}: rope type `{name}` is not supported; supported are {supported}")

    @classmethod
    def _yarn(cls, theta: float, read: _RopeReader, max_position: int, original: int) -> RopeSpec:
        factor = read.number("factor", default=max_position / original)
        mscale, mscale_all = read.parameters.get("mscale"), read.parameters.get("mscale_all_dim")
        if mscale and mscale_all:
            default = _yarn_temperature(factor, mscale) / _yarn_temperature(factor, mscale_all)
        else:
            default = _yarn_temperature(factor, 1.0)
        return cls(
            theta,
            RopeType.YARN,
            factor=factor,
            original_max_position=original,
            attention_factor=read.number("attention_factor", default=default),
            beta_fast=read.number("beta_fast", default=32.0),
            beta_slow=read.number("beta_slow", default=1.0),
            truncate=bool(read.parameters.get("truncate", True)),
        )

    @classmethod
    def _factors(cls, theta: float, parameters: Mapping[str, Any], head_dim: int, source: str) -> RopeSpec:
        short, long = parameters.get("short_factor"), parameters.get("long_factor")
        if not isinstance(short, list) or short != long or parameters.get("attention_factor") != 1.0:
            raise ModelError(
                f"{source}: rope type `longrope` with factors that change with length is not supported"
            )
        if len(short) != head_dim // 2:
            raise ModelError(f"{source}: {len(short)} rope factors for {head_dim // 2} frequencies")
        return cls(theta, RopeType.FACTORS, frequency_factors=tuple(map(float, short)))

    def to_hf_config(self) -> dict[str, Any]:
        """The `rope_parameters` that `from_hf_config` reads back to an equal value."""
        parameters: dict[str, Any] = {"rope_type": self.rope_type.value, "rope_theta": self.theta}
        match self.rope_type:
            case RopeType.DEFAULT:
                pass
            case RopeType.LINEAR:
                parameters |= {"factor": self.factor}
            case RopeType.LLAMA3:
                parameters |= {
                    "factor": self.factor,
                    "original_max_position_embeddings": self.original_max_position,
                    "low_freq_factor": self.low_freq_factor,
                    "high_freq_factor": self.high_freq_factor,
                }
            case RopeType.YARN:
                parameters |= {
                    "factor": self.factor,
                    "original_max_position_embeddings": self.original_max_position,
                    "attention_factor": self.attention_factor,
                    "beta_fast": self.beta_fast,
                    "beta_slow": self.beta_slow,
                    "truncate": self.truncate,
                }
            case RopeType.FACTORS:
                parameters |= {
                    "short_factor": list(self.frequency_factors),
                    "long_factor": list(self.frequency_factors),
                    "attention_factor": 1.0,
                    "factor": 1.0,
                }
        return parameters


def _yarn_temperature(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class _RopeReader:
    parameters: Mapping[str, Any]
    source: str

    def number(self, key: str, *, default: float | None = None) -> float:
        value = self.parameters.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.source}: rope parameter `{key}` is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ModelError(
                f"{self.source}: rope parameter `{key}` must be a positive number, not {value!r}"
            )
        return float(value)
