"""The measures behind `python -m bench.quality`, on numbers that can be worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from bench.quality.__main__ import BASE, GATES, VARIANTS, table, too_dear
from bench.quality.measures import Tally, common_prefix, kl_per_position, log_likelihoods
from bench.quality.texts import PROMPTS, PROSE
from cluster.config import QuantizationName


def test_divergence_of_two_coins() -> None:
    base = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.9, 0.1]]).log()
    other = torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.9, 0.1]]).log()
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert kl_per_position(base, other).tolist() == pytest.approx([0.0, expected, 0.0], abs=1e-6)
    shifted = other + torch.tensor([[3.0], [-7.0], [100.0]])  # logits are known up to a constant
    assert kl_per_position(base, shifted).tolist() == pytest.approx([0.0, expected, 0.0], abs=1e-5)


def test_divergence_is_the_same_however_rows_are_cut() -> None:
    generator = torch.Generator().manual_seed(1)
    base, other = torch.randn(2, 150, 7, generator=generator)
    whole = kl_per_position(base, other)
    assert (whole > 0).all()
    assert torch.equal(
        whole, torch.cat([kl_per_position(b[None], o[None]) for b, o in zip(base, other, strict=True)])
    )


def test_likelihood_of_the_next_token() -> None:
    logits = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log()
    assert log_likelihoods(logits, [1, 0]).tolist() == pytest.approx([math.log(0.75), math.log(0.5)])


@pytest.mark.parametrize(
    ("first", "second", "length"),
    [([], [], 0), ([1], [2], 0), ([1, 2, 3], [1, 2, 4], 2), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2], 2)],
)
def test_common_prefix(first: list[int], second: list[int], length: int) -> None:
    assert common_prefix(first, second) == length


def test_a_tally_sums_up_windows_and_answers() -> None:
    base = torch.tensor([[0.75, 0.25], [0.75, 0.25], [0.25, 0.75]]).log()
    other = torch.tensor([[0.75, 0.25], [0.25, 0.75], [0.25, 0.75]]).log()
    tally = Tally("coin", 2_000_000)
    tally.add_window(base, other, [0, 0, 1])
    tally.add_window(base, base, [0, 0, 1])
    tally.add_answer([1, 2, 3], [1, 2, 4])
    tally.add_answer([1, 2, 3], [1, 2, 3])
    quality = tally.quality()
    one = 0.5 * math.log(3)
    assert (quality.name, quality.weight_megabytes) == ("coin", 2.0)
    assert quality.kl_mean == pytest.approx(one / 6, abs=1e-6)
    assert quality.kl_max == pytest.approx(one, abs=1e-6)
    assert quality.same_argmax == pytest.approx(5 / 6, abs=1e-4)
    assert quality.mean_common_prefix == 2.5
    # next tokens 0, 1 after rows of either window: (.75, .75), then (.75, .25)
    expected = math.exp(-(3 * math.log(0.75) + math.log(0.25)) / 4)
    assert quality.perplexity == pytest.approx(expected, abs=1e-4)


def test_every_quantization_is_measured_against_bf16() -> None:
    assert VARIANTS[0].name == BASE
    assert {variant.quantization for variant in VARIANTS} == set(get_args(QuantizationName))


def test_the_text_is_long_enough_to_say_something() -> None:
    assert len(PROSE.read_text(encoding="utf-8").split()) > 1000
    assert len(set(PROMPTS)) == len(PROMPTS) == 20


def test_the_table_has_a_line_for_each_variant() -> None:
    quality: dict[str, Any] = {
        "name": "int8",
        "weight_megabytes": 136.0,
        "perplexity": 12.5,
        "kl_mean": 0.01,
        "kl_p99": 0.1,
        "kl_max": 0.2,
        "same_argmax": 0.9,
        "mean_common_prefix": 12.0,
    }
    text = table(
        {
            "model": "demo",
            "backend": "cpu",
            "text_tokens": 9,
            "window": 3,
            "prompts": 2,
            "answer_tokens": 4,
            "base": "bf16",
            "variants": [quality, quality | {"name": "fp32"}],
        }
    )
    assert [line.split()[0] for line in text.splitlines()[-2:]] == ["int8", "fp32"]
    assert "90.0%" in text


def test_results_are_committed_beside_the_other_benchmarks() -> None:
    results = Path(__file__).parents[2] / "bench" / "results"
    assert sorted(path.suffix for path in results.glob("quality-*")) == [".json", ".txt"]


def test_the_gates_hold_for_what_is_committed_and_close_on_what_costs_more() -> None:
    committed = Path(__file__).parents[2] / "bench" / "results" / "quality-x86_64.json"
    result = json.loads(committed.read_text())
    assert too_dear(result) == []
    assert set(GATES) == {v.name for v in VARIANTS if v.quantization != "none" or v.kv_int8} - {
        "int8, head bf16"  # no format that is served
    }
    for variant in result["variants"]:
        if variant["name"] in GATES:
            for key, factor in (("kl_mean", 2), ("perplexity", 1.1), ("kl_mean", math.nan)):
                worse = [
                    one | {key: one[key] * factor} if one is variant else one for one in result["variants"]
                ]
                [complaint] = too_dear(result | {"variants": worse})
                assert complaint.startswith(f"{variant['name']}: ")
