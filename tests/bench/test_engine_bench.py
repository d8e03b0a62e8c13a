"""The limits that the engine benchmark states its results against, its cases and its profile."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import gguf
import pytest
import torch

from bench import engine
from bench.engine import PROBES, Engine, against_limit, fastest, measure, measured_rates, table
from bench.engine_cases import (
    BLOCK_SIZE,
    STEPS_ON,
    Case,
    Decoding,
    Formats,
    Rates,
    decode,
    grid,
    make_plan,
    roofline,
    work,
)
from bench.engine_profile import matrix_elements, mean_bytes, profile_case, profile_table
from bench.weight_reads import Reads, uniform, weight_reads
from cluster.engine.batch import StepOutput, StepPlan
from cluster.engine.following import FollowingRows
from cluster.engine.model_spec import Dtype, ModelSpec
from cluster.engine.prepare import prepare_model
from cluster.sampling import SamplingParams, TokenOutput
from kernels.cpu import backend as cpu_backend
from kernels.cpu.backend import CpuBackend
from kernels.cpu.native_forward import STAGES
from kernels.cpu.probe import MachineProbe
from kernels.quantization import Quantization
from tests.engine.test_gguf import write_gguf
from tests.engine.tiny_models import make_checkpoint
from tests.support.isa_emulation import emulated_library
from tests.support.tiny_model import write_tiny_model

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
BF16 = Formats(Dtype.BF16)
LINE = roofline(SPEC, BF16, Rates(1e9, 1e9), 2.0)
IN_16_BITS = uniform(2.0)


def test_keys_seen_are_causal() -> None:
    assert Case("", 1, 4, 4).keys_seen() == 1 + 2 + 3 + 4
    assert Case("", 2, 3, 10).keys_seen() == 2 * (8 + 9 + 10)
    assert Case("", 5, 1, 7).keys_seen() == 35


def test_a_decode_step_reads_weights_once_and_every_key_and_value() -> None:
    needed = work(decode(8, 1000), LINE)
    assert needed.read_bytes == 2 * (MATRICES + VOCABULARY) + 8 * 1000 * 23_040
    assert needed.flops / 2 == 8 * (MATRICES + VOCABULARY + 34_560 * 1000)


def test_formats_decide_bytes_not_operations() -> None:
    int8 = Formats(Dtype.BF16, Quantization.INT8, kv_int8=True)
    needed = work(decode(8, 1000), roofline(SPEC, int8, Rates(1e9, 1e9), int8.weight_bytes))
    rows = 8 * 1000 * 2 * 30 * 3  # of keys and values: 64 elements and a scale each
    assert needed.read_bytes == MATRICES + VOCABULARY + rows * (64 + 4)
    assert needed.flops == work(decode(8, 1000), LINE).flops


def test_a_chunk_pays_the_vocabulary_once() -> None:
    needed = work(Case("", 1, 512, 512), LINE)
    assert needed.flops / 2 == 512 * MATRICES + VOCABULARY + 34_560 * 512 * 513 // 2


def test_the_longer_of_the_two_limits_counts() -> None:
    case, slow_memory, slow_cores = decode(1, 256), Rates(1e9, 1e15), Rates(1e15, 1e9)
    memory = against_limit(case, 1.0, 1.0, SPEC, BF16, slow_memory, IN_16_BITS)
    assert (memory.bound, memory.share_of_limit) == ("memory", pytest.approx(0.275, abs=0.001))
    compute = against_limit(case, 1.0, 1.0, SPEC, BF16, slow_cores, IN_16_BITS)
    assert (compute.bound, compute.share_of_limit) == ("compute", pytest.approx(0.143, abs=0.001))


def test_a_step_is_held_against_what_the_machine_gave_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before or after: memory's rate changes by half within seconds."""
    rates = iter(Rates(100.0 + index % 2, 50.0 - index) for index in range(PROBES + 9))
    order: list[str] = []

    def probe() -> Rates:
        order.append("probe")
        return next(rates)

    now_s = itertools.count()  # each look at the clock, a millisecond later
    clock = SimpleNamespace(perf_counter=lambda: 1e-3 * next(now_s), process_time=lambda: 0.0)
    monkeypatch.setattr(engine, "time", clock)
    _, _, best = fastest(lambda: order.append("run"), probe, budget_s=0.02)
    assert best == Rates(101.0, 50.0)
    assert order[:2] == ["run", "probe"]
    probes = [index for index, what in enumerate(order) if what == "probe"]
    assert len(probes) == PROBES + 1
    assert all(later - earlier > 1 for earlier, later in itertools.pairwise(probes))


