"""What a model is, as a value: everything the decoder needs to know beside the weights. No torch.

1. `config.json` (or GGUF metadata mapped to the same keys by `gguf_config`) is read into a dict.
2. `ModelSpec.from_hf_config` checks every key that changes the mathematics and refuses what the decoder
   does not compute: an unknown architecture, partial rotary, quantized checkpoints. Nothing is silently
   ignored.
3. `ModelSpec.to_hf_config` writes the normalised `config.json` of the weight cache; reading it gives the
   same spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from cluster.engine.rope_spec import RopeSpec
from cluster.errors import ModelError


class Dtype(Enum):
    """Type of weights, activations and KV. The value is what a person writes on the command line."""

    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def num_bytes(self) -> int:
        return 2 if self is Dtype.BF16 else 4

    @property
    def wire_name(self) -> str:
        """As `KVGeometry.dtype` spells it."""
        return "bfloat16" if self is Dtype.BF16 else "float32"


class Architecture(Enum):
    """The families the decoder computes; the value is the `model_type` of config.json."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


CLASS_NAMES = {
    Architecture.LLAMA: "LlamaForCausalLM",
    Architecture.MISTRAL: "MistralForCausalLM",
    Architecture.QWEN2: "Qwen2ForCausalLM",
    Architecture.QWEN3: "Qwen3ForCausalLM",
}
SUPPORTED = ", ".join(f"{CLASS_NAMES[architecture]}" for architecture in Architecture)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder-only transformer with grouped-query attention, rotary positions and a gated MLP.

    `max_context_len` is the longest sequence the model computes correctly here: `max_position`, or less
    where a sliding window would start to hide keys, which the attention of `kernels.ops` does not do.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def max_context_len(self) -> int:
        if self.sliding_window is None:
            return self.max_position
        return min(self.max_position, self.sliding_window)

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], source: str) -> ModelSpec:
        """`config`: the parsed config.json. `source`: its path, for messages.

        Raises:
            ModelError: an architecture or a feature that is not supported, or a key that is missing or
            wrong.
        """
        architecture = _architecture(config, source)
        read = _Reader(config, source)
        read.refuse_unsupported()
        hidden_size = read.positive("hidden_size")
        num_heads = read.positive("num_attention_heads")
        if architecture is not Architecture.LLAMA and "num_key_value_heads" not in config:
            raise ModelError(f"{source}: `num_key_value_heads` is missing")
        num_kv_heads = read.positive("num_key_value_heads", default=num_heads)
        num_layers = read.positive("num_hidden_layers")
        if num_heads % num_kv_heads:
            raise ModelError(
                f"{source}: {num_heads} attention heads cannot share {num_kv_heads} key-value heads"
            )
        head_dim = read.positive("head_dim", default=_default_head_dim(architecture, hidden_size, num_heads))
        if head_dim % 2:
            raise ModelError(f"{source}: rotary positions need an even head_dim, not {head_dim}")
        max_position = read.positive("max_position_embeddings")
        attention_bias = read.boolean("attention_bias", default=False)
        return cls(
            architecture=architecture,
            vocab_size=read.positive("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read.positive("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=max_position,
            rms_norm_eps=read.number("rms_norm_eps", default=1e-6),
            rope=RopeSpec.from_hf_config(config, max_position, head_dim, source),
            tie_word_embeddings=read.boolean("tie_word_embeddings", default=False),
            qkv_bias=architecture is Architecture.QWEN2 or (_has_biases(architecture) and attention_bias),
            output_bias=_has_biases(architecture) and attention_bias,
            mlp_bias=architecture is Architecture.LLAMA and read.boolean("mlp_bias", default=False),
            qk_norm=architecture is Architecture.QWEN3,
            sliding_window=_sliding_window(architecture, read, num_layers),
            eos_token_ids=read.token_ids("eos_token_id"),
            bos_token_id=read.optional_int("bos_token_id"),
        )

    def to_hf_config(self, dtype: Dtype) -> dict[str, Any]:
        """The normalised config.json: what `from_hf_config` reads back to an equal spec."""
        config: dict[str, Any] = {
            "model_type": self.architecture.value,
            "architectures": [CLASS_NAMES[self.architecture]],
            "dtype": dtype.wire_name,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": self.rope.to_hf_config(),
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.output_bias,
            "mlp_bias": self.mlp_bias,
            "sliding_window": self.sliding_window,
            "use_sliding_window": self.sliding_window is not None,
            "max_window_layers": 0,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids) or None,
        }
        return config


