"""A token's hidden state, KV and logits depend on its own sequence alone, bit for bit, in every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.engine.model_spec import Dtype
from tests.engine.backends import BACKENDS, QUANTIZED
from tests.engine.tiny_models import Engine, prompts

CHUNKS = (1, 7, 16, 64)
PROMPT = prompts(seed=3, lengths=(150,))[0]
CASES = [(name, dtype, False) for name in BACKENDS for dtype in Dtype]
CASES += [(name, Dtype.BF16, True) for name in BACKENDS]
CASES += [(name, Dtype.BF16, kv_int8) for name in QUANTIZED for kv_int8 in (False, True)]


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1].value}{'-kv-int8' * case[2]}")
def engine(request: Any, checkpoint: Any, prepare: Any) -> Any:
    """Makes engines over one model; each has a pool of its own."""
    name, dtype, kv_int8 = request.param
    backend = (BACKENDS | QUANTIZED)[name]()
    prepared = prepare(checkpoint("qwen3").directory, dtype, backend)
    return lambda **options: Engine(prepared, backend, kv_int8=kv_int8, **options)


def test_chunk_size_does_not_change_bits(engine: Any) -> None:
    whole = engine()
    expected = whole.prefill(0, PROMPT)
    for chunk in CHUNKS:
        chunked = engine()
        hidden = chunked.prefill(0, PROMPT, chunk)
        assert_same_bits(hidden, expected)
        assert_same_bits(chunked.kv(0, len(PROMPT)), whole.kv(0, len(PROMPT)))
        assert_same_bits(chunked.logits(hidden[-3:]), whole.logits(expected)[-3:])


def test_block_numbers_do_not_change_bits(engine: Any) -> None:
    ordered, permuted = engine(), engine(block_seed=5)
    assert_same_bits(permuted.prefill(0, PROMPT), ordered.prefill(0, PROMPT))
    assert_same_bits(permuted.kv(0, len(PROMPT)), ordered.kv(0, len(PROMPT)))


def test_b065_companions_do_not_change_bits(engine: Any) -> None:
    """Prefill and decode alone, and beside others of other lengths, some decoding, some prefilling."""
    alone = engine()
    expected = [alone.prefill(0, PROMPT)]
    for step in range(4):
        expected += alone.hidden([alone.row(0, [step + 7], len(PROMPT) + step)])
    for num_others in (1, 3, 7, 31):
        together = engine(num_blocks=256, block_seed=num_others)
        others = prompts(seed=num_others, lengths=[1 + 9 * i % 70 for i in range(num_others)])
        for sequence, prompt in enumerate(others[: num_others // 2], start=1):
            together.prefill(sequence, prompt)
        rows = [
            together.row(i, [3], len(prompt)) if i <= num_others // 2 else together.row(i, prompt, 0)
            for i, prompt in enumerate(others, start=1)
        ]
        place = num_others // 2
        hidden = together.hidden([*rows[:place], together.row(0, PROMPT, 0), *rows[place:]])
        assert_same_bits(hidden[place], expected[0])
        for step in range(4):
            own = together.row(0, [step + 7], len(PROMPT) + step)
            companions = [
                together.row(i, [step], len(prompt) + 1 + step) for i, prompt in enumerate(others, start=1)
            ]
            rows = [*companions[:place], own, *companions[place:]]
            hidden = together.hidden(rows)
            assert_same_bits(hidden[place], expected[1 + step])
            assert_same_bits(
                together.logits(torch.cat([h[-1:] for h in hidden]))[place], together.logits(hidden[place])[0]
            )


def test_decode_steps_and_prefill_give_the_same_bits(engine: Any) -> None:
    """What preemption by recompute and failover rest on."""
    stepped, recomputed = engine(), engine()
    head, tail = PROMPT[:130], PROMPT[130:]
    parts = [stepped.prefill(0, head)]
    for offset, token in enumerate(tail):
        parts += stepped.hidden([stepped.row(0, [token], len(head) + offset)])
    assert_same_bits(recomputed.prefill(0, PROMPT), torch.cat(parts))
    assert_same_bits(recomputed.kv(0, len(PROMPT)), stepped.kv(0, len(PROMPT)))


def test_b055_prefix_computed_by_another_request_gives_the_same_bits(engine: Any) -> None:
    """The prefix's blocks were filled by a sequence that was chunked otherwise and went on otherwise."""
    cold, warm = engine(), engine()
    expected = cold.prefill(0, PROMPT)
    warm.prefill(0, PROMPT[:64] + [5] * 30, chunk=33)
    shared = warm.row(0, [], 64).block_ids[:4]
    warm.adopt(1, shared)
    assert_same_bits(warm.hidden([warm.row(1, PROMPT[64:], 64)])[0], expected[64:])