def test_prompts_are_held_against_products_where_a_unit_multiplies() -> None:
    chunk, rates = Case("", 1, 512, 512), Rates(1e15, 2e12, 1e12)
    measured = against_limit(chunk, 0.1, 0.1, SPEC, BF16, rates, IN_16_BITS)
    per_s = measured.giga_multiply_adds * 1e9 / 0.1
    assert measured.share_of_gemm == pytest.approx(per_s / 1e12, abs=0.001)
    assert measured.share_of_limit == pytest.approx(per_s / 2e12, abs=0.001)
    assert against_limit(decode(8, 256), 0.1, 0.1, SPEC, BF16, rates, IN_16_BITS).share_of_gemm == 0
    assert against_limit(chunk, 0.1, 0.1, SPEC, BF16, Rates(1e9, 1e9), IN_16_BITS).share_of_gemm == 0


@pytest.mark.parametrize(
    ("formats", "is_bf16"),
    [
        (BF16, True),
        (Formats(Dtype.BF16, Quantization.INT8), False),
        (Formats(Dtype.BF16, Quantization.INT8_WEIGHTS), None),
        (Formats(Dtype.FP32), None),
        (Formats(Dtype.FP32, Quantization.INT8), False),
    ],
)
def test_a_unit_is_the_limit_of_what_it_multiplies(formats: Formats, is_bf16: bool | None) -> None:
    assert formats.unit_is_bf16 is is_bf16
    probe = SimpleNamespace(
        has_unit=True,
        measure=lambda: (1.0, 2.0),
        tile_multiply_adds_per_s=lambda is_bf16: 30.0 if is_bf16 else 60.0,
        gemm_multiply_adds_per_s=lambda: 20.0,
    )
    unit = {True: Rates(1.0, 30.0, 20.0), False: Rates(1.0, 60.0, 20.0), None: Rates(1.0, 2.0)}
    assert measured_rates(cast(MachineProbe, probe), formats) == unit[is_bf16]
    probe.has_unit = False
    assert measured_rates(cast(MachineProbe, probe), formats) == Rates(1.0, 2.0)


def test_the_grid_covers_batches_and_contexts() -> None:
    cases = grid(8192, quick=False)
    decodes = {(case.num_seqs, case.context) for case in cases if case.num_queries == 1}
    assert decodes >= set(itertools.product((1, 64), (128, 4096)))
    chunks = {case.context: case.num_queries for case in cases if case.num_queries > 1}
    assert chunks == {128: 128, 256: 256, 512: 512, 1024: 512, 2048: 512, 4096: 512, 8192: 512}
    assert len(grid(8192, quick=True)) < len(cases) / 4
    assert all(case.context <= 300 for case in grid(300, quick=False))
    assert len({case.name for case in cases}) == len(cases)


def test_a_plan_covers_its_context_and_stays_in_the_pool() -> None:
    plan = make_plan(Case("", 3, 5, 130), 7, 100, SamplingParams(max_tokens=1))
    assert [row.start + len(row.token_ids) for row in plan.rows] == [130] * 3
    assert all(0 <= token < 100 for row in plan.rows for token in row.token_ids)
    assert all(len(row.block_ids) == 3 and max(row.block_ids) < 7 for row in plan.rows)