def _architecture(config: Mapping[str, Any], source: str) -> Architecture:
    names = config.get("architectures") or []
    model_type = config.get("model_type")
    for architecture in Architecture:
        if CLASS_NAMES[architecture] in names or (not names and model_type == architecture.value):
            return architecture
    found = ", ".join(map(str, names)) if names else str(model_type)
    raise ModelError(f"{source}: architecture `{found}` is not supported; supported are {SUPPORTED}")


def _default_head_dim(architecture: Architecture, hidden_size: int, num_heads: int) -> int:
    if architecture is Architecture.QWEN3:
        return 128  # the published default, which is not hidden_size // num_heads
    return hidden_size // num_heads


def _has_biases(architecture: Architecture) -> bool:
    """Whether `attention_bias` of the config means anything to this family."""
    return architecture in (Architecture.LLAMA, Architecture.QWEN3)


def _sliding_window(architecture: Architecture, read: _Reader, num_layers: int) -> int | None:
    """The window in tokens if any layer uses it."""
    if architecture is Architecture.LLAMA:
        return None
    window = read.optional_int("sliding_window", default=4096)
    if architecture is Architecture.MISTRAL or window is None:
        return window
    if not read.boolean("use_sliding_window", default=False):
        return None
    layer_types = read.config.get("layer_types")
    if layer_types is not None:
        return window if "sliding_attention" in layer_types else None
    max_window_layers = read.optional_int("max_window_layers", default=28)
    return window if max_window_layers is None or max_window_layers < num_layers else None


@dataclass(frozen=True, slots=True)
class _Reader:
    """Typed access to one config; every complaint names file and key."""

    config: Mapping[str, Any]
    source: str

    def refuse_unsupported(self) -> None:
        activation = self.config.get("hidden_act", "silu")
        if activation != "silu":
            raise ModelError(f"{self.source}: `hidden_act` `{activation}` is not supported, only silu")
        quantization = self.config.get("quantization_config")
        if quantization:
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
            raise ModelError(
                f"{self.source}: weights quantized with `{method}` are not supported; "
                "use the bf16 checkpoint or a GGUF file"
            )

    def positive(self, key: str, *, default: int | None = None) -> int:
        value = self.optional_int(key, default=default)
        if value is None:
            raise ModelError(f"{self.source}: `{key}` is missing")
        if value < 1:
            raise ModelError(f"{self.source}: `{key}` must be at least 1, not {value}")
        return value

    def optional_int(self, key: str, *, default: int | None = None) -> int | None:
        """Absent → the default. A null is None, except where a default must stand in for it."""
        value = self.config.get(key, default)
        if value is None and key in ("head_dim", "num_key_value_heads"):
            value = default
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ModelError(f"{self.source}: `{key}` must be an integer, not {value!r}")
        return value

    def number(self, key: str, *, default: float) -> float:
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ModelError(f"{self.source}: `{key}` must be a positive number, not {value!r}")
        return float(value)

    def boolean(self, key: str, *, default: bool) -> bool:
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.source}: `{key}` must be true or false, not {value!r}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """An id, a list of ids, or nothing."""
        value = self.config.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise ModelError(f"{self.source}: `{key}` must be token ids, not {value!r}")
        return tuple(ids)
