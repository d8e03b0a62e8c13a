"""`use_beam_search` through a real gateway, in front of streams that a table of log-probabilities goes on."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from cluster.clock import MonotonicClock
from cluster.errors import Overloaded, WorkerLost
from cluster.ids import RequestId
from cluster.metrics import new_metrics
from cluster.request import RequestSpec
from cluster.sampling import FinishReason, SamplingParams
from router.beam_run import BeamRun
from router.beam_search import BeamRules, Hypothesis
from router.generation import charge_of
from router.limits import GatewayLimits
from router.output import Piece
from router.reply import Choice, ChoicePlan
from tests.router.test_beam_search import simple_search
from tests.router.test_faults import raw_request, wait_for_streams
from tests.support.byte_tokenizer import EOS
from tests.support.gateway import LIMIT_S, RunningGateway, check_error, running_gateway
from tests.support.scripted_cluster import Script, ScriptedCluster
from tests.support.sse import CHAT, TEXT

LETTERS = (*b"abcdefghijklmnopqrstuvwxyz", EOS)
PROMPT = tuple(b"Hi")


def letters(token_ids: tuple[int, ...]) -> list[tuple[int, float]]:
    """Of what comes after these: a letter, or the end."""
    rng = random.Random(str(token_ids))
    weights = [rng.random() for _ in LETTERS]
    scored = [
        (token, math.log(weight / sum(weights))) for token, weight in zip(LETTERS, weights, strict=True)
    ]
    return sorted(scored, key=lambda item: (-item[1], item[0]))


def expected(width: int, max_tokens: int, prompt: tuple[int, ...] = PROMPT, **fields: Any) -> list[Any]:
    rules = BeamRules(width=width, max_tokens=max_tokens, end_ids=frozenset({EOS}), **fields)
    return simple_search(lambda prefix: letters((*prompt, *prefix)), rules)


@pytest.fixture
def beams(gateway: RunningGateway) -> RunningGateway:
    gateway.cluster.script = Script(model=letters)
    return gateway


@pytest.mark.parametrize("kind", [CHAT, TEXT])
@pytest.mark.parametrize("width", [1, 4])
def test_the_best_answers_best_first(beams: RunningGateway, kind: str, width: int) -> None:
    fields: dict[str, Any] = {"use_beam_search": True, "n": width, "max_tokens": 40, "return_token_ids": True}
    body = (beams.chat if kind == CHAT else beams.complete)(**fields).json()
    prompt_ids = beams.cluster.streams[0].spec.token_ids
    found = expected(width, 40, prompt_ids)
    choices = body["choices"]
    assert [choice["index"] for choice in choices] == list(range(width))
    assert [tuple(choice["token_ids"]) for choice in choices] == [path for path, _, _ in found]
    assert [choice["finish_reason"] for choice in choices] == [reason.value for _, reason, _ in found]
    texts = [choice["message"]["content"] if kind == CHAT else choice["text"] for choice in choices]
    assert texts == [bytes(token for token in path if token != EOS).decode() for path, _, _ in found]
    assert body["usage"] == {
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": sum(len(path) for path, _, _ in found),
        "total_tokens": len(prompt_ids) + sum(len(path) for path, _, _ in found),
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    beams.until_idle()
    assert all(stream.ended.wait(LIMIT_S) for stream in beams.cluster.streams)


def test_forks_start_from_what_a_beam_has(beams: RunningGateway) -> None:
    beams.complete(use_beam_search=True, n=3, max_tokens=12)
    specs = [stream.spec for stream in beams.cluster.streams]
    assert len({spec.request for spec in specs}) == len(specs)
    assert all(spec.token_ids[: len(PROMPT)] == PROMPT for spec in specs)
    assert [len(spec.token_ids) for spec in specs] == sorted(len(spec.token_ids) for spec in specs)
    assert [spec.goes_on for spec in specs] == [False] + [True] * (len(specs) - 1)
    for spec in specs:
        assert spec.is_part
        assert spec.sampling.temperature == 0
        assert spec.sampling.num_logprobs == 6
        assert len(spec.token_ids) + spec.sampling.max_tokens == len(PROMPT) + 12


@pytest.mark.parametrize(
    "fields", [{"length_penalty": 2}, {"length_penalty": -1.5}, {"early_stopping": True}, {"min_tokens": 5}]
)
def test_what_a_search_may_be_told(beams: RunningGateway, fields: dict[str, Any]) -> None:
    body = beams.complete(use_beam_search=True, n=3, max_tokens=9, return_token_ids=True, **fields).json()
    found = expected(3, 9, **fields)
    assert [tuple(choice["token_ids"]) for choice in body["choices"]] == [path for path, _, _ in found]


def test_the_end_may_be_ignored_or_another(beams: RunningGateway) -> None:
    fields = {"use_beam_search": True, "n": 2, "max_tokens": 7, "return_token_ids": True}
    body = beams.complete(ignore_eos=True, **fields).json()
    assert {len(choice["token_ids"]) for choice in body["choices"]} == {7}
    body = beams.complete(stop_token_ids=list(LETTERS[:-1]), ignore_eos=True, **fields).json()
    assert {choice["finish_reason"] for choice in body["choices"]} == {FinishReason.STOP.value}


def test_prompts_echo_and_scores(beams: RunningGateway) -> None:
    fields: dict[str, Any] = {"logprobs": 3, "prompt_logprobs": 1, "echo": True}
    body = beams.complete(prompt=["Hi", "Ho"], use_beam_search=True, n=2, max_tokens=4, **fields).json()
    choices = body["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["text"][:2] for choice in choices] == ["Hi", "Hi", "Ho", "Ho"]
    for choice, (path, _, _) in zip(choices, expected(2, 4) + expected(2, 4, tuple(b"Ho")), strict=True):
        columns = choice["logprobs"]
        assert len(columns["tokens"]) == 2 + len(path)
        prompt = tuple(choice["text"][:2].encode())
        for position, token in enumerate(path):
            best = letters((*prompt, *path[:position]))
            assert columns["token_logprobs"][2 + position] == dict(best)[token]
            shown = columns["top_logprobs"][2 + position]
            assert set(list(shown.values())[:3]) == {logprob for _, logprob in best[:3]}
        assert len(choice["prompt_logprobs"]) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", True),
        ("temperature", 0.7),
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("presence_penalty", 1),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 1}),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [5]),
        ("stop", "x"),
        ("best_of", 3),
        ("n", 17),
        ("length_penalty", 11),
    ],
)
def test_what_has_no_meaning_for_a_search_is_refused_by_name(
    beams: RunningGateway, name: str, value: Any
) -> None:
    check_error(beams.complete(**{"use_beam_search": True, "n": 2, name: value}), 400, param=name)
    assert beams.cluster.streams == []


def test_a_format_is_refused_and_a_neutral_value_is_not(beams: RunningGateway) -> None:
    check_error(beams.complete(use_beam_search=True, regex="a+"), 400, param="use_beam_search")
    neutral = {"temperature": 0, "top_p": 1, "top_k": -1, "best_of": 2, "stop": [], "seed": 5}
    assert beams.complete(use_beam_search=True, n=2, max_tokens=3, **neutral).status_code == 200
    check_error(beams.complete(length_penalty=2), 400, param="length_penalty")


@pytest.mark.parametrize("fork", [1, 3])
def test_a_fork_that_fails_or_is_refused_fails_the_search(beams: RunningGateway, fork: int) -> None:
    for error, status in ((WorkerLost("gone"), 502), (Overloaded("full", retry_after_s=1), 503)):

        def script(spec: RequestSpec, error: Any = error) -> Script:
            if not spec.request.endswith(f"-{fork}"):
                return Script(model=letters)
            if isinstance(error, Overloaded):
                raise error
            return Script(model=letters, fail_after=0, error=error)

        beams.cluster.script = script
        check_error(beams.complete(use_beam_search=True, n=4, max_tokens=30), status)
        assert all(stream.ended.wait(LIMIT_S) for stream in beams.cluster.streams)
        beams.until_idle()
        beams.cluster.streams.clear()


def test_a_search_that_the_server_ends_leaves_nothing(tokenizer_dir: Path) -> None:
    limits = GatewayLimits(request_deadline_s=0.2)
    with running_gateway(tokenizer_dir, limits=limits) as gateway:
        gateway.cluster.script = Script(model=letters, delay_s=0.06)
        check_error(gateway.complete(use_beam_search=True, n=2, max_tokens=200), 504)
        assert all(stream.ended.wait(LIMIT_S) for stream in gateway.cluster.streams)
        gateway.until_idle()


def test_a_client_that_leaves_ends_all_beams(beams: RunningGateway) -> None:
    beams.cluster.script = Script(model=letters, delay_s=0.02)
    fields = {"prompt": "Hi", "use_beam_search": True, "n": 3, "max_tokens": 1000, "ignore_eos": True}
    with raw_request(beams, "/v1/completions", **fields):
        wait_for_streams(beams, 2)
    assert all(stream.ended.wait(LIMIT_S) for stream in beams.cluster.streams)
    assert {stream.aborted for stream in beams.cluster.streams} >= {"client left"}
    beams.cluster.script = Script()
    beams.check_alive()


async def test_a_search_is_charged_for_the_beams_that_were_given_up_too() -> None:
    """As all candidates of `best_of` are; the usage is that of its answers."""
    sampling = SamplingParams(max_tokens=60, temperature=0.0, eos_token_ids=(EOS,), num_logprobs=6)
    spec = RequestSpec(request=RequestId("search"), token_ids=PROMPT, sampling=sampling)
    rules = BeamRules(width=3, max_tokens=60, end_ids=frozenset({EOS}), length_penalty=-1.0)
    intake = ScriptedCluster(Script(model=letters))
    shown: list[Hypothesis] = []

    def show(place: int, hypothesis: Hypothesis, _: object) -> Choice:
        shown.append(hypothesis)
        return Choice(ChoicePlan(place, PROMPT), Piece("", (), hypothesis.reason))

    run = BeamRun(
        intake, spec, rules, show, arrived_s=0.0, clock=MonotonicClock(), metrics=new_metrics("1", "m")
    )
    assert len(await run.collect()) == 3
    run.close()
    num_answered = sum(len(hypothesis.outputs) for hypothesis in shown)
    assert run.usage().num_generated_tokens == num_answered < run.num_computed <= 3 * 60
    assert charge_of([run]) == len(PROMPT) + run.num_computed
