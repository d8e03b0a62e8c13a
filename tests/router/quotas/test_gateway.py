"""Limits of keys over HTTP: 429 in OpenAI's shape, headers, nothing kept whatever becomes of a request."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from cluster.errors import Overloaded, WorkerLost
from router.quotas.book import Standing
from router.quotas.headers import duration, limit_headers
from router.quotas.limits import Limit
from tests.support.gateway import LIMIT_S, MODEL, RunningGateway, check_error, until_quotas_are_quiet
from tests.support.scripted_cluster import Script


def ask(gateway: RunningGateway, key: str, **fields: Any) -> httpx.Response:
    fields = {"prompt": "Hi", "max_tokens": 5, **fields}
    return gateway.client.post("/v1/completions", json=fields, headers={"authorization": f"Bearer {key}"})


def remaining(gateway: RunningGateway, key: str) -> int:
    """Tokens, as the next response tells; it costs nothing."""
    gateway.cluster.refuse = Overloaded("busy")
    response = ask(gateway, key, prompt="H", max_tokens=1)
    gateway.cluster.refuse = None
    assert response.status_code == 503
    gate = gateway.app.state.quotas
    standing = gate._book.standing(key.removeprefix("sk-"), _limits(gateway, key), gate._clock.now())
    left: int = standing[Limit.TOKENS].remaining
    return left


def _limits(gateway: RunningGateway, key: str) -> Any:
    return gateway.app.state.quotas._book._tenants[key.removeprefix("sk-")].limits


def limited_by(response: httpx.Response) -> str:
    message = check_error(response, 429, code="rate_limit_exceeded")
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert response.headers["x-baton-dropped-reason"] == "rate_limit_exceeded"
    return message


# ---- each limit


def test_requests_per_minute_of_all_keys_of_a_name(limited: RunningGateway) -> None:
    responses = [ask(limited, key) for key in ("sk-few", "sk-few-next", "sk-few")]
    assert [response.status_code for response in responses] == [200] * 3
    headers = responses[0].headers
    assert headers["x-ratelimit-limit-requests"] == "3"
    assert headers["x-ratelimit-remaining-requests"] == "2"
    assert headers["x-ratelimit-reset-requests"] == "20s"
    assert "x-ratelimit-limit-tokens" not in headers
    refused = ask(limited, "sk-few-next")
    assert "3 requests per minute. Try again in 20s." in limited_by(refused)
    assert refused.headers["retry-after"] == "20"
    assert refused.headers["retry-after-ms"] == "20000"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-reset-requests"] == "1m0s"
    assert ask(limited, "sk-free").status_code == 200
    limited.loop.call_soon_threadsafe(limited.app.state.quotas._clock.advance, 20.0)
    assert ask(limited, "sk-few").status_code == 200


def test_a_refused_request_is_not_read(limited: RunningGateway) -> None:
    for _ in range(3):
        ask(limited, "sk-few")
    limited.cluster.streams.clear()
    headers = {"authorization": "Bearer sk-few", "content-type": "application/json"}
    limited_by(limited.client.post("/v1/completions", content=b"no JSON", headers=headers))
    assert limited.cluster.streams == []


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "Hi"}), ("/detokenize", {"tokens": [1]})]
)
def test_tokenizing_counts_as_a_request(limited: RunningGateway, path: str, body: dict[str, Any]) -> None:
    """Of no tokens; one that is refused or is not valid costs nothing."""
    headers = {"authorization": "Bearer sk-few"}
    for left in ("2", "1"):
        answer = limited.client.post(path, json=body, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-remaining-requests"] == left
    check_error(limited.client.post(path, json={**body, "model": "other"}, headers=headers), 404)
    assert ask(limited, "sk-few").headers["x-ratelimit-remaining-requests"] == "0"
    refused = limited.client.post(path, json=body, headers=headers)
    assert "3 requests per minute. Try again in 20s." in limited_by(refused)
    answer = limited.client.post(path, json=body, headers={"authorization": "Bearer sk-tokens"})
    assert answer.headers["x-ratelimit-remaining-tokens"] == "600"


def test_flags_limit_keys_that_have_no_limits_of_their_own(limited: RunningGateway) -> None:
    assert ask(limited, "sk-default").headers["x-ratelimit-limit-requests"] == "7"
    assert "x-ratelimit-limit-requests" not in ask(limited, "sk-free").headers


def test_tokens_are_settled_with_what_was_used(limited: RunningGateway) -> None:
    response = ask(limited, "sk-tokens", max_tokens=500)
    used = response.json()["usage"]["total_tokens"]
    assert response.headers["x-ratelimit-limit-tokens"] == "600"
    assert response.headers["x-ratelimit-remaining-tokens"] == str(600 - 500 - 2)
    assert used < 20
    assert remaining(limited, "sk-tokens") == 600 - used
    refused = ask(limited, "sk-tokens", max_tokens=600 - used)
    assert "600 tokens per minute" in limited_by(refused)
    assert refused.headers["retry-after-ms"] == "200"  # two tokens
    assert refused.headers["retry-after"] == "1"
    several = ask(limited, "sk-tokens", prompt=["Hi", "Ho"], n=2, max_tokens=5, ignore_eos=True)
    assert several.json()["usage"]["total_tokens"] == 4 + 20
    assert remaining(limited, "sk-tokens") == 600 - used - 24


def test_a_prompt_longer_than_a_minute_is_told_not_to_come_again(limited: RunningGateway) -> None:
    refused = ask(limited, "sk-tokens", prompt="x" * 601)
    assert "cannot be served" in limited_by(refused)
    assert "retry-after" not in refused.headers
    assert refused.headers["x-should-retry"] == "false"
    assert remaining(limited, "sk-tokens") == 600


def test_concurrency(limited: RunningGateway) -> None:
    limited.cluster.script = Script(hang_after=1)
    headers = {"authorization": "Bearer sk-slots"}
    body = {"prompt": "Hi", "max_tokens": 5, "stream": True}
    with (
        limited.client.stream("POST", "/v1/completions", json=body, headers=headers) as first,
        limited.client.stream("POST", "/v1/completions", json=body, headers=headers) as second,
    ):
        assert (first.status_code, second.status_code) == (200, 200)
        refused = ask(limited, "sk-slots")
        assert "2 requests at once" in limited_by(refused)
        assert int(refused.headers["retry-after-ms"]) >= 1
        streams = list(limited.cluster.streams)
    assert {stream.spec.tenant for stream in streams} == {"slots"}
    assert {stream.spec.share for stream in streams} == {4}
    for stream in streams:
        assert stream.ended.wait(LIMIT_S)
    limited.cluster.script = Script()
    until_quotas_are_quiet(limited)
    assert ask(limited, "sk-slots").status_code == 200


# ---- whatever becomes of a request


@pytest.mark.parametrize("stream", [False, True])
def test_what_we_fail_before_its_first_token_costs_nothing(limited: RunningGateway, stream: bool) -> None:
    limited.cluster.refuse = Overloaded("busy")
    assert ask(limited, "sk-all", stream=stream).status_code == 503
    limited.cluster.refuse = None
    limited.cluster.script = Script(fail_after=0, error=WorkerLost("gone"))
    assert ask(limited, "sk-all", stream=stream, n=2).status_code == 502
    limited.cluster.script = Script()
    until_quotas_are_quiet(limited)
    headers = ask(limited, "sk-all").headers
    assert headers["x-ratelimit-remaining-requests"] == "99"
    assert headers["x-ratelimit-remaining-tokens"] == "993"


@pytest.mark.parametrize("stream", [False, True])
def test_what_fails_later_costs_what_it_gave(limited: RunningGateway, stream: bool) -> None:
    limited.cluster.script = Script(fail_after=3, error=WorkerLost("gone"))
    assert ask(limited, "sk-all", stream=stream, max_tokens=50).status_code == (200 if stream else 502)
    limited.cluster.script = Script()
    until_quotas_are_quiet(limited)
    assert remaining(limited, "sk-all") == 1000 - 2 - 3


def test_a_client_that_leaves_pays_for_its_prompt_and_what_it_got(limited: RunningGateway) -> None:
    limited.cluster.script = Script(hang_after=4)
    headers = {"authorization": "Bearer sk-all"}
    body = {"prompt": "Hi", "max_tokens": 50, "stream": True}
    with limited.client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        lines = response.iter_lines()
        for _ in range(4):
            assert next(lines).startswith("data: ")
            next(lines)
    until_quotas_are_quiet(limited)
    assert remaining(limited, "sk-all") == 1000 - 2 - 4


def test_a_bad_request_costs_nothing(limited: RunningGateway) -> None:
    check_error(ask(limited, "sk-all", temperature=9), 400)
    assert remaining(limited, "sk-all") == 1000


def test_metrics_count_refusals_and_name_no_key(limited: RunningGateway) -> None:
    def count() -> float:
        page = limited.client.get("/metrics", headers={"authorization": "Bearer sk-free"}).text
        for name in ("few", "tokens", "slots", "team", "sk-"):
            assert f'"{name}' not in page.replace('limit="tokens"', "")
        line = next(
            line for line in page.splitlines() if line.startswith('baton_quota_refused_total{limit="req')
        )
        assert 'baton_request_total{outcome="rate_limited"}' in page
        return float(line.split()[-1])

    before = count()
    for _ in range(5):
        ask(limited, "sk-few")
    assert count() == before + 2


def test_the_openai_package_sees_a_rate_limit(limited: RunningGateway) -> None:
    with openai.OpenAI(base_url=f"{limited.url}/v1", api_key="sk-few", max_retries=0) as client:
        for _ in range(3):
            raw = client.completions.with_raw_response.create(model=MODEL, prompt="a", max_tokens=2)
        assert raw.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model=MODEL, prompt="a", max_tokens=2)
    assert refused.value.code == "rate_limit_exceeded"
    assert refused.value.type == "rate_limit_error"
    with openai.OpenAI(base_url=f"{limited.url}/v1", api_key="sk-tokens", max_retries=5) as client:
        with pytest.raises(openai.RateLimitError, match="cannot be served"):
            client.completions.create(model=MODEL, prompt="x" * 700, max_tokens=2)
        refusals = limited.app.state.quotas._metrics._quota_refused.labels("tokens")._value.get()
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model=MODEL, prompt="x" * 700, max_tokens=2)
        assert limited.app.state.quotas._metrics._quota_refused.labels("tokens")._value.get() == refusals + 1


# ---- words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (0.0201, "21ms"),
        (0.02, "20ms"),
        (1.0, "1s"),
        (8.64, "8.64s"),
        (59.9999, "1m0s"),
        (360.0, "6m0s"),
        (3725.5, "1h2m5.5s"),
    ],
)
def test_durations_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_only_limits_that_there_are_have_headers() -> None:
    assert limit_headers({}) == ()
    assert limit_headers({Limit.TOKENS: Standing(10, 3, 42.0)}) == (
        (b"x-ratelimit-limit-tokens", b"10"),
        (b"x-ratelimit-remaining-tokens", b"3"),
        (b"x-ratelimit-reset-tokens", b"42s"),
    )
