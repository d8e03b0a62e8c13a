"""Field faults of prefill/decode disaggregation, one test per case, on live processes: what a user would see
at the seam between the two workers. Faults that need exact moments are tested at the cores: the table in
`tests/README.md` says where."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from tests.faults.asking import alone, asked, body, essence, fresh, prompt, streamed
from tests.faults.conftest import BLOCK
from tests.support.byte_tokenizer import EOS
from tests.support.local_cluster import LocalCluster
from tests.support.sse import TEXT, check_stream
from tests.support.tools import ADD

pytestmark = [pytest.mark.timeout(240)]


def both_ways(oracle: LocalCluster, pair: LocalCluster, request: dict[str, Any]) -> tuple[Any, ...]:
    """Equal to the oracle, whole and streamed; returns it."""
    expected = alone(oracle, request)
    assert asked(pair, request | fresh()) == expected
    assert streamed(pair, request | fresh()) == expected
    return expected


def test_b070_end_of_text_as_the_first_token(oracle: LocalCluster, pair: LocalCluster) -> None:
    """The prompt's very first continuation is the end: the decode worker must not go on from it."""
    request = body(30, 20, ignore_eos=False, logit_bias={str(EOS): 100})
    pair.wait_heard("decode-0")
    steps = pair.worker("decode-0")["steps"]
    [(_, text, reason, _)], _, num_completion = both_ways(oracle, pair, request)
    assert (text, reason, num_completion) == ("", "stop", 1)
    pair.wait_heard("decode-0")
    assert pair.worker("decode-0")["steps"] == steps, "the decode worker computed something"


def test_b072_stop_conditions_met_by_the_first_token(oracle: LocalCluster, pair: LocalCluster) -> None:
    """The first token is a stop token, a whole stop string, the head of one that the decode worker completes,
    or an end that may not count yet."""
    letters = {"allowed_token_ids": [*range(97, 123), EOS]}
    free = alone(oracle, body(40, 8, which=72, **letters))
    first, text = free[0][0][0][0], free[0][0][1]
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"stop_token_ids": [first]}, 1, "stop"),
        ({"stop": [text[0]]}, 1, "stop"),
        ({"stop": [text[:3]]}, 3, "stop"),
        ({"ignore_eos": False, "min_tokens": 3, "logit_bias": {str(EOS): 100}}, 4, "stop"),
        ({"ignore_eos": True, "logit_bias": {str(EOS): 100}}, 8, "length"),
    ]
    for fields, num_tokens, reason in cases:
        request = body(40, 8, which=72, **letters) | fields
        [(_, got, why, _)], _, num_completion = both_ways(oracle, pair, request)
        assert (num_completion, why) == (num_tokens, reason), fields
        if "stop" in fields:
            assert got == "", "the head of the stop string leaked"


@pytest.mark.parametrize("num_logprobs", [0, 5, 20])
def test_b074_log_probabilities_of_the_first_token(
    oracle: LocalCluster, pair: LocalCluster, num_logprobs: int
) -> None:
    """Entry 0 comes from the prefill worker: it is there, with its alternatives in the same order, and there
    is one entry per token."""
    expected = both_ways(oracle, pair, body(33, 10, which=74, logprobs=num_logprobs))
    [(_, _, _, logprobs)], _, num_completion = expected
    assert len(logprobs["token_logprobs"]) == num_completion == 10
    assert logprobs["token_logprobs"][0] is not None


def test_b074_log_probabilities_of_a_prompt(oracle: LocalCluster, pair: LocalCluster) -> None:
    """They are computed in the chunks of whoever prefills, cached head or not, and cross no edge."""
    for num_tokens in (1, 2, BLOCK, 3 * BLOCK + 5):
        request = body(num_tokens, 4, which=740, logprobs=3, echo=True)
        expected = alone(oracle, request)
        for _ in range(2):  # the second time all of it is cached
            assert asked(pair, request | {"cache_salt": f"scores-{num_tokens}"}) == expected
        assert streamed(pair, request | fresh()) == expected
        columns = expected[0][0][3]
        assert len(columns["token_logprobs"]) == num_tokens + 4
        assert columns["token_logprobs"][0] is None
        request = body(num_tokens, 0, which=740, logprobs=3, echo=True)
        [(_, _, reason, scored)], _, num_completion = both_ways(oracle, pair, request)
        assert (reason, num_completion) == ("length", 0)
        assert scored["token_logprobs"] == columns["token_logprobs"][:num_tokens]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer", "maximum": 999}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("max_tokens", [1, 2, 200])
