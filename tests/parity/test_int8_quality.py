"""Quantized engines stay near the bf16 one on the demo model: the bound that a change must not cross."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.quality.__main__ import VARIANTS, Subject
from bench.quality.measures import Tally
from bench.quality.texts import PROSE
from cluster.engine.model_source import DEMO, resolve_model
from cluster.errors import ModelError
from cluster.tokenizer import Tokenizer

NUM_TOKENS = 256
# Mean KL divergence in nats per token, about a third above what is measured.
BOUNDS = {"int8": 0.025, "int8-weights": 0.007}

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def base() -> Subject:
    try:
        resolve_model(DEMO)
    except ModelError as error:
        pytest.skip(str(error))
    return Subject(VARIANTS[0], DEMO, "cpu", 1, NUM_TOKENS // 64)


@pytest.mark.parametrize("name", BOUNDS)
def test_divergence_from_bf16_is_bounded(name: str, base: Subject) -> None:
    variant = next(variant for variant in VARIANTS if variant.name == name)
    subject = Subject(variant, DEMO, "cpu", 1, NUM_TOKENS // 64)
    tokens = list(Tokenizer.load(base.directory).encode(PROSE.read_text(encoding="utf-8")))[:NUM_TOKENS]
    tally = Tally(name, 0)
    tally.add_window(base.window(tokens), subject.window(tokens), tokens)
    quality = tally.quality()
    assert 0 < quality.kl_mean < BOUNDS[name]
    assert quality.same_argmax > 0.8
