import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.load.client.target import Target, parse_target, probe, why_gone
from cluster.errors import BatonError, ConfigError


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://127.0.0.1:8000", Target(host="127.0.0.1", port=8000)),
        ("http://host/", Target(host="host", port=80)),
        ("http://host:1/v1", Target(host="host", port=1)),
        ("http://host:1/v1/", Target(host="host", port=1)),
        ("http://host:1/team/a/v1", Target(host="host", port=1, base_path="/team/a")),
        ("https://host", Target(host="host", port=443, is_tls=True)),
        ("http://[::1]:80", Target(host="::1", port=80)),
        ("http://bücher.example", Target(host="xn--bcher-kva.example", port=80)),
        ("http://host/b%C3%BCcher", Target(host="host", port=80, base_path="/b%C3%BCcher")),
    ],
)
def test_urls(url: str, target: Target) -> None:
    assert parse_target(url) == target


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("127.0.0.1:8000", "is no server URL"),
        ("", "is no server URL"),
        ("ftp://host", "is no server URL"),
        ("http://", "is no server URL"),
        ("http://host:99999", "give a port from 1 to 65535"),
        ("http://host:x", "give a port from 1 to 65535"),
        ("http://host?x=1", "has no query"),
        ("http://me:secret@host", "has no query, fragment or user name"),
        ("http://:secret@host", "has no query, fragment or user name"),
        ("http://host:0", "give a port from 1 to 65535"),
        ("http://[::1", "is no server URL"),
        ("http://[nonsense]", "is no server URL"),
        ("http://host/bücher", "write it as `/b%C3%BCcher`"),
        ("http://host/a b", "write it as `/a%20b`"),
        ("http://bücher..x", r"`bücher\.\.x` is no host name"),
        ("http://a..x", r"`a\.\.x` is no host name"),
        ("http://" + "a" * 64, "is no host name"),
        ("http://me:secret@host", "variable that --api-key-env names"),
        ("http://host:8/v1/chat/completions", "give the server's alone, `http://host:8`"),
        ("http://host:8/base/v1/completions/", "give the server's alone, `http://host:8/base`"),
        ("http://host/v1/models", "give the server's alone, `http://host`"),
    ],
)
def test_wrong_urls_are_named(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        parse_target(url)
    assert "\n" not in str(caught.value)


def test_a_key_that_no_header_carries_is_refused() -> None:
    with pytest.raises(ConfigError, match="API key"):
        parse_target("http://host", api_key="a\r\nx: y")


def test_the_head_of_a_request() -> None:
    head = parse_target("http://[::1]:8000/base/v1", api_key="k").head("/v1/completions")
    assert head.startswith(b"POST /base/v1/completions HTTP/1.1\r\nhost: [::1]:8000\r\n")
    assert b"\r\nauthorization: Bearer k\r\n" in head
    assert b"\r\naccept-encoding: identity\r\n" in head
    assert head.endswith(b"\r\ncontent-length: ")


@contextmanager
def answering(*replies: bytes) -> Iterator[str]:
    """A server that gives each connection the next reply and closes."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(10.0)

    def serve() -> None:
        for reply in replies:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(10.0)
                connection.recv(65536)
                connection.sendall(reply)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        thread.join(10.0)
        listener.close()


@contextmanager
def trickling() -> Iterator[str]:
    """A server whose body never ends: a byte every few milliseconds, until the client leaves."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(10.0)
    over = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(ConnectionError):
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 999999\r\n\r\n")
            while not over.wait(0.005):
                connection.sendall(b" ")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        thread.join(10.0)
        listener.close()


def reply(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


MODELS = reply(b'{"data":[{"id":"a","max_model_len":4096},{"id":"b"}]}')


def test_a_probe_tells_model_length_and_version() -> None:
    with answering(MODELS, reply(b'{"version":"1.2"}')) as url:
        info = probe(parse_target(url))
    assert (info.model, info.models, info.version, info.max_model_len) == ("a", ("a", "b"), "1.2", 4096)


def test_a_server_need_not_have_a_version_or_a_length() -> None:
    with answering(MODELS, reply(b"", b"404 Not Found")) as url:
        info = probe(parse_target(url), model="b")
    assert (info.model, info.version, info.max_model_len) == ("b", None, None)
    assert info.owned_by is None


@pytest.mark.parametrize("answer", [b"", b"no HTTP\r\n\r\n", reply(b"[]"), reply(b'{"version":')])
def test_a_server_that_stumbles_over_its_version_has_none(answer: bytes) -> None:
    with answering(MODELS, answer) as url:
        info = probe(parse_target(url))
    assert (info.model, info.version) == ("a", None)


@pytest.mark.parametrize("length", ["0", "-1", "1", "true", '"4096"', "4096.0"])
def test_a_length_that_holds_nothing_is_not_known(length: str) -> None:
    models = b'{"data":[{"id":"a","max_model_len":%b}]}' % length.encode()
    with answering(reply(models), reply(b"", b"404 Not Found")) as url:
        assert probe(parse_target(url)).max_model_len is None


def test_an_answer_that_trickles_in_ends_at_the_limit() -> None:
    with trickling() as url, pytest.raises(BatonError, match=r"did not answer within 0\.1 s"):
        probe(parse_target(url), timeout_s=0.1)


def test_a_key_that_is_refused_is_told_apart_from_none() -> None:
    refusal = reply(b"", b"403 Forbidden")
    with answering(refusal) as url, pytest.raises(BatonError, match="the key given is not the right one"):
        probe(parse_target(url, api_key="k"))


def test_a_probe_tells_whose_server_it_is() -> None:
    with answering(reply(b'{"data":[{"id":"a","owned_by":"baton"}]}'), reply(b'{"version":"1"}')) as url:
        assert probe(parse_target(url)).owned_by == "baton"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (
            reply(b'{"error":{"message":"bad key"}}', b"401 Unauthorized"),
            "answered HTTP 401: bad key; no key was given: it comes from the environment variable",
        ),
        (
            b"HTTP/1.1 301 Moved\r\nlocation: https://other/v1/models\r\ncontent-length: 0\r\n\r\n",
            "answered HTTP 301: redirected to `https://other/v1/models`: give the address",
        ),
        (reply(b'{"data":[{"id":5}]}'), "does not list models"),
        (reply(b'{"data":[{"id":null}]}'), "does not list models"),
        (reply(b'{"data":["a"]}'), "does not list models"),
        (reply(b"<html>hello</html>"), "does not list models: is this an OpenAI-compatible server"),
        (reply(b"[]"), "does not list models"),
        (reply(b'{"data":[]}'), "serves no model"),
        (b"SSH-2.0-x\r\n", "does not speak HTTP"),
        (b"", "does not speak HTTP"),
    ],
)
def test_what_is_no_such_server_is_said_in_one_line(answer: bytes, why: str) -> None:
    with answering(answer) as url, pytest.raises(BatonError, match=why) as caught:
        probe(parse_target(url))
    assert "\n" not in str(caught.value)


