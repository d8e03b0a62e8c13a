"""Tokens chosen without the host are those of the definition, bit for bit, whatever kind the batch has."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from cluster.engine.sampler import sample
from kernels.draw_kind import DrawKind, draw_kind
from tests.engine.test_token_choice import make_rows, spec
from tests.kernels.triton_support import DEVICE, require

backend_module = require("kernels.triton.backend")
TWO_PARTS = 530  # of a row
SMALL = 90
RULES: list[dict[str, Any]] = [
    {"temperature": 0.0, "top_k": 3},
    {"temperature": 1e39, "seed": -1},
    {"temperature": 0.7, "min_p": 0.1, "seed": 2**63 + 5},
    {"temperature": 0.8, "top_k": 5, "seed": 3},
    {"top_p": 0.6, "seed": 4},
    {"top_k": 40, "top_p": 0.0, "min_p": 2.0},
]


def chosen(sampler: Any, logits: torch.Tensor, positions: list[int], kind: DrawKind) -> tuple[Any, Any]:
    logits = logits.to(DEVICE)
    found = torch.full((2, len(positions)), -7, device=DEVICE)
    best = logits.argmax(dim=1)
    sampler.choose(logits, best, torch.tensor(positions, device=DEVICE), kind, found)
    ids, unusual = found.tolist()
    return ids, unusual


def make(max_rows: int, vocab_size: int) -> Any:
    return backend_module.TritonBackend().make_device_sampler(max_rows, vocab_size)


@pytest.mark.parametrize(
    ("rows", "vocab_size"),
    [([0], SMALL), ([1, 2, 0], SMALL), ([3, 0, 4, 5], TWO_PARTS)],
    ids=["greedy", "draw", "narrow"],
)
def test_equal_to_the_definition_beside_rows_without_a_request(rows: list[int], vocab_size: int) -> None:
    specs = [spec(**RULES[row]) for row in rows]
    positions = [9, 2**31, 2**33 + 1, 0][: len(rows)]
    logits = torch.from_numpy(make_rows("normal", len(rows) + 1, vocab_size, seed=len(rows)))
    expected = [output.token_id for output in sample(logits[: len(rows)], specs, positions)]
    kind = draw_kind(one.params for one in specs)
    assert kind.value == [1, 3, 4].index(len(rows))
    sampler = make(8, vocab_size)
    sampler.set_rules([one.params for one in specs])
    for used in DrawKind:
        if used >= kind:  # a wider kind finds the same
            ids, unusual = chosen(sampler, logits, [*positions, 0], used)
            assert ids[:-1] == expected
            assert ids[-1] == int(logits[-1].argmax())
            assert not any(unusual)


def test_rules_that_change_are_those_of_the_next_step() -> None:
    logits = torch.from_numpy(make_rows("normal", 2, SMALL, seed=8))
    sampler = make(4, SMALL)
    for first, second in ((3, 4), (4, 0), (2, 0)):
        specs = [spec(**RULES[first]), spec(**RULES[second])]
        sampler.set_rules([one.params for one in specs])
        ids, _ = chosen(sampler, logits, [4, 5], draw_kind(one.params for one in specs))
        assert ids == [output.token_id for output in sample(logits, specs, [4, 5])]
    with pytest.raises(ValueError, match="5 rules, of at most 4"):
        sampler.set_rules([spec().params] * 5)


@pytest.mark.parametrize("kind", list(DrawKind))
def test_rows_with_bad_numbers_are_flagged_and_their_ids_are_tokens(kind: DrawKind) -> None:
    logits = torch.from_numpy(make_rows("normal", 4, 40, seed=1))
    logits[0, 3], logits[1], logits[2, 9] = math.nan, -math.inf, math.inf
    sampler = make(4, 40)
    sampler.set_rules([spec(**RULES[4]).params] * 4)
    ids, unusual = chosen(sampler, logits, [1, 2, 3, 4], kind)
    assert unusual == [1, 1, 1, 0]
    assert ids[:3] == [0, 0, 0]
    assert 0 <= ids[3] < 40


def test_a_vocabulary_that_is_too_large_is_for_the_host() -> None:
    assert make(1, (1 << 19) + 1) is None
    assert make(1, 1 << 19) is not None


def test_kinds() -> None:
    def kind(*rules: dict[str, Any]) -> DrawKind:
        return draw_kind(spec(**rule).params for rule in rules)

    assert kind() is DrawKind.GREEDY
    assert kind({"temperature": 0.0, "top_k": 4, "top_p": 0.5}) is DrawKind.GREEDY  # nothing to choose from
    assert kind({"temperature": 0.0}, {"min_p": 0.4}) is DrawKind.DRAW
    assert kind({}, {"top_k": 4}, {"temperature": 0.0}) is DrawKind.NARROW
    assert kind({"top_p": np.nextafter(1.0, 0.0)}) is DrawKind.NARROW
