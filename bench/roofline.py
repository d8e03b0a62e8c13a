"""The speed of light: what a model could reach at most on a machine of given bandwidth and arithmetic rate.

    decode step    t >= max( (W + B * S * kv) / BW,  B * (2 * P + 4 * L * H * D * S) / F )
    prefill        t >= max( W / BW,  (2 * P_layers * n + 2 * L * H * D * n^2 + 2 * P_head) / F )

with W bytes of weights read per step, B sequences of S cached tokens, kv bytes of KV per token, P parameters
that multiply, L layers, H query heads of D, BW bytes and F floating-point operations per second, both
measured in the run they are reported with. A bound, not a prediction: it knows no overhead, and lets memory
and arithmetic overlap entirely. (Williams, Waterman, Patterson: Roofline, CACM 2009.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a decoder-only model decides its cost; all counts."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """From a Hugging Face config.json."""
        num_heads = config["num_attention_heads"]
        return cls(
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_size=config.get("head_dim") or config["hidden_size"] // num_heads,
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
        )

    @property
    def num_layer_parameters(self) -> int:
        """Matrix elements of all layers: q, k, v, o, gate, up, down."""
        heads = self.head_size * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * self.hidden_size * (heads + 3 * self.intermediate_size)

    @property
    def num_head_parameters(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def num_parameters(self) -> int:
        return self.num_layer_parameters + self.num_head_parameters

    @property
    def kv_elements_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_size

    def attention_flops(self, num_pairs: float) -> float:
        """Floating-point operations of `num_pairs` (query, key) pairs over all layers: scores and values."""
        return 4.0 * self.num_layers * self.num_heads * self.head_size * num_pairs


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes that must be read and operations that must be done."""

    read_bytes: float
    flops: float

    def __add__(self, other: Work) -> Work:
        return Work(self.read_bytes + other.read_bytes, self.flops + other.flops)

    def times(self, count: float) -> Work:
        return Work(self.read_bytes * count, self.flops * count)

    def least_seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        return max(self.read_bytes / bytes_per_s, self.flops / flops_per_s)


@dataclass(frozen=True, slots=True)
class Roofline:
    """`shape` at a precision, on a machine."""

    shape: ModelShape
    weight_bytes_per_element: float
    kv_bytes_per_element: float
    bytes_per_s: float
    flops_per_s: float

    def step(self, num_tokens: float, num_logit_rows: float, num_pairs: float, num_kv_tokens: float) -> Work:
        """One forward pass of `num_tokens`, of which `num_logit_rows` want logits.

        `num_pairs` (query, key) pairs are attended, and the KV of `num_kv_tokens` is read.
        """
        shape = self.shape
        return Work(
            shape.num_parameters * self.weight_bytes_per_element
            + num_kv_tokens * shape.kv_elements_per_token * self.kv_bytes_per_element,
            2.0 * shape.num_layer_parameters * num_tokens
            + 2.0 * shape.num_head_parameters * num_logit_rows
            + shape.attention_flops(num_pairs),
        )

    def decode_step(self, batch: int, context: float) -> Work:
        """One step of `batch` sequences that each have `context` tokens cached."""
        return self.step(batch, batch, batch * context, batch * context)

    def prefill(self, num_tokens: int, cached_tokens: int = 0) -> Work:
        """The prompt's `num_tokens` after `cached_tokens`, and the logits of its last token."""
        pairs = num_tokens * cached_tokens + num_tokens * (num_tokens + 1) / 2
        return self.step(num_tokens, 1, pairs, cached_tokens + num_tokens)

    def least_decode_s(self, batch: int, context: float) -> float:
        return self.decode_step(batch, context).least_seconds(self.bytes_per_s, self.flops_per_s)

    def least_prefill_s(self, num_tokens: int, cached_tokens: int = 0) -> float:
        return self.prefill(num_tokens, cached_tokens).least_seconds(self.bytes_per_s, self.flops_per_s)

    def most_output_tokens_per_s(self, concurrency: int, input_tokens: int, output_tokens: int) -> float:
        """Output tokens per second of a closed loop that always keeps `concurrency` requests decoding.

        Prefill may overlap with decode entirely, so its weights are read for free.
        """
        work = self.closed_loop(concurrency, input_tokens, output_tokens)
        return concurrency * output_tokens / work.least_seconds(self.bytes_per_s, self.flops_per_s)

    def closed_loop(self, concurrency: int, input_tokens: int, output_tokens: int) -> Work:
        """Of one request of each of `concurrency`."""
        context = input_tokens + output_tokens / 2
        decode = self.decode_step(concurrency, context).times(output_tokens - 1)
        return decode + Work(0.0, self.prefill(input_tokens).flops).times(concurrency)

    def is_memory_bound(self, work: Work) -> bool:
        return work.read_bytes / self.bytes_per_s >= work.flops / self.flops_per_s
