"""Web pages of other origins: what browsers are told of them, and that nobody is told anything by default."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from cluster.allowed_origins import parse_origins
from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from cluster.preflight import check_allowed_origins
from cluster.request_config import RequestConfig
from router.limits import GatewayLimits
from router.public_side import PRIVATE_PATHS
from tests.support.gateway import RunningGateway, check_error, running_gateway

CHAT = "https://chat.example"
KEY = "a-key"
ASKING = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.fixture(scope="module")
def opened(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """For two origins, with keys."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"sha256:{sha256(KEY.encode()).hexdigest()}\n")
    config = RequestConfig(allowed_origins=f"{CHAT}, http://localhost:3000", api_keys_file=str(keys))
    with running_gateway(tokenizer_dir, limits=GatewayLimits.of(config)) as running:
        yield running


def cors(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control-")}


@pytest.mark.parametrize("origin", [CHAT, "http://localhost:3000"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/tokenize"])
def test_a_browser_may_ask_without_a_key_and_is_told(opened: RunningGateway, origin: str, path: str) -> None:
    response = opened.client.options(path, headers={"origin": origin, **ASKING})
    assert response.status_code == 204
    assert response.content == b""
    told = cors(response)
    assert told["access-control-allow-origin"] == origin
    assert told["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in told["access-control-allow-methods"]
    assert "access-control-allow-private-network" not in told
    assert "access-control-allow-credentials" not in told
    assert response.headers["vary"] == "origin"
    assert response.headers["x-request-id"]
    asks_more = {"access-control-request-private-network": "true"}
    response = opened.client.options(path, headers={"origin": origin, **ASKING, **asks_more})
    assert response.headers["access-control-allow-private-network"] == "true"


def test_every_answer_can_be_read(opened: RunningGateway) -> None:
    """Errors most of all: a page that cannot read one tells its user of a network failure."""
    headers = {"origin": CHAT, "authorization": f"Bearer {KEY}"}
    good, bad = {"prompt": "Hi"}, {"prompt": "Hi", "temperature": 9}
    for response, status in (
        (opened.client.post("/v1/completions", json=good, headers=headers), 200),
        (opened.client.post("/v1/completions", json={**good, "stream": True}, headers=headers), 200),
        (opened.client.post("/v1/completions", json=bad, headers=headers), 400),
        (opened.client.post("/v1/completions", json=good, headers={"origin": CHAT}), 401),
        (opened.client.get("/nowhere", headers=headers), 404),
        (opened.client.get("/v1/completions", headers=headers), 405),
        (opened.client.post("/v1/completions", content=b"x", headers=headers), 415),
        (opened.client.get("/health", headers={"origin": CHAT}), 200),
    ):
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == CHAT
        readable = response.headers["access-control-expose-headers"]
        for name in ("x-request-id", "retry-after-ms", "x-ratelimit-remaining-tokens", "x-baton-ignored"):
            assert name in readable


@pytest.mark.parametrize("origin", [CHAT, "https://evil.example", "null", None])
def test_no_cache_gives_an_answer_to_another_origin(opened: RunningGateway, origin: str | None) -> None:
    """Whatever the answer: it would have been another one for another origin."""
    headers = {} if origin is None else {"origin": origin}
    key = {"authorization": f"Bearer {KEY}", **headers}
    text = {"prompt": "Hi"}
    for response, status in (
        (opened.client.options("/v1/models", headers={**headers, **ASKING}), 204 if origin == CHAT else 401),
        (opened.client.options("/v1/models", headers=key), 405),
        (opened.client.get("/v1/models", headers=key), 200),
        (opened.client.get("/v1/models", headers=headers), 401),
        (opened.client.get("/nowhere", headers=key), 404),
        (opened.client.post("/v1/completions", json={}, headers=key), 400),
        (opened.client.post("/v1/completions", json={**text, "stream": True}, headers=key), 200),
        (opened.client.get("/", headers=headers), 200),
        (opened.client.get("/health", headers=headers), 200),
    ):
        assert response.status_code == status
        assert response.headers.get_list("vary") == ["origin"]


def test_what_a_route_did_not_expect_can_be_read_too(
    opened: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ValueError("nobody expects it")

    monkeypatch.setattr(opened.cluster, "max_model_len", fail)
    for origin, told in ((CHAT, CHAT), ("https://evil.example", None)):
        headers = {"origin": origin, "authorization": f"Bearer {KEY}"}
        response = opened.client.get("/v1/models", headers=headers)
        check_error(response, 500, code="internal_error")
        assert response.headers.get("access-control-allow-origin") == told
        assert response.headers["vary"] == "origin"


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", f"{CHAT}.evil.example", "http://chat.example"]
)
def test_other_origins_are_told_nothing(opened: RunningGateway, origin: str) -> None:
    key = {"authorization": f"Bearer {KEY}"}
    assert cors(opened.client.options("/v1/models", headers={"origin": origin, **ASKING})) == {}
    assert cors(opened.client.get("/v1/models", headers={"origin": origin, **key})) == {}
    check_error(opened.client.options("/v1/models", headers={"origin": origin, **ASKING}), 401)


def test_without_the_setting_nobody_is_told_anything(gateway: RunningGateway) -> None:
    for path in ("/v1/models", "/v1/chat/completions", "/", "/metrics"):
        assert cors(gateway.client.options(path, headers={"origin": CHAT, **ASKING})) == {}
        response = gateway.client.get(path, headers={"origin": CHAT})
        assert cors(response) == {}
        assert "vary" not in response.headers


def test_any_origin_and_still_not_what_is_for_operators(tokenizer_dir: Path) -> None:
    limits = GatewayLimits.of(RequestConfig(allowed_origins="*"))
    with running_gateway(tokenizer_dir, limits=limits) as gateway:
        for origin in (CHAT, "null"):
            response = gateway.client.get("/v1/models", headers={"origin": origin})
            assert response.headers["access-control-allow-origin"] == "*"
            assert response.headers["vary"] == "origin"
            for path in PRIVATE_PATHS - {"/page/events"}:
                assert cors(gateway.client.get(path, headers={"origin": origin})) == {}
            for path in PRIVATE_PATHS:
                assert cors(gateway.client.options(path, headers={"origin": origin, **ASKING})) == {}
        assert cors(gateway.client.get("/v1/models")) == {}  # no browser


@pytest.mark.parametrize(
    "text",
    [
        "chat.example",
        "https://",
        "https://a/b",
        "https://a/",
        "https://*.example",
        "a b",
        "https://é",
        "://x",
    ],
)
def test_what_is_no_origin_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(ConfigError, match="is no origin"):
        parse_origins(f"{CHAT},{text}")
    with pytest.raises(ConfigError, match="allowed-origins"):
        check_allowed_origins(ClusterConfig(allowed_origins=text))


def test_origins_are_read() -> None:
    assert parse_origins(f" {CHAT} ,http://localhost:3000,,") == {CHAT, "http://localhost:3000"}
    assert parse_origins("*") == {"*"}
    assert parse_origins("http://[::1]:3000") == {"http://[::1]:3000"}
    check_allowed_origins(ClusterConfig())
    check_allowed_origins(ClusterConfig(allowed_origins=CHAT))
