"""The limits that the engine benchmark states its results against."""

from __future__ import annotations

import pytest

from bench.engine import Case, Rates, against_limit, make_plan, roofline, work
from cluster.engine.model_spec import Dtype, ModelSpec
from cluster.sampling import SamplingParams
from kernels.cpu.probe import MachineProbe

SPEC = ModelSpec.from_hf_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
    "test",
)
MATRICES = 106_168_320  # of the layers, without norms
VOCABULARY = 49152 * 576
LINE = roofline(SPEC, Dtype.BF16, Rates(1e9, 1e9))


def test_keys_seen_are_causal() -> None:
    assert Case("", 1, 4, 4).keys_seen() == 1 + 2 + 3 + 4
    assert Case("", 2, 3, 10).keys_seen() == 2 * (8 + 9 + 10)
    assert Case("", 5, 1, 7).keys_seen() == 35


def test_a_decode_step_reads_weights_once_and_every_key_and_value() -> None:
    needed = work(Case("", 8, 1, 1000), LINE)
    assert needed.read_bytes == 2 * (MATRICES + VOCABULARY) + 8 * 1000 * 23_040
    assert needed.flops / 2 == 8 * (MATRICES + VOCABULARY + 34_560 * 1000)


def test_a_chunk_pays_the_vocabulary_once() -> None:
    needed = work(Case("", 1, 512, 512), LINE)
    assert needed.flops / 2 == 512 * MATRICES + VOCABULARY + 34_560 * 512 * 513 // 2


def test_the_longer_of_the_two_limits_counts() -> None:
    case, slow_memory, slow_cores = Case("", 1, 1, 256), Rates(1e9, 1e15), Rates(1e15, 1e9)
    memory = against_limit(case, 1.0, 1.0, SPEC, Dtype.BF16, slow_memory)
    assert (memory.bound, memory.share_of_limit) == ("memory", pytest.approx(0.275, abs=0.001))
    compute = against_limit(case, 1.0, 1.0, SPEC, Dtype.BF16, slow_cores)
    assert (compute.bound, compute.share_of_limit) == ("compute", pytest.approx(0.143, abs=0.001))


def test_a_plan_covers_its_context_and_stays_in_the_pool() -> None:
    plan = make_plan(Case("", 3, 5, 130), 7, SamplingParams(max_tokens=1))
    assert [row.start + len(row.token_ids) for row in plan.rows] == [130] * 3
    assert all(len(row.block_ids) == 3 and max(row.block_ids) < 7 for row in plan.rows)


def test_the_probe_measures_something() -> None:
    bytes_per_s, multiply_adds_per_s = MachineProbe(1).measure()
    assert bytes_per_s > 1e7
    assert multiply_adds_per_s > 1e7
