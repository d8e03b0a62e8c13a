"""Grammars in a step: the tokens fit, other rows do not notice, log-probabilities are the model's own."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from cluster.engine.batch import SampleSpec
from cluster.engine.grammar_masks import GrammarMasks
from cluster.engine.sampler import sample
from cluster.engine.token_choice import TokenChooser
from cluster.errors import ModelError
from cluster.grammar import Grammars, choice_grammar, json_grammar, regex_grammar
from cluster.sampling import BROKEN_TOKEN_ID, FinishReason, SamplingParams, TokenOutput, finish_reason
from cluster.tokenizer import Tokenizer
from kernels.cpu.backend import CpuBackend
from kernels.ops import MAXIMA_BLOCK, Backend, StepResult
from kernels.reference import ReferenceBackend
from tests.support.byte_tokenizer import EOS, write_byte_tokenizer

PADDED_VOCAB = 320  # a model's vocabulary has more rows than its tokenizer has tokens
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "size": {"type": "integer", "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


@pytest.fixture(params=["cpu", "reference"])
def choose(request: pytest.FixtureRequest, grammars: Grammars) -> TokenChooser:
    backend: Backend = CpuBackend(1) if request.param == "cpu" else ReferenceBackend()
    return TokenChooser(backend, PADDED_VOCAB, GrammarMasks(lambda: grammars))


def step(logits: np.ndarray, *, with_maxima: bool = True) -> StepResult:
    """As a forward pass hands it over."""
    rows = torch.from_numpy(logits.copy())
    maxima = None
    if with_maxima:
        padding = -rows.shape[1] % MAXIMA_BLOCK
        padded = torch.nn.functional.pad(rows, (0, padding), value=-math.inf)
        maxima = padded.view(len(rows), -1, MAXIMA_BLOCK).amax(dim=2)
    return StepResult(torch.empty(0), rows, rows.argmax(dim=1), maxima)


def test_tensors_of_a_step_may_be_of_inference_mode_where_the_caller_is_not(choose: TokenChooser) -> None:
    spec = SampleSpec(params_of(regex_grammar("b"), temperature=0.0), (1,), [])
    with torch.inference_mode():
        result = step(logits_at(1))
    [output] = choose(result, [spec], [1])
    assert output.token_id == ord("b")


def logits_at(position: int, num_rows: int = 1, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng((seed, position))
    return rng.normal(0, 3, (num_rows, PADDED_VOCAB)).astype(np.float32)


def generate(choose: TokenChooser, params: SamplingParams, head: list[int] | None = None) -> list[int]:
    """All tokens of a request that has `head` already, as a worker would go on with it."""
    output_ids = list(head or ())
    spec = SampleSpec(params, (1, 2, 3), output_ids)
    while finish_reason(params, output_ids) is None:
        position = 3 + len(output_ids)
        [output] = choose(step(logits_at(position)), [spec], [position])
        output_ids.append(output.token_id)
    return output_ids


def params_of(grammar: str, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=200, eos_token_ids=(EOS,), grammar=grammar, **fields)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_answers_fit(choose: TokenChooser, tokenizer: Tokenizer, temperature: float, seed: int) -> None:
    params = params_of(json_grammar(SCHEMA), temperature=temperature, seed=seed)
    ids = generate(choose, params)
    assert ids[-1] == EOS
    value = json.loads(tokenizer.decode(ids))
    assert set(value) == {"name", "size"}


def test_b075_it_goes_on_elsewhere_from_any_token(choose: TokenChooser, grammars: Grammars) -> None:
    """A hand-off, a retry, a preemption: what was generated is all that the next worker knows."""
    params = params_of(json_grammar(SCHEMA), seed=5)
    whole = generate(choose, params)
    for length in range(len(whole)):
        elsewhere = TokenChooser(ReferenceBackend(), PADDED_VOCAB, GrammarMasks(lambda: grammars))
        assert generate(elsewhere, params, whole[:length]) == whole


def test_both_ways_give_the_same(grammars: Grammars) -> None:
    native = TokenChooser(CpuBackend(1), PADDED_VOCAB, GrammarMasks(lambda: grammars))
    plain = TokenChooser(ReferenceBackend(), PADDED_VOCAB, GrammarMasks(lambda: grammars))
    for seed in range(6):
        params = params_of(
            json_grammar(SCHEMA),
            seed=seed,
            temperature=0.7,
            top_k=(0, 5)[seed % 2],
            top_p=(1.0, 0.9)[seed % 2],
            min_tokens=30,
            repetition_penalty=1.3,
            logit_bias=((34, 2.0),),
        )
        assert generate(native, params) == generate(plain, params)


def test_b064_other_rows_do_not_notice(choose: TokenChooser) -> None:
    plain = SampleSpec(SamplingParams(max_tokens=9, seed=1, num_logprobs=3), (1,), ())
    greedy = SampleSpec(SamplingParams(max_tokens=9, temperature=0.0), (1,), ())
    logits = logits_at(9, 3)
    alone = choose(step(logits[[0, 2]]), [plain, greedy], [7, 7])
    for with_maxima in (True, False):
        masked = SampleSpec(params_of(choice_grammar(["yes"])), (1,), [])
        result = step(logits, with_maxima=with_maxima)
        together = choose(result, [plain, masked, greedy], [7, 7, 7])
        assert [together[0], together[2]] == alone
        assert together[1] == TokenOutput(ord("y"))


def test_logprobs_are_of_the_raw_row(choose: TokenChooser) -> None:
    logits = logits_at(3)
    raw = SampleSpec(SamplingParams(max_tokens=9, temperature=0.0, num_logprobs=4), (1,), ())
    [expected] = sample(torch.from_numpy(logits), [raw], [5])
    params = params_of(choice_grammar(["yes", "no"]), temperature=0.0, num_logprobs=4)
    [output] = choose(step(logits), [SampleSpec(params, (1,), [])], [5])
    assert output.token_id in (ord("y"), ord("n"))
    assert output.top_logprobs == expected.top_logprobs
    assert output.logprob is not None
    assert expected.logprob is not None
    assert output.logprob < expected.logprob


def test_bad_numbers_in_a_masked_row(choose: TokenChooser) -> None:
    logits = logits_at(4)
    logits[0, ::2] = np.nan
    logits[0, 1] = np.inf
    spec = SampleSpec(params_of(choice_grammar(["yes", "zap"]), temperature=0.0, num_logprobs=2), (1,), [])
    [output] = choose(step(logits), [spec], [5])
    assert output.token_id == ord("y")  # "z" is even: not a number
    assert output.logprob is not None
    assert math.isfinite(output.logprob)


def test_masks_that_leave_nothing_give_way_to_the_grammar(choose: TokenChooser) -> None:
    """EOS is all that is left of a complete answer, though `min_tokens` is not reached."""
    params = params_of(choice_grammar(["a"]), min_tokens=5, temperature=0.0)
    output_ids = [ord("a")]
    [output] = choose(step(logits_at(1)), [SampleSpec(params, (1,), output_ids)], [4])
    assert output.token_id == EOS


def test_a_grammar_that_gave_up_fails_its_row_alone(choose: TokenChooser) -> None:
    plain = SampleSpec(SamplingParams(max_tokens=9, temperature=0.0), (1,), ())
    broken = SampleSpec(params_of(regex_grammar("([")), (1,), [])
    strayed = SampleSpec(params_of(choice_grammar(["ab"])), (1,), [ord("x")])
    logits = logits_at(2, 3)
    outputs = choose(step(logits), [broken, plain, strayed], [5, 5, 5])
    assert outputs[0] == outputs[2] == TokenOutput(BROKEN_TOKEN_ID)
    assert outputs[1].token_id == int(logits[1].argmax())
    assert finish_reason(broken.params, [1, BROKEN_TOKEN_ID]) is FinishReason.FAILED


def test_without_a_vocabulary(grammars: Grammars) -> None:
    def nothing() -> Grammars:
        raise ModelError("no tokenizer")

    spec = SampleSpec(params_of(choice_grammar(["a"])), (1,), [])
    without = TokenChooser(ReferenceBackend(), PADDED_VOCAB, GrammarMasks(nothing))
    assert without(step(logits_at(1)), [spec], [4]) == [TokenOutput(BROKEN_TOKEN_ID)]
    with pytest.raises(ValueError, match="no vocabulary"):
        TokenChooser(ReferenceBackend(), PADDED_VOCAB)(step(logits_at(1)), [spec], [4])
    plain = SampleSpec(SamplingParams(max_tokens=9, temperature=0.0), (1,), ())
    assert without(step(logits_at(1)), [plain], [4])[0].token_id == int(logits_at(1)[0].argmax())


def test_notes_hold_nothing_of_plain_requests(choose: TokenChooser) -> None:
    plain = SampleSpec(SamplingParams(max_tokens=9), (1,), ())
    choose.prepare([plain])
    choose(step(logits_at(1)), [plain], [4])
    assert plain.notes.opening is None
    assert plain.notes.scores == []