def test_a_model_that_is_not_served() -> None:
    with answering(MODELS) as url, pytest.raises(BatonError, match="does not serve `c`; it serves: a, b"):
        probe(parse_target(url), model="c")


def test_a_refused_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(BatonError, match=f"nothing listens at `http://127.0.0.1:{port}`"):
        probe(parse_target(f"http://127.0.0.1:{port}"))


def test_a_server_that_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(BatonError, match=r"did not answer within 0\.2 s"):
            probe(parse_target(url), timeout_s=0.2)


def test_an_unknown_host() -> None:
    with pytest.raises(BatonError, match=r"the host name `no-such-host\.invalid` is not known"):
        probe(parse_target("http://no-such-host.invalid"))


@pytest.mark.parametrize("answer", [b"HTTP/1.0 400 Bad request\r\n\r\n", b""])
def test_https_spoken_to_a_plain_server_names_the_way_out(answer: bytes) -> None:
    with answering(answer) as url, pytest.raises(BatonError, match="write http:// instead of https://"):
        probe(parse_target(url.replace("http:", "https:")))


def test_http_spoken_to_a_tls_server_names_the_way_out() -> None:
    with answering(b"\x15\x03\x03\x00\x02\x02\x46") as url, pytest.raises(BatonError, match="write https://"):
        probe(parse_target(url))


def test_why_a_server_is_gone_is_a_clause() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    why = why_gone(Target(host="127.0.0.1", port=port))
    assert why is not None
    assert why.startswith(f"nothing listens at `http://127.0.0.1:{port}`")
    assert why[-1].isalnum()
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        why = why_gone(Target(host="127.0.0.1", port=deaf.getsockname()[1]), timeout_s=0.05)
        assert "did not answer within 0.05 s" in (why or "")


def test_a_server_that_answers_anything_is_there() -> None:
    with answering(MODELS, reply(b"", b"503 Service Unavailable")) as url:
        assert why_gone(parse_target(url)) is None
        assert why_gone(parse_target(url)) is None
