"""Steps by a table of operator latencies: exact at its points, straight between; what bad tables are told."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from bench.simulator.hardware import KINDS, hardware, parse_pool
from bench.simulator.operators import OperatorTimes, read_times
from cluster.errors import ConfigError
from cluster.step_model import StepWork, chunk_attention
from tests.bench.simulator.fleet_commands import RUN, SLO, plan, simulate, write_trace

HEADER = "table,source,a,b,c,latency_ms"
SHAPES = ((6144, 4096), (4096, 4096), (16384, 4096), (4096, 16384), (65536, 4096))


def gemm_ms(m: int, n: int, k: int) -> float:
    """Made up: 3 TB/s or 600 TFLOP/s, whichever is slower."""
    return max(2 * n * k / 3e9, 2 * m * n * k / 6e11)


def decode_ms(rows: int, keys: int) -> float:
    return 0.01 + rows * keys * 1.5e-6


def prefill_ms(batch: int, tokens: int) -> float:
    return 0.01 + batch * chunk_attention(0, tokens) * 3e-8


def table_lines() -> list[str]:
    lines = [HEADER]
    for n, k in SHAPES:
        lines += [
            f"gemm_m_n_k,torch,{m},{n},{k},{gemm_ms(m, n, k)!r}" for m in (1, 128, 200, 256, 1024, 4096)
        ]
    for batch in (1, 8, 64, 256):
        for length in (1, 128, 1024, 4096):
            lines.append(f"decode_attn_B_S,one,{batch},{length},,{decode_ms(batch, length)!r}")
            lines.append(f"prefill_attn_B_P,one,{batch},{length},,{prefill_ms(batch, length)!r}")
    lines += [f"nccl_p2p_bytes,made_up_nvlink,{size},,,{size / 3e8!r}" for size in (1000, 10**6, 10**8)]
    lines += [f"nccl_p2p_bytes,made_up_inter,{size},,,{size / 4e7!r}" for size in (10**6, 10**8)]
    lines += ["nccl_p2p_bytes,made_up_inter,1000,,,1.0"]  # latency, and no rate
    return lines


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write(tmp_path / "made-up.csv", table_lines())


@pytest.fixture
def times(table: Path) -> OperatorTimes:
    return read_times(table, 1e-3)


def gemms_ms(m: int) -> float:
    layer = gemm_ms(m, 6144, 4096) + gemm_ms(m, 4096, 4096)
    layer += 1.75 * gemm_ms(m, 16384, 4096) + 0.875 * gemm_ms(m, 4096, 16384)
    return 32 * layer


def logits_ms(m: int) -> float:
    return 128_256 / 65_536 * gemm_ms(m, 65536, 4096)


def test_points_are_exact(times: OperatorTimes) -> None:
    decode = 1 + gemms_ms(256) + 32 * decode_ms(256, 1024) + logits_ms(256)
    assert times.step_s(256, 256 * 1024, 0, 0.0) == pytest.approx(decode / 1e3, rel=1e-12)
    prompt = 1 + gemms_ms(1024) + 32 * prefill_ms(1, 1024) + logits_ms(1)
    assert times.step_s(0, 0, 1024, chunk_attention(0, 1024)) == pytest.approx(prompt / 1e3, rel=1e-12)
    prompts = 1 + gemms_ms(1024) + 32 * prefill_ms(8, 128) + logits_ms(1)
    assert times.step_s(0, 0, 1024, 8 * chunk_attention(0, 128)) == pytest.approx(prompts / 1e3, rel=1e-12)
    mixed = 1 + gemms_ms(256) + 32 * (decode_ms(128, 1024) + prefill_ms(1, 128)) + logits_ms(129)
    pairs = chunk_attention(0, 128)
    assert times.step_s(128, 128 * 1024, 128, pairs) == pytest.approx(mixed / 1e3, rel=1e-12)


def test_between_and_beyond_points_it_is_straight(times: OperatorTimes) -> None:
    """These latencies are straight in keys and pairs, so every chunk and batch is as made up."""
    start, chunk = 20_000, 4096  # more pairs than the table has
    later = 1 + gemms_ms(chunk) + 32 * (0.01 + chunk_attention(start, chunk) * 3e-8) + logits_ms(1)
    assert times.step_s(0, 0, chunk, chunk_attention(start, chunk)) == pytest.approx(later / 1e3)
    beyond = 1 + gemms_ms(400) + 32 * decode_ms(400, 9_000) + logits_ms(400)
    assert times.step_s(400, 400 * 9_000, 0, 0.0) == pytest.approx(beyond / 1e3)
    assert times.gemms.at(640) == pytest.approx((times.gemms.at(256) + times.gemms.at(1024)) / 2)
    assert times.gemms.at(8192) == pytest.approx(gemms_ms(8192) / 1e3)
    grown = times.step_s(50, 50 * 801, 0, 0.0) - times.step_s(50, 50 * 800, 0, 0.0)
    assert times.growth_s(50, 50 * 800) == pytest.approx(grown)


def test_more_takes_no_less(times: OperatorTimes) -> None:
    for steps in (
        [times.step_s(rows, rows * 500, 0, 0.0) for rows in range(1, 400, 7)],
        [times.step_s(16, 16 * keys, 0, 0.0) for keys in range(1, 9000, 90)],
        [times.step_s(0, 0, chunk, chunk_attention(0, chunk)) for chunk in range(1, 6000, 59)],
        [times.step_s(0, 0, 64, chunk_attention(start, 64)) for start in range(0, 20_000, 190)],
        [times.step_s(0, 0, 512, chunk_attention(0, 512 // count) * count) for count in (64, 16, 4, 2, 1)],
    ):
        assert all(one <= other for one, other in pairwise(steps))


def test_sources_of_one_point_count_with_their_mean(tmp_path: Path) -> None:
    lines = [*table_lines(), f"decode_attn_B_S,other,8,1024,,{decode_ms(8, 1024) + 0.2!r}"]
    decode = read_times(write(tmp_path / "two.csv", lines), 1e-3).decode
    assert decode.at(8, 1024) == pytest.approx(32 * (decode_ms(8, 1024) + 0.1) / 1e3)
    assert decode.at(8, 128) == pytest.approx(32 * decode_ms(8, 128) / 1e3)


def test_beyond_the_last_point_noise_does_not_fall(tmp_path: Path) -> None:
    lines = [*table_lines(), "decode_attn_B_S,one,8,4097,,0.001"]
    decode = read_times(write(tmp_path / "noisy.csv", lines), 1e-3).decode
    assert [decode.at(8, keys) for keys in (4097, 100_000)] == pytest.approx([32 * 1e-6] * 2)


def test_a_pool_has_it_as_a_kind(table: Path) -> None:
    pool = parse_pool(f"{table}:2,h20-llama3-8b:1", None)
    assert [kind.name for kind in pool] == ["made-up", "made-up", "h20-llama3-8b"]
    kind, formula = pool[0], KINDS["h100-llama3-8b"]
    assert kind is pool[1]
    assert (kind.kv_tokens, kind.kv_bytes_per_token) == (formula.kv_tokens, formula.kv_bytes_per_token)
    assert kind.link_bytes_s == pytest.approx(40e9)  # between hosts, at large sizes
    assert kind.times is not None
    assert kind.step_s(8, 8192, 0, 0.0) == kind.times.step_s(8, 8192, 0, 0.0)


def test_links_are_of_any_source_or_the_default(tmp_path: Path) -> None:
    nvlink = [line for line in table_lines() if "inter" not in line]
    assert hardware(str(write(tmp_path / "a.csv", nvlink))).link_bytes_s == pytest.approx(300e9)
    none = [line for line in nvlink if "nccl" not in line]
    assert hardware(str(write(tmp_path / "b.csv", none))).link_bytes_s == KINDS["h100-llama3-8b"].link_bytes_s


def test_policies_plan_with_a_model_of_these_steps(table: Path) -> None:
    kind = hardware(str(table))
    errors = []
    for rows, keys, chunk in (
        (1, 300, 0),
        (32, 900, 0),
        (200, 1500, 0),
        (0, 0, 300),
        (0, 0, 1500),
        (40, 700, 500),
    ):
        context, pairs = rows * keys, chunk_attention(0, chunk)
        planned_s = kind.model.step_s(StepWork(rows + chunk, context, pairs))
        errors.append(abs(planned_s / kind.step_s(rows, context, chunk, pairs) - 1))
    assert median(errors) < 0.05
    assert max(errors) < 0.2


def test_commands_take_it(table: Path) -> None:
    trace = write_trace(table.parent / "trace.jsonl")
    status, said = simulate("--trace", str(trace), "--hardware", f"{table}:2", *SLO, *RUN)
    assert status == 0, said
    status, said = plan("--trace", str(trace), "--hardware", f"{table}:2,h20-llama3-8b:1", *SLO)
    assert status == 0, said
    assert "made-up" in said


BAD = {
    "empty": ([], "the file is empty"),
    "no rows": ([HEADER], "no `gemm_m_n_k` rows"),
    "a column less": (["table,source,a,b,latency_ms"], "line 1: no column c"),
    "no products": ([line for line in table_lines() if "gemm" not in line], "no `gemm_m_n_k` rows"),
    "no prompts": ([line for line in table_lines() if "prefill" not in line], "no `prefill_attn_B_P` rows"),
    "no number": ([HEADER, "gemm_m_n_k,x,1,64,64,fast"], "line 2: latency_ms is 'fast', not a number"),
    "nan": ([HEADER, "gemm_m_n_k,x,1,64,nan,1"], "line 2: c is 'nan', not a whole number"),
    "negative": ([HEADER, "decode_attn_B_S,x,-1,64,,1"], "line 2: a is '-1', not a whole number"),
    "no time": (
        [HEADER, "decode_attn_B_S,x,1,64,,1e-320"],
        "line 2: latency_ms is '1e-320', not a number from 1e-06",
    ),
    "a part of one": ([HEADER, "prefill_attn_B_P,x,1,1.5,,1"], "line 2: b is '1.5', not a whole number"),
    "too large": ([HEADER, "gemm_m_n_k,x,1,1e300,64,1"], "line 2: b is '1e300'"),
    "a short row": ([HEADER, "gemm_m_n_k,x,1,64"], "line 2: c is '', not a whole"),
    "a short row in another order": (["a,b,c,latency_ms,source,table", "1"], "line 2: unknown table ``"),
    "another table": ([HEADER, "gemm_m_k_n,x,1,64,64,1"], "line 2: unknown table `gemm_m_k_n` (did you mean"),
    "one m": (
        [*[x for x in table_lines() if "gemm" not in x], "gemm_m_n_k,x,1,64,64,1"],
        "one point only of 64, 64",
    ),
    "one batch": (
        [line for line in table_lines() if not line.startswith("decode") or ",one,1," in line],
        "`decode_attn_B_S` has one batch size only",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_table_gets_one_sentence(name: str, tmp_path: Path) -> None:
    lines, sentence = BAD[name]
    with pytest.raises(ConfigError) as caught:
        hardware(str(write(tmp_path / "bad.csv", lines)))
    assert sentence in str(caught.value)
    assert "bad.csv: " in str(caught.value)


def test_what_is_no_text_or_not_there_is_told(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00table")
    with pytest.raises(ConfigError, match="not a table of operator latencies"):
        hardware(str(tmp_path / "binary.csv"))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        hardware(str(tmp_path / "gone.csv"))


def test_products_that_cost_nothing_more_are_refused(tmp_path: Path) -> None:
    flat = [line.rsplit(",", 1)[0] + ",0.1" if "gemm" in line else line for line in table_lines()]
    with pytest.raises(ConfigError, match="tokens cost a step nothing"):
        hardware(str(write(tmp_path / "flat.csv", flat)))