def test_b075_structured_output_across_the_hand_off(
    oracle: LocalCluster, pair: LocalCluster, max_tokens: int
) -> None:
    """The grammar takes the first token once: the prefill worker chooses it by the grammar, for the decode
    worker it is history."""
    for seed in range(3):
        fields = {"guided_json": SCHEMA, "temperature": 1.0, "seed": seed, "ignore_eos": False}
        [(_, text, reason, _)], _, num_completion = both_ways(
            oracle, pair, body(40, max_tokens, which=75, **fields)
        )
        if max_tokens < 200:
            assert (reason, num_completion) == ("length", max_tokens)
            assert text.startswith("{")
        else:
            assert reason == "stop"
            assert set(json.loads(text)) == {"name", "size"}


def test_b075_required_calls_across_the_hand_off(pair: LocalCluster) -> None:
    """A tool has to be called: whatever the model makes of it, it is a call that fits."""
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Add something."}],
        "tools": [ADD],
        "temperature": 1.0,
        "seed": 75,
        "parallel_tool_calls": False,
        "tool_choice": "required",
    }
    with pair.client() as client:
        cut = client.post("/v1/chat/completions", json={**fields, "max_tokens": 30})
        whole = client.post("/v1/chat/completions", json={**fields, "max_tokens": 600})
    assert cut.json()["choices"][0]["finish_reason"] == "length"
    [choice] = whole.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "add"
    assert {"a", "b"} <= set(json.loads(call["function"]["arguments"]))


def test_b075_the_grammar_goes_on_after_a_failover(oracle: LocalCluster, pair: LocalCluster) -> None:
    """The decode worker is killed in the middle of an answer: its successor is handed the tokens so far."""
    name = {"type": "string", "pattern": "^[a-z]{250,260}$"}  # a token each
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"], "name": name}}
    request = body(40, 800, which=751, guided_json=schema, temperature=1.0, seed=9, ignore_eos=False)
    expected = alone(oracle, request)
    asks = {**request, **fresh(), "stream": True, "timings": True}
    raw, is_killed = b"", False
    with pair.client() as client, client.stream("POST", "/v1/completions", json=asks) as answer:
        for part in answer.iter_raw():
            raw += part
            if not is_killed and raw.count(b"data: ") > 20:
                pair.restart("decode-0")
                is_killed = True
    result = check_stream(raw, kind=TEXT)
    assert result.timings is not None
    assert result.timings["attempts"] == 2, "the answer was over before the worker was killed"
    assert result.text == expected[0][0][1]
    assert 250 <= len(json.loads(result.text)["name"]) <= 260


def test_b077_choices_of_one_prompt_share_it(oracle: LocalCluster, pair: LocalCluster) -> None:
    """`n` answers: as from one engine, all different, and the prompt is computed once."""
    tokens = prompt(5 * BLOCK + 3, seed=77)
    request = body(1, 40, temperature=1.5, seed=5, n=3, prompt=tokens)
    expected = alone(oracle, request)
    assert len({tuple(ids) for ids, _, _, _ in expected[0]}) == 3
    cached = pair.metric("baton_prompt_tokens_cached_total")
    answer = pair.complete(**request | fresh())
    assert essence(answer) == expected
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    assert pair.metric("baton_prompt_tokens_cached_total") - cached >= 2 * 5 * BLOCK
    alone_with_its_seed = asked(pair, body(1, 40, temperature=1.5, seed=5, prompt=tokens) | fresh())
    assert alone_with_its_seed[0][0] == expected[0][0]


