"""API keys: what is open without one, what a presented one may look like, and keys that change."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import openai
import pytest

from cluster.clock import ManualClock
from cluster.errors import ConfigError
from router.api_keys import OPEN_PATHS, KeyRing, presented_key, read_keys
from router.limits import GatewayLimits
from router.page import page_files
from router.public_side import SHIFT_PATH, Side, on_its_side
from router.quotas.limits import KeyLimits
from tests.support.gateway import MODEL, RunningGateway, check_error, running_gateway

KEY = "sk-one-é".encode()
OTHER = b"sk-two"


def line(key: bytes) -> str:
    return f"sha256:{sha256(key).hexdigest()}"


@pytest.fixture(scope="module")
def locked(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(
        f"# of the tests\n{line(KEY)}\n\n{line(b'sk-three').upper().replace('SHA', 'sha')}  # rotated\n"
    )
    with running_gateway(tokenizer_dir, limits=GatewayLimits(api_keys_file=str(path))) as running:
        yield running


def ask(gateway: RunningGateway, *authorization: bytes, path: str = "/v1/models", method: str = "GET") -> Any:
    headers = [(b"authorization", value) for value in authorization]
    return gateway.client.request(method, path, headers=headers)


@pytest.mark.parametrize(
    "value",
    [
        b"Bearer " + KEY,
        b"bearer " + KEY,
        b"BEARER   " + KEY,
        b"Bearer sk-three",
    ],
)
def test_b154_keys_that_open(locked: RunningGateway, value: bytes) -> None:
    assert ask(locked, value).status_code == 200
    assert ask(locked, value, path="/metrics").status_code == 200


@pytest.mark.parametrize(
    "values",
    [
        [],
        [b""],
        [b"Bearer"],
        [b"Bearer wrong"],
        [b"Bearer " + KEY[:-1]],
        [b"Bearer " + KEY + b"x"],
        [b"Bearer \xff\xfe\xfd"],
        [b"Basic " + KEY],
        [KEY],
        [b"Bearer " + KEY, b"Bearer " + KEY],
        [b"Bearer wrong", b"Bearer " + KEY],
        [b"Bearer " + b"x" * 5000],
    ],
)
def test_b154_keys_that_do_not(locked: RunningGateway, values: list[bytes]) -> None:
    response = ask(locked, *values)
    message = check_error(response, 401, code="invalid_api_key")
    assert response.json()["error"]["type"] == "authentication_error"
    assert response.headers["www-authenticate"] == "Bearer"
    assert "sk-" not in message


def test_b154_keys_are_in_no_log(locked: RunningGateway, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        ask(locked, b"Bearer " + KEY)
        ask(locked, b"Bearer sk-secret-guess")
    assert "sk-" not in caplog.text
    page = ask(locked, b"Bearer " + KEY, path="/metrics").text
    assert "sk-" not in page


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE", "PUT", "TRACE"])
def test_b155_everything_else_is_closed(locked: RunningGateway, method: str) -> None:
    routes = {route.path for route in locked.app.routes}
    assert "/v1/chat/completions" in routes
    odd = {
        "//v1/models",
        "/v1/../v1/models",
        "/v1/models/",
        "/v1%2fmodels",
        "/V1/MODELS",
        "/nowhere",
        "/health/",
        "/Health",
    }
    read = page_files() if method == "GET" else set()
    for path in (routes - OPEN_PATHS - read) | odd:
        response = ask(locked, path=path.replace("{name:path}", "x"), method=method)
        check_error(response, 401, code="invalid_api_key")
        with_query = ask(
            locked, path=f"{path.replace('{name:path}', 'x')}?api_key=sk-two&key=sk-three", method=method
        )
        check_error(with_query, 401)


def test_b155_only_the_signs_of_life_are_open(locked: RunningGateway) -> None:
    assert {path for path in OPEN_PATHS if ask(locked, path=path).status_code == 200} == OPEN_PATHS
    assert {"/health", "/ready", "/ping"} == OPEN_PATHS
    response = ask(locked, path="/health", method="HEAD")
    assert response.status_code in (200, 405)


def test_a_browser_can_load_the_page_and_asks_with_a_key(locked: RunningGateway) -> None:
    assert {path: ask(locked, path=path).status_code for path in page_files()} == dict.fromkeys(
        page_files(), 200
    )
    assert ask(locked, path="/page/picture").status_code == 401
    assert ask(locked, path="/page/nothing.js").status_code == 401


async def test_operators_need_no_key_at_the_admin_address(locked: RunningGateway) -> None:
    """And the public address has nothing of theirs, with or without a key."""

    async def status(path: str, side: Side) -> int:
        scope = {
            "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [], "server": ("127.0.0.1", 1 if side is Side.ADMIN else 2), "http_version": "1.1",
            "scheme": "http", "client": ("127.0.0.1", 3), "root_path": "",
        }  # fmt: skip
        sent = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await locked.app(on_its_side(scope, 1), receive, send)
        return int(sent[0]["status"])

    for path in ("/metrics", "/cluster", "/page/picture", SHIFT_PATH):
        assert await status(path, Side.ADMIN) == (405 if path == SHIFT_PATH else 200)
        assert await status(path, Side.PUBLIC) == 404
    assert await status("/v1/models", Side.ADMIN) == 401


def test_a_refused_body_is_not_read(locked: RunningGateway) -> None:
    check_error(locked.complete(prompt="x" * 100_000), 401)
    assert not locked.cluster.streams


def test_the_openai_package_with_and_without(locked: RunningGateway) -> None:
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key="sk-three", max_retries=0) as client:
        assert client.completions.create(model=MODEL, prompt="a").choices
    with (
        openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        client.completions.create(model=MODEL, prompt="a")
    assert refused.value.code == "invalid_api_key"


# ---- the ring ------------------------------------------------------------------------------------


def knows(ring: KeyRing, key: bytes) -> bool:
    return ring.find(key) is not None


def test_keys_change_while_it_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = tmp_path / "keys", ManualClock()
    path.write_text(line(KEY))
    ring = KeyRing(path, clock)
    assert (knows(ring, KEY), knows(ring, OTHER)) == (True, False)
    path.write_text(f"{line(OTHER)}\n")
    assert (knows(ring, KEY), knows(ring, OTHER)) == (True, False)  # it was looked at a moment ago
    clock.advance(1.0)
    assert (knows(ring, KEY), knows(ring, OTHER)) == (False, True)
    for broken in ("nonsense\n\n", "# none"):
        path.write_text(broken)
        clock.advance(1.0)
        assert knows(ring, OTHER)
    path.unlink()
    clock.advance(1.0)
    assert knows(ring, OTHER)
    assert caplog.text.count("stay as they were") == 3
    path.write_text(f"{line(KEY)} # back")
    clock.advance(1.0)
    assert (knows(ring, KEY), knows(ring, OTHER)) == (True, False)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no API key"),
        ("# only this", "no API key"),
        ("sk-plain", "line 1"),
        (f"\n{line(KEY)[:-1]}", "line 2"),
        (f"{line(KEY)}x", "line 1"),
        (f"{line(KEY)} sk-plain", "line 1: what follows"),
        (f"{line(KEY)} share=2\n{line(KEY)}", "line 2: this key is there already"),
        (f"{line(KEY)} name=a share=2\n{line(OTHER)} name=a", "line 2: `a` has other limits"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason) as refused:
        read_keys(path, KeyLimits())
    assert "sk-plain" not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(tmp_path / "nothing", KeyLimits())


def test_lines_have_names_and_limits(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    settings = "name=team-a requests-per-min=60 tokens-per-min=none"
    path.write_text(f"{line(KEY)} {settings}  # old\n{line(OTHER)}\t{settings}\n{line(b'x')} share=3\n")
    ring = KeyRing(path, ManualClock(), KeyLimits(tokens_per_min=500, concurrent=2))
    found = [ring.find(key) for key in (KEY, OTHER, b"x")]
    assert [key.tenant for key in found if key] == [
        "team-a",
        "team-a",
        f"key-{sha256(b'x').hexdigest()[:12]}",
    ]
    limits = [key.limits for key in found if key]
    assert limits[0] == limits[1] == KeyLimits(60, None, 2)
    assert limits[2] == KeyLimits(None, 500, 2, 3)


def test_what_counts_as_a_presented_key() -> None:
    assert presented_key({"headers": [(b"authorization", b" bearer  a b ")]}) == b"a b"
    for nothing in (b"", b"a", b"Bearer", b"Bearer  "):
        assert presented_key({"headers": [(b"authorization", nothing)]}) is None
    assert presented_key({"headers": []}) is None
