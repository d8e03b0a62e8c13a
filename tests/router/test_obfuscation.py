"""`stream_options.include_obfuscation`: whoever sees only the sizes of encrypted chunks learns no token's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.reply import OBFUSCATION_BYTES
from tests.support.gateway import RunningGateway
from tests.support.scripted_cluster import Script
from tests.support.sse import CHAT, TEXT
from tests.support.tools import ADD

WORDS = (b"a", b"\xe4\xb8\x96\xe7\x95\x8c", b"a word or two", b'"\\"', b"x" * 40)
OPTIONS: dict[str, Any] = {"stream": True, "max_tokens": 100}


def deltas(raw: bytes) -> list[bytes]:
    """The chunks with text."""
    return [line for line in raw.split(b"\n\n") if b'"content":"' in line or b'"text":"' in line]


@pytest.mark.parametrize("kind", [CHAT, TEXT])
def test_chunks_differ_in_size_by_whole_steps(gateway: RunningGateway, kind: str) -> None:
    send = gateway.chat if kind == CHAT else gateway.complete
    sizes: set[int] = set()
    for word in WORDS:
        gateway.cluster.script = Script(word, per_delivery=len(word), first_delay_s=0.001)
        raw = send(**OPTIONS, stream_options={"include_obfuscation": True}).content
        plain = send(**OPTIONS).content
        assert b"obfuscation" not in plain
        (with_text,) = [line for line in deltas(raw) if json.loads(line[6:]).get("obfuscation")]
        chunk = json.loads(with_text[6:])
        shown = chunk["choices"][0]["delta"]["content"] if kind == CHAT else chunk["choices"][0]["text"]
        assert shown == word.decode()
        assert 0 < len(chunk["obfuscation"]) <= OBFUSCATION_BYTES
        sizes.add(len(with_text))
    assert len({size % OBFUSCATION_BYTES for size in sizes}) == 1
    assert len(sizes) == 2, "all but the longest look alike"


def test_what_pads_is_never_the_same(gateway: RunningGateway) -> None:
    gateway.cluster.script = Script(b"aaaaaaaa")
    raw = gateway.chat(**OPTIONS, stream_options={"include_obfuscation": True}).content
    padding = [json.loads(line[6:]).get("obfuscation") for line in deltas(raw)]
    shown = [one for one in padding if one]
    assert len(shown) == len(set(shown)) == 8


def test_text_that_was_held_back_until_the_end_is_padded_too(gateway: RunningGateway) -> None:
    """It could have become the call of a tool."""
    gateway.cluster.script = Script(b"so <tool_c")
    raw = gateway.chat(**OPTIONS, tools=[ADD], stream_options={"include_obfuscation": True}).content
    chunks = [json.loads(line[6:]) for line in deltas(raw)]
    shown = [(chunk["choices"][0]["delta"]["content"], "obfuscation" in chunk) for chunk in chunks]
    assert shown[0] == ("", False)  # the role
    assert "".join(text for text, _ in shown) == "so <tool_c"
    assert len(shown[-1][0]) > 1
    assert all(is_padded for _, is_padded in shown[1:])


def test_spaces_between_special_tokens(gateway: RunningGateway) -> None:
    """There are none. Who wants them, where special tokens are shown at all, is told."""
    name = "spaces_between_special_tokens"
    told = [
        gateway.complete(**{name: wanted, "skip_special_tokens": skip}).headers.get("x-baton-ignored")
        for wanted in (True, False)
        for skip in (True, False)
    ]
    assert told == [None, name, None, None]
