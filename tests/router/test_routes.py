"""The other routes, HTTP itself, and the OpenAI client library against all of it."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import string
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import openai
import pytest

from cluster.errors import ConfigError, Overloaded
from cluster.step_model import StepModel
from cluster.wire.messages import Role, WorkerLoad
from router.address import STALLED_MS, bind
from router.delivery import Readiness
from router.limits import GatewayLimits
from tests.support.gateway import MODEL, RunningGateway, check_error, running_gateway
from tests.support.plain_http import plain_client
from tests.support.scripted_cluster import Script, worker
from tests.support.sse import check_error_stream, check_stream

LOAD = WorkerLoad(
    running=2, waiting=1, blocks_used=5, blocks_cached=3, blocks_free=92, steps=10, stale_messages=4,
    preemptions=1, leases=2, kv_bytes_received=1000,
)  # fmt: skip


def test_b130_health_and_readiness(gateway: RunningGateway) -> None:
    assert gateway.client.get("/health").status_code == 200
    assert gateway.client.get("/ping").status_code == 200
    assert gateway.client.get("/ready").json() == {"status": "ready", "phase": "ready"}
    for phase in ("waiting_for_workers", "loading_model", "warming_up"):
        gateway.cluster.readiness = Readiness(False, phase)
        response = gateway.client.get("/ready")
        assert response.status_code == 503
        assert response.json() == {"status": "not_ready", "phase": phase}
        assert gateway.client.get("/health").status_code == 200  # alive all the same
        assert gateway.client.get("/cluster").json()["state"] == phase
    assert gateway.client.get("/version").json() == {"version": "test"}


def test_cluster(gateway: RunningGateway) -> None:
    gateway.cluster.workers = (worker("decode-0", Role.DECODE, epoch=3, load=LOAD),)
    body = gateway.client.get("/cluster").json()
    assert body["state"] == "ready"
    [shown] = body["workers"]
    assert shown["id"] == "decode-0"
    assert shown["role"] == "decode"
    assert (shown["epoch"], shown["pid"], shown["state"]) == (3, 4242, "ready")
    assert shown["kv_blocks"] == {"used": 5, "cached": 3, "free": 92, "total": 100}
    assert (shown["running"], shown["waiting"]) == (2, 1)
    assert shown["step_model"] is None
    model = StepModel(1e-3, 8e-3, 4e-4, 1e-7, 2e-8)
    load = msgspec.structs.replace(LOAD, step_model=model, step_error=0.0512345)
    gateway.cluster.workers = (worker("decode-0", Role.DECODE, epoch=3, load=load),)
    [shown] = gateway.client.get("/cluster").json()["workers"]
    assert shown["step_model"] == msgspec.structs.asdict(model)
    assert shown["step_error"] == 0.0512


def test_http_errors_have_the_same_shape(gateway: RunningGateway) -> None:
    client = gateway.client
    check_error(client.get("/nowhere"), 404, code="not_found")
    check_error(client.get("/v1/completions"), 405, code="method_not_allowed")
    check_error(client.post("/v1/completions/", json={}), 404)
    check_error(client.post("//v1/completions", json={}), 404)
    for body in (
        b"",
        b"{",
        b"[]",
        b"5",
        b'"x"',
        b"\xff",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 5000,
    ):
        for path in ("/v1/completions", "/v1/chat/completions"):
            response = client.post(path, content=body, headers={"content-type": "application/json"})
            check_error(response, 400, code="invalid_json")
        headers = {"content-type": "application/json"}
        check_error(client.post("/tokenize", content=body, headers=headers), 400, code="invalid_json")
    for media_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = client.post("/v1/completions", content=b"{}", headers={"content-type": media_type})
        check_error(response, 415, code="unsupported_media_type")
    gateway.check_alive()


def test_request_ids(gateway: RunningGateway) -> None:
    label = {"x-request-id": "my-label_1"}
    for response in (
        gateway.client.post("/v1/completions", json={"prompt": "a"}, headers=label),
        gateway.client.post("/v1/completions", json={"prompt": "a", "stream": True}, headers=label),
        gateway.client.post("/v1/completions", json={}, headers=label),
        gateway.client.get("/nowhere", headers=label),
    ):
        assert response.headers["x-request-id"] == "my-label_1"
    first, second = gateway.cluster.streams
    assert first.spec.request != second.spec.request  # a label, not a key
    for bad in ("x" * 129, "a b", "\u00e9"):
        response = gateway.client.get("/health", headers={"x-request-id": bad.encode()})
        assert re.fullmatch(r"req-[0-9a-f]{32}", response.headers["x-request-id"])


def test_body_limit(tokenizer_dir: Path) -> None:
    with running_gateway(tokenizer_dir, limits=GatewayLimits(max_body_bytes=1000)) as gateway:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            check_error(gateway.post(path, prompt="x" * 2000), 413, code="body_too_large")

            def parts() -> Any:
                yield from [b'{"prompt": "', *[b"x" * 300] * 10]

            with plain_client(base_url=gateway.url) as client:  # the length is not announced
                headers = {"content-type": "application/json"}
                check_error(client.post(path, content=parts(), headers=headers), 413, code="body_too_large")
        gateway.check_alive()


def exchange(gateway: RunningGateway, *parts: bytes) -> bytes:
    """What comes back on a connection of its own, until the server closes it."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(0.02)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def offer(protocol: bytes, body: bytes, *, last: bool, chunked: bool = False) -> tuple[bytes, bytes]:
    """Head and body of a request that offers to change the protocol."""
    close = b", close" if last else b""
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"HTTP2-Settings: AAM\r\nConnection: Upgrade, HTTP2-Settings%b\r\nUpgrade: %b\r\n%b\r\n\r\n"
        % (close, protocol, framing)
    )
    return head, (b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_an_offered_upgrade_is_declined_by_serving_the_request(
    gateway: RunningGateway, protocol: bytes, whole: bool, chunked: bool
) -> None:
    gateway.cluster.script = Script(tuple(b"ab"))
    body = b'{"prompt": "Hi", "max_tokens": 2}'
    parts = [
        *offer(protocol, body, last=False, chunked=chunked),
        *offer(protocol, body, last=True, chunked=chunked),
    ]
    answer = exchange(gateway, b"".join(parts)) if whole else exchange(gateway, *parts)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.count(b'"text":"ab"') == 2


def test_what_is_not_http_gets_an_error_of_our_shape(gateway: RunningGateway) -> None:
    for sent in (b"\x16\x03\x01 hello\r\n\r\n", b"FOO / HTTP/1.1\r\n\r\n"):
        head, _, body = exchange(gateway, sent).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
    gateway.check_alive()


def test_a_long_prompt_does_not_stop_other_streams(gateway: RunningGateway) -> None:
    """Bodies above the threshold are tokenized on a thread, with the same result."""
    text = "word " * 20_000
    response = gateway.complete(prompt=text, truncate_prompt_tokens=100)
    assert response.status_code == 200
    assert bytes(gateway.cluster.streams[0].spec.token_ids) == text.encode()[-100:]
    check_error(gateway.complete(prompt=text, temperature=3), 400, param="temperature")


# ---- metrics -------------------------------------------------------------------------------------


def samples(gateway: RunningGateway) -> dict[str, float]:
    response = gateway.client.get("/metrics")
    assert response.status_code == 200
    lines = [line for line in response.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_metrics_of_requests(tokenizer_dir: Path) -> None:
    with running_gateway(tokenizer_dir) as gateway:
        gateway.cluster.script = Script(tuple(b"abc"))
        gateway.chat(stream=True)
        gateway.complete(max_tokens=2)
        gateway.complete(max_tokens=0)
        gateway.cluster.refuse = Overloaded("No.")
        gateway.complete()
        seen = samples(gateway)
        assert seen['baton_request_total{outcome="stop"}'] == 1
        assert seen['baton_request_total{outcome="length"}'] == 1
        assert seen['baton_request_total{outcome="invalid"}'] == 1
        assert seen['baton_request_total{outcome="overloaded"}'] == 1
        assert seen['baton_request_total{outcome="worker_lost"}'] == 0
        assert seen["baton_generation_tokens_total"] == 6
        assert seen["baton_prompt_tokens_cached_total"] == 4
        assert seen["baton_ttft_seconds_count"] == 2
        assert seen["baton_ttft_seconds_sum"] == pytest.approx(0.042)
        assert seen["baton_tpot_seconds_count"] == 2
        assert seen["baton_itl_seconds_count"] == 4  # 3 gaps and 1
        assert seen["baton_e2e_seconds_count"] == 2
        assert seen["baton_kv_transfer_seconds_sum"] == pytest.approx(0.006)
        assert seen['baton_prefills_total{where="remote"}'] == 2
        assert seen['baton_http_responses_total{route="/v1/completions",status="503"}'] == 1
        assert seen['baton_build_info{model="byte-model",version="test"}'] == 1


def test_metrics_of_workers(tokenizer_dir: Path) -> None:
    with running_gateway(tokenizer_dir) as gateway:
        cluster = gateway.cluster
        cluster.workers = (worker("prefill-0", Role.PREFILL), worker("decode-0", Role.DECODE, load=LOAD))
        cluster.num_queued = 3
        seen = samples(gateway)
        assert seen['baton_requests_running{role="decode"}'] == 2
        assert seen['baton_requests_waiting{role="decode"}'] == 1
        assert seen['baton_requests_running{role="prefill"}'] == 0
        assert seen['baton_requests_waiting{role="router"}'] == 3
        assert seen['baton_kv_blocks{state="used",worker="decode-0"}'] == 5
        assert seen['baton_kv_blocks{state="free",worker="decode-0"}'] == 92
        assert seen['baton_worker_state{role="decode",state="ready",worker="decode-0"}'] == 1
        assert seen['baton_worker_state{role="decode",state="lost",worker="decode-0"}'] == 0
        assert seen['baton_stale_messages_total{worker="decode-0"}'] == 4
        assert seen["baton_kv_transfer_bytes_total"] == 1000
        assert seen["baton_ready"] == 1
        # The same report again adds nothing; a restarted worker counts from zero.
        assert samples(gateway)["baton_kv_transfer_bytes_total"] == 1000
        cluster.workers = (worker("decode-0", Role.DECODE, epoch=2, load=WorkerLoad(kv_bytes_received=300)),)
        seen = samples(gateway)
        assert seen["baton_kv_transfer_bytes_total"] == 1300
        assert not any("prefill-0" in name for name in seen)
        cluster.workers = ()
        assert not any("worker=" in name for name in samples(gateway))


def test_b127_series_do_not_grow(gateway: RunningGateway) -> None:
    rng = Random(7)

    def word() -> str:
        return "".join(rng.choices(string.ascii_lowercase, k=12))

    def send(secret: str) -> None:
        gateway.client.get(f"/{secret}")
        gateway.client.get(f"/v1/models/{secret}")
        gateway.client.request(secret.upper(), "/v1/completions")
        headers = {"authorization": f"Bearer {secret}", "x-request-id": secret}
        gateway.client.post("/v1/completions", json={"model": secret, "prompt": secret}, headers=headers)
        gateway.client.post(
            "/v1/completions", json={"user": secret, "prompt": secret, secret: 1}, headers=headers
        )

    send(word())
    samples(gateway)
    assert gateway.complete(user=word()).status_code == 200
    before = samples(gateway)
    secrets = [word() for _ in range(100)]
    for secret in secrets:
        send(secret)
    after = samples(gateway)
    assert set(after) == set(before)
    page = gateway.client.get("/metrics").text
    assert not any(secret in page for secret in secrets)


# ---- start and stop ------------------------------------------------------------------------------


def test_a_port_in_use_is_one_clear_sentence(gateway: RunningGateway) -> None:
    with pytest.raises(
        ConfigError, match=rf"cannot listen on 127\.0\.0\.1 port {gateway.port}: it is in use"
    ):
        bind("127.0.0.1", gateway.port)
    for host, port in (("192.0.2.1", 0), ("127.0.0.1", 70000), ("no.such.host.invalid", 0)):
        with pytest.raises(ConfigError, match="cannot listen on"):
            bind(host, port)


def test_accepted_connections_do_not_wait_for_acks() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="of Linux")
def test_what_a_client_does_not_take_is_not_kept_for_ever() -> None:
    with bind("127.0.0.1", 0) as listener:
        listener.setblocking(True)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == STALLED_MS


@pytest.mark.parametrize("stream", [True, False])
def test_b132_open_requests_finish_when_it_stops(tokenizer_dir: Path, stream: bool) -> None:
    with running_gateway(tokenizer_dir, grace_s=5) as gateway:
        gateway.cluster.script = Script(tuple(b"abcdefghij"), delay_s=0.05)
        timer = threading.Timer(0.2, gateway.stop)
        timer.start()
        response = gateway.complete(stream=stream)
        timer.join()
        assert not gateway.cluster.streams[0].aborted
        if stream:
            assert check_stream(response.content, kind="text_completion").text == "abcdefghij"
        else:
            assert response.json()["choices"][0]["text"] == "abcdefghij"


def test_b132_requests_past_the_grace_time_end_with_an_error(tokenizer_dir: Path) -> None:
    with running_gateway(tokenizer_dir, grace_s=1.5) as gateway:
        gateway.cluster.script = Script(hang_after=2)
        with (
            plain_client(base_url=gateway.url) as other,
            gateway.client.stream(
                "POST", "/v1/completions", json={"prompt": "a", "stream": True}
            ) as response,
        ):
            parts = response.iter_raw()
            raw = next(parts)
            gateway.stop()
            deadline = time.monotonic() + 1.0
            while other.get("/ready").status_code == 200:  # readiness fails at once
                assert time.monotonic() < deadline
            refused = other.post("/v1/completions", json={"prompt": "a"})
            check_error(refused, 503, code="not_ready")
            assert refused.headers["retry-after"]
            raw += b"".join(parts)
        assert check_error_stream(raw)[1]["code"] == "not_ready"
        assert gateway.cluster.streams[0].aborted


# ---- the OpenAI client ---------------------------------------------------------------------------


def test_openai_client(gateway: RunningGateway) -> None:
    gateway.cluster.script = Script(tuple(b"Hello"))
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL
        messages: Any = [{"role": "user", "content": "Hi"}]
        whole = client.chat.completions.create(model=MODEL, messages=messages, logprobs=True, top_logprobs=2)
        assert whole.choices[0].message.content == "Hello"
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == 2
        assert whole.choices[0].logprobs is not None
        assert len(whole.choices[0].logprobs.content or ()) == 6
        chunks = list(
            client.chat.completions.create(
                model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
            )
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello"
        assert chunks[-1].usage is not None
        text = client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=1)
        assert [choice.text for choice in text.choices] == ["Hello", "Hello"]
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model=MODEL, messages=messages, temperature=3)
        assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="other", messages=messages)
        assert missing.value.code == "model_not_found"
        gateway.cluster.script = Script(fail_after=2, error=Overloaded("No."))
        with pytest.raises(openai.APIError) as failed:
            list(client.chat.completions.create(model=MODEL, messages=messages, stream=True))
        assert failed.value.code == "overloaded"


def test_openai_client_retries_as_told(gateway: RunningGateway) -> None:
    gateway.cluster.refuse = Overloaded("No.", retry_after_s=1.2)
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=1) as client:
        started = time.monotonic()
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model=MODEL, prompt="a")
        assert time.monotonic() - started >= 1.2  # its own backoff is half a second


async def test_openai_async_client(gateway: RunningGateway) -> None:
    gateway.cluster.script = Script(tuple(b"Hello"), delay_s=0.002)
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:

        async def one(index: int) -> str:
            messages: Any = [{"role": "user", "content": str(index)}]
            stream = await client.chat.completions.create(model=MODEL, messages=messages, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert await asyncio.gather(*map(one, range(20))) == ["Hello"] * 20
