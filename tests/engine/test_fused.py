"""The backend's own pass over the whole model equals its operations one by one, bit for bit."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from cluster.engine.model_spec import Dtype
from cluster.engine.packed_batch import PackedBatch, Packer, pack
from kernels.cpu.backend import CpuBackend
from kernels.ops import DecoderShape
from kernels.quantization import Quantization
from tests.engine.test_architectures import VARIANTS
from tests.engine.tiny_models import BLOCK_SIZE, Engine, prompts, same_bits

# sizes that no vector, panel or tile divides
ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "odd": (
        "llama",
        {
            "hidden_size": 70,
            "intermediate_size": 101,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "vocab_size": 259,
        },
    ),
    "odd-biases": (
        "llama",
        {
            "hidden_size": 66,
            "intermediate_size": 35,
            "head_dim": 22,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "tiny-vocabulary": ("qwen3", {"vocab_size": 5, "bos_token_id": 1, "eos_token_id": 2}),
}
CASES = VARIANTS | ODD
# threads only change who computes what: a few shapes show it
THREADED = ("llama-biases", "qwen3", "odd", "tiny-vocabulary")
RUNS = [(variant, 1, False) for variant in CASES]
RUNS += [(variant, n, n == 3) for variant in THREADED for n in (2, 3, 5)]  # 5: ranks, see `Model`
RUNS += [(variant, 1, True) for variant in THREADED]
QUANTIZED = [("llama-biases", 1), ("qwen3", 2), ("odd", 1), ("odd", 3), ("tiny-vocabulary", 2)]


def make_batches(engine: Engine, vocab_size: int) -> list[list[Any]]:
    """Prefill; decode; prefill chunks and decode rows of unequal lengths together; few rows; a chunk."""
    texts = [[t % vocab_size for t in prompt] for prompt in prompts(lengths=(1, 5, 17, 40, 150))]
    first = [engine.row(i, prompt, 0) for i, prompt in enumerate(texts)]
    second = [engine.row(i, [i % vocab_size], len(prompt)) for i, prompt in enumerate(texts)]
    third = [engine.row(9, texts[4][:31], 0), *(engine.row(i, [3], len(texts[i]) + 1) for i in (4, 0, 2))]
    few = [engine.row(i, [4], len(texts[i]) + 1 + (i != 1)) for i in (0, 1, 2)]
    fourth = [engine.row(9, texts[4][31:90], 31)]
    last = [engine.row(9, [4], 90), engine.row(1, [3], len(texts[1]) + 2)]
    return [first, second, third, few, few[:1], fourth, last]


@pytest.mark.parametrize("dtype", list(Dtype), ids=lambda dtype: dtype.value)
@pytest.mark.parametrize(("variant", "num_threads", "kv_int8"), RUNS)
def test_fused_equals_the_operations_one_by_one(
    variant: str, dtype: Dtype, num_threads: int, kv_int8: bool, checkpoint: Any, prepare: Any
) -> None:
    assert_fused_equals_one_by_one(variant, dtype, CpuBackend(num_threads), checkpoint, prepare, kv_int8)


@pytest.mark.parametrize("quantization", ["int8", "int8-weights"])
@pytest.mark.parametrize("dtype", list(Dtype), ids=lambda dtype: dtype.value)
@pytest.mark.parametrize(("variant", "num_threads"), QUANTIZED)
def test_fused_equals_the_operations_one_by_one_in_int8(
    variant: str, dtype: Dtype, num_threads: int, quantization: str, checkpoint: Any, prepare: Any
) -> None:
    backend = CpuBackend(num_threads, Quantization(quantization))
    assert_fused_equals_one_by_one(variant, dtype, backend, checkpoint, prepare)


def assert_fused_equals_one_by_one(
    variant: str,
    dtype: Dtype,
    backend: CpuBackend,
    checkpoint: Any,
    prepare: Any,
    kv_int8: bool = False,
) -> None:
    family, overrides = CASES[variant]
    assert backend.is_native, "the C++ kernels did not compile here: see the log"
    prepared = prepare(checkpoint(family, **overrides).directory, dtype, backend)
    fused, oracle = (Engine(prepared, backend, fuse=fuse, kv_int8=kv_int8) for fuse in (True, False))
    vocab_size = prepared.spec.vocab_size
    for ours, theirs in zip(make_batches(fused, vocab_size), make_batches(oracle, vocab_size), strict=True):
        batch, before = pack(ours, BLOCK_SIZE, 512, fused.device), fused.pool.clone()
        with torch.inference_mode():
            actual = fused.decoder.forward(batch, fused.pool)
            expected = oracle.decoder.forward(pack(theirs, BLOCK_SIZE, 512, oracle.device), oracle.pool)
        assert torch.equal(actual.hidden, expected.hidden)
        assert torch.equal(actual.logits, expected.logits)
        assert actual.best.tolist() == expected.logits.argmax(dim=-1).tolist()
        assert same_bits(fused.pool, oracle.pool)
        assert actual.hidden.isfinite().all()
        for asked in (slice(None), slice(1, None, 2), slice(1), slice(0)):
            fused.pool.copy_(before)
            assert_only_asked_rows(fused, batch, asked, expected.logits[asked], oracle.pool)


@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.BF16], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_many_decode_rows_equal_the_operations_one_by_one(
    dtype: Dtype, num_threads: int, checkpoint: Any, prepare: Any
) -> None:
    """So many keys beside so few rows that products ask for them ahead (`kv_ahead.h`)."""
    backend, num_seqs, length = CpuBackend(num_threads), 18, 72
    prepared = prepare(checkpoint("llama").directory, dtype, backend)
    num_blocks = num_seqs * -(-(length + 1) // BLOCK_SIZE)
    engines = [
        Engine(prepared, backend, fuse=fuse, num_blocks=num_blocks, block_seed=1) for fuse in (True, False)
    ]
    results = []
    for engine in engines:
        for tokens, start in (([7] * length, 0), ([9], length)):
            rows = [engine.row(i, [token + i for token in tokens], start) for i in range(num_seqs)]
            with torch.inference_mode():
                result = engine.decoder.forward(pack(rows, BLOCK_SIZE, 512, engine.device), engine.pool)
        results.append(result)
    assert torch.equal(results[0].hidden, results[1].hidden)
    assert torch.equal(results[0].logits, results[1].logits)
    assert same_bits(engines[0].pool, engines[1].pool)


def assert_only_asked_rows(
    engine: Engine, batch: PackedBatch, asked: slice, logits: torch.Tensor, pool: torch.Tensor
) -> None:
    """The step in which fewer rows ask: their logits and all keys and values are the same."""
    fewer = dataclasses.replace(batch, logit_rows=batch.logit_rows[asked])
    with torch.inference_mode():
        result = engine.decoder.forward(fewer, engine.pool, keep_hidden=False)
    assert torch.equal(result.logits, logits)
    assert result.best.tolist() == logits.argmax(dim=-1).tolist()
    assert result.hidden.shape[0] == 0
    assert same_bits(engine.pool, pool)


@pytest.fixture
def engine(checkpoint: Any, prepare: Any) -> Engine:
    backend = CpuBackend(1)
    return Engine(prepare(checkpoint("qwen3").directory, Dtype.FP32, backend), backend)


def test_rows_that_sample_nothing_cost_no_logits(engine: Engine) -> None:
    batch = pack([engine.row(0, [5, 6, 7], 0)], BLOCK_SIZE, 512, engine.device)
    batch.logit_rows = batch.logit_rows[:0]
    with torch.inference_mode():
        result = engine.decoder.forward(batch, engine.pool)
    assert result.logits.shape == (0, 256)
    assert result.best.shape == (0,)
    assert result.hidden.shape == (3, 64)


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("tokens", 1, 256, "token id 1"),
        ("tokens", 0, -1, "token id 0"),
        ("positions", 2, 512, "position 2"),
        ("slot_mapping", 0, 96 * BLOCK_SIZE, "slot 0"),
        ("logit_rows", 0, 3, "logit row 0"),
        ("block_tables", (0, 0), 96, "sequence 0"),
        ("context_lens", 0, 2, "sequence 0"),
    ],
)
def test_an_index_out_of_range_is_refused_before_anything_is_written(
    engine: Engine, field: str, index: Any, value: int, message: str
) -> None:
    batch = pack([engine.row(0, [5, 6, 7], 0)], BLOCK_SIZE, 512, engine.device)
    getattr(batch, field)[index] = value
    before = engine.pool.clone()
    with torch.inference_mode(), pytest.raises(IndexError, match=message):
        engine.decoder.forward(batch, engine.pool)
    assert same_bits(engine.pool, before)


def test_logit_rows_out_of_order_are_refused_where_others_are_left_out(engine: Engine) -> None:
    batch = pack([engine.row(0, [5, 6, 7], 0)], BLOCK_SIZE, 512, engine.device)
    batch.logit_rows = torch.tensor([2, 1])
    with torch.inference_mode(), pytest.raises(IndexError, match="order of logit row 1"):
        engine.decoder.forward(batch, engine.pool, keep_hidden=False)


def test_batches_that_come_again_in_turn_are_computed_with_what_is_in_them_then(engine: Engine) -> None:
    """Batches of several sizes whose memory a packer writes anew, pools in turn, tensors that are copied."""
    pools = [engine.pool.clone(), engine.pool.clone()]
    packer = Packer(BLOCK_SIZE, 512, engine.device)
    results: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for position in range(6):
        for which, pool in enumerate(pools):
            for rows in range(1, 4):
                step = [engine.row(i, [7 * i + position + 3], position) for i in range(rows)]
                batch = packer.pack(step) if which == 0 else pack(step, BLOCK_SIZE, 512, engine.device)
                if which == 1 and rows == 2:
                    batch.tokens = torch.stack([batch.tokens, batch.tokens], dim=1)[:, 0]
                with torch.inference_mode():
                    result = engine.decoder.forward(batch, pool, keep_hidden=rows == 3)
                results[which].append(result.logits.clone())
    assert all(map(torch.equal, results[0], results[1]))
    assert same_bits(pools[0], pools[1])


def test_a_pool_of_another_model_is_refused(engine: Engine) -> None:
    batch = pack([engine.row(0, [5, 6, 7], 0)], BLOCK_SIZE, 512, engine.device)
    with pytest.raises(ValueError, match="does not fit the model"):
        engine.decoder.forward(batch, engine.pool[:, :2].contiguous())


def test_broken_logits_name_the_first_nan(engine: Engine) -> None:
    """A NaN in one sequence's past reaches its own logits and no other row's."""
    engine.prefill(0, [5, 6, 7])
    engine.prefill(1, [5, 6, 7])
    rows = [engine.row(0, [8], 3), engine.row(1, [8], 3)]
    engine.pool[rows[0].block_ids[0], :, 1] = math.nan
    with torch.inference_mode():
        result = engine.decoder.forward(pack(rows, BLOCK_SIZE, 512, engine.device), engine.pool)
    assert result.best[0] == 0
    assert result.logits[0].isnan().all()
    assert result.logits[1].isfinite().all()
    assert result.best[1] == result.logits[1].argmax()


def test_weights_that_do_not_fit_the_shape_are_refused(checkpoint: Any, prepare: Any) -> None:
    """What would let the library read past a weight."""
    backend = CpuBackend(1)
    prepared = prepare(checkpoint("llama").directory, Dtype.FP32, backend)
    decoder = Engine(prepared, backend, fuse=False).decoder
    weights, spec = decoder._weights, prepared.spec
    shape = DecoderShape(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
    )
    cos, sin = decoder._cos, decoder._sin
    assert backend.fuse(shape, weights, cos, sin) is not None
    for wrong in (
        dataclasses.replace(shape, intermediate_size=spec.intermediate_size + 1),
        dataclasses.replace(shape, num_heads=spec.num_heads + 1),
        dataclasses.replace(shape, hidden_size=spec.hidden_size - 1),
    ):
        with pytest.raises(ValueError, match=r"must have shape|packed for these kernels"):
            backend.fuse(wrong, weights, cos, sin)
    with pytest.raises(TypeError, match=r"`final_norm` must be torch\.float32"):
        backend.fuse(shape, dataclasses.replace(weights, final_norm=weights.final_norm.bfloat16()), cos, sin)
    with pytest.raises(ValueError, match="`sin` must have shape"):
        backend.fuse(shape, weights, cos, sin[:-1])