def test_b077_several_choices_of_one_request(oracle: LocalCluster, pair: LocalCluster) -> None:
    """Several prompts in one request are as many sequences on both workers: each is as alone."""
    prompts = [prompt(7 + 9 * index, seed=index) for index in range(5)]
    fields = {"temperature": 1.0, "seed": 3}
    answer = pair.complete(**body(1, 9, **fields) | {"prompt": prompts} | fresh())
    for index, one in enumerate(prompts):
        [expected], _, _ = alone(oracle, body(1, 9, **fields) | {"prompt": one})
        assert essence(answer)[0][index] == expected


def test_b079_only_what_the_decode_worker_lacks_is_moved(oracle: LocalCluster, pair: LocalCluster) -> None:
    """It holds 0 to 3 blocks of the prompt already: the answer is the same, and only the rest crosses the
    edge."""
    tokens = prompt(4 * BLOCK + 3, seed=79)
    request = body(1, 5, prompt=tokens)
    expected = alone(oracle, request)
    block_bytes = (8 << 20) // pair.worker("decode-0")["kv_blocks"]["total"]

    def received() -> int:
        return int(pair.worker("decode-0")["kv_bytes_received"])

    pair.wait_heard("decode-0")
    before, num_blocks = received(), 0
    for num_held in range(4):
        salt = fresh()
        asks = [request | salt]
        if num_held:  # first the head alone: its blocks stay on the decode worker
            asks.insert(0, body(1, 2, prompt=tokens[: num_held * BLOCK]) | salt)
            num_blocks += num_held
        num_blocks += 5 - num_held
        answers = [pair.complete(**ask, timings=True) for ask in asks]
        assert {answer["timings"]["prefill_worker"] for answer in answers} == {"prefill-0"}
        assert essence(answers[-1]) == expected
        wanted = before + num_blocks * block_bytes
        pair.wait_for(partial(lambda least: received() >= least, wanted), 30, "the bytes in a heartbeat")
        assert received() == wanted, f"{num_held} blocks were there"


def test_b090_a_worker_is_replaced_behind_the_same_name(oracle: LocalCluster, pair: LocalCluster) -> None:
    """Killed and started again at once, the other one living on: nothing is taken for the old process, and
    all later requests pass without another restart."""
    request = body(50, 8, which=90)
    expected = alone(oracle, request)
    for name in ("prefill-0", "decode-0"):
        assert asked(pair, request | fresh()) == expected
        epoch = pair.worker(name)["epoch"]
        pair.restart(name)
        pair.wait_for(partial(lambda who: pair.worker(who).get("state") == "ready", name), 60, name)
        assert pair.worker(name)["epoch"] == epoch + 1
        for _ in range(4):
            answer = pair.complete(**request | fresh(), timings=True)
            assert essence(answer) == expected
            assert answer["timings"]["attempts"] == 1
            assert answer["timings"]["prefill_worker"] == "prefill-0"


def test_b092_the_clients_fault_stays_the_clients_fault(oracle: LocalCluster, pair: LocalCluster) -> None:
    """A prompt that is too long, or ids that do not exist: the same 400 as from one engine, one attempt, and
    no worker is blamed for it."""
    wrong = [
        body(2040, 500),
        body(10, 5) | {"prompt": [10**6]},
        body(10, 5, stop_token_ids=[10**6]),
        body(10, 5, min_tokens=6),
    ]
    for request in wrong:
        bodies = []
        for cluster in (oracle, pair):
            for stream in (False, True):
                with cluster.client() as client:
                    reply = client.post("/v1/completions", json=request | {"stream": stream})
                assert reply.status_code == 400, reply.text
                bodies.append(reply.json()["error"])
        assert all(error == bodies[0] for error in bodies)
    assert {worker["state"] for worker in pair.get("/cluster")["workers"]} == {"ready"}
    assert asked(pair, body(12, 4) | fresh()) == alone(oracle, body(12, 4))