class EachRowGoesOn:
    """Of every row token 7; keeps the plans."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan, await_history: Callable[[], object] | None = None) -> StepOutput:
        self.plans.append(plan)
        return StepOutput([TokenOutput(7)] * len(plan.rows), 0.0)


@pytest.mark.parametrize(("max_len", "num_steps"), [(8192, STEPS_ON), (130, 1), (132, 3)])
def test_decode_steps_go_on_from_their_context(max_len: int, num_steps: int) -> None:
    runner = EachRowGoesOn()
    step = Decoding(runner, decode(3, 130), 40, 100, max_len)
    for _ in range(2 * num_steps + 1):
        step()
    ends = [[row.start + len(row.token_ids) for row in plan.rows] for plan in runner.plans]
    assert ends == [[130 + i % num_steps] * 3 for i in range(2 * num_steps + 1)]
    went_on = [isinstance(plan.rows, FollowingRows) for plan in runner.plans]
    assert went_on == [i % num_steps > 0 for i in range(2 * num_steps + 1)]
    covered = min(len(row.block_ids) for row in runner.plans[0].rows) * BLOCK_SIZE
    assert covered >= max(map(max, ends))


def test_the_probe_measures_something() -> None:
    probe = MachineProbe(1)
    bytes_per_s, multiply_adds_per_s = probe.measure()
    assert bytes_per_s > 1e7
    assert multiply_adds_per_s > 1e7
    assert probe.fp32_multiply_adds_per_s() > 1e7
    assert probe.byte_multiply_adds_per_s() > 1e7
    for is_bf16 in (True, False):
        assert (probe.tile_multiply_adds_per_s(is_bf16) > 1e7) is probe.has_unit


def test_matrices_of_all_stages_are_the_models() -> None:
    elements = matrix_elements(SPEC)
    assert elements.keys() <= set(STAGES)
    assert sum(elements.values()) == MATRICES + VOCABULARY


def test_steps_of_few_rows_read_codes() -> None:
    reads = dict.fromkeys(matrix_elements(SPEC), Reads(0.625, 8, 2.0)) | {"logits": Reads(1.0, 8, 2.0)}
    assert mean_bytes(decode(8, 1), SPEC, reads) == pytest.approx(
        (0.625 * MATRICES + VOCABULARY) / (MATRICES + VOCABULARY)
    )
    assert mean_bytes(decode(9, 1), SPEC, reads) == 2
    prefill = Case("", 1, 512, 512)  # of which one row asks for logits
    assert mean_bytes(prefill, SPEC, reads) == pytest.approx(
        (2 * MATRICES + VOCABULARY) / (MATRICES + VOCABULARY)
    )


@pytest.mark.timeout(600)  # compiles the emulated library, if no test did
@pytest.mark.parametrize(
    ("isa", "form", "few", "many"),
    [
        ("avx512-bf16", "expand", 2.0, 2.0),
        ("avx512-bf16", "small", 0.625, 0.625),
        ("avx512-bf16", "auto", 0.625, 2.0),
        ("amx", "auto", 0.625, 2.0),
    ],
)
def test_what_products_read_is_found_in_the_weight_cache(
    isa: str, form: str, few: float, many: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CPU_ISA", isa)
    monkeypatch.setenv("BATON_GGUF_WEIGHTS", form)
    monkeypatch.setattr(cpu_backend, "load_library", emulated_library)
    made = make_checkpoint(tmp_path / "checkpoint", "llama", tie_word_embeddings=True)
    path = write_gguf(tmp_path / "tiny.gguf", made, "llama", gguf.GGMLQuantizationType.Q4_0)
    prepared = prepare_model(path, Dtype.BF16, CpuBackend(1), cache_dir=tmp_path / "cache")
    reads = weight_reads(prepared.directory, 2.0)
    for read in reads.values():
        assert (read.of(1), read.of(129)) == (few, many)


def test_a_profile_says_work_waits_and_rates() -> None:
    seconds = torch.zeros(2, len(STAGES), 2, dtype=torch.float64)
    seconds[0, STAGES.index("qkv")] = torch.tensor([0.002, 0.0])
    seconds[1, STAGES.index("qkv")] = torch.tensor([0.001, 0.001])
    seconds[:, STAGES.index("attention"), 0] = 0.004
    text = profile_table(decode(4, 8), 0.010, seconds, {"qkv": 3_000_000}, IN_16_BITS)
    rows = {line[:24].strip(): line[24:].split() for line in text.splitlines()}
    assert rows["qkv"] == ["1.50", "0.50", "20.0%", "4.0", "8.0"]
    assert rows["attention"] == ["4.00", "0.00", "40.0%"]
    assert rows["all stages"] == ["5.50", "0.50"]
    assert rows["packing, sampling, rest"] == ["4.00", "40.0%"]


@pytest.mark.parametrize("formats", [BF16, Formats(Dtype.BF16, Quantization.INT8, kv_int8=True)])
def test_a_small_model_is_measured_and_profiled(
    formats: Formats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "measured_rates", functools.cache(measured_rates))  # a second each
    model = str(write_tiny_model(tmp_path / "model"))
    loaded = Engine.load(model, formats, 2, pool_bytes=0, cache_dir=tmp_path / "cache")
    cases = [decode(3, 64), Case("prefill", 1, 16, 16)]
    result = measure(loaded, cases, budget_s=0.0)
    assert [step["name"] for step in result["steps"]] == ["decode 3 x 64", "prefill"]
    assert all(step["step_ms"] > 0 for step in result["steps"])
    assert len(table(result).splitlines()) == 4
    text = profile_case(loaded.runner, loaded.spec, loaded.reads, cases[0], loaded.step(cases[0]), 0.0)
    assert {line[:24].strip() for line in text.splitlines()} >= set(STAGES)
