"""The bytes of streamed replies, HTTP framing included, are those recorded in `stream_bytes.txt`.

What is new in every reply (ids, times) is masked. A change that is meant is recorded anew with
`python -m tests.router.test_stream_bytes`.
"""

from __future__ import annotations

import json
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import WorkerLost
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.gateway import MODEL, RunningGateway, running_gateway
from tests.support.scripted_cluster import Script

RECORD = Path(__file__).with_name("stream_bytes.txt")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WORDS = tuple('Grüße, 世界 👋! Ein "Wort", \\ und\nein\tTab.'.encode())
CALL = tuple(b'Let me look. <tool_call>\n{"name": "look", "arguments": {"where": "here"}}\n</tool_call>')
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
LOST = WorkerLost("A worker that held this request was lost, and no other could go on with it.")

_MASKS = (
    (re.compile(rb'"id":"(chatcmpl|cmpl)-[0-9a-f]{32}"'), rb'"id":"\1-ID"'),
    (re.compile(rb'"created":\d+'), rb'"created":TIME'),
    (re.compile(rb'"id":"call_[0-9a-f]+"'), rb'"id":"call_ID"'),
    (re.compile(rb"(?m)^(date|openai-processing-ms): .*\r$"), rb"\1: MASKED\r"),
)

CASES: dict[str, tuple[str, Script, dict[str, Any]]] = {
    "chat": (CHAT, Script(WORDS), {}),
    "chat, several tokens at once": (CHAT, Script(WORDS, per_delivery=3), {}),
    "chat, usage at the end": (CHAT, Script(WORDS), {"stream_options": {"include_usage": True}}),
    "chat, usage in every chunk": (
        CHAT,
        Script(WORDS, per_delivery=2),
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "chat, length": (CHAT, Script(WORDS), {"max_tokens": 7}),
    "chat, one token": (CHAT, Script(WORDS), {"max_tokens": 1}),
    "chat, half a character at the end": (CHAT, Script(WORDS), {"max_tokens": 3}),
    "chat, stop string": (CHAT, Script(WORDS), {"stop": ["Wort", "Ein Satz"]}),
    "chat, stop string shown": (
        CHAT,
        Script(WORDS, per_delivery=5),
        {"stop": "Wort", "include_stop_str_in_output": True},
    ),
    "chat, log-probabilities": (CHAT, Script(WORDS[:14]), {"logprobs": True, "top_logprobs": 2}),
    "chat, token ids and timings": (CHAT, Script(WORDS[:9]), {"return_token_ids": True, "timings": True}),
    "chat, a tool call": (CHAT, Script(CALL), {"tools": [LOOK]}),
    "chat, failed at once": (CHAT, Script(WORDS, fail_after=0, error=LOST), {}),
    "chat, failed later": (CHAT, Script(WORDS, fail_after=5, error=LOST), {}),
    "text": (TEXT, Script(WORDS), {"max_tokens": 60}),
    "text, half a character first": (TEXT, Script(WORDS[3:], per_delivery=1), {"max_tokens": 9}),
    "text, usage": (TEXT, Script(WORDS), {"stream_options": {"include_usage": True}, "timings": True}),
    "text, echo and log-probabilities": (TEXT, Script(WORDS[:9]), {"echo": True, "logprobs": 1}),
    "text, token ids": (TEXT, Script(WORDS), {"return_token_ids": True}),
    "text, stop string": (TEXT, Script(WORDS), {"stop": [", 世", "!"], "max_tokens": 60}),
    "text, failed later": (TEXT, Script(WORDS, fail_after=5, error=LOST), {}),
}


def read_raw(gateway: RunningGateway, path: str, fields: dict[str, Any]) -> bytes:
    """All bytes of one answer, masked. The connection ends with it."""
    prompt = {"prompt": "Hi"} if path == TEXT else {"messages": [{"role": "user", "content": "Hi"}]}
    body = json.dumps({"model": MODEL, "stream": True, **prompt, **fields}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\nx-request-id: one\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    raw = b""
    with socket.create_connection(("127.0.0.1", gateway.port), 10) as connection:
        connection.sendall(head.encode() + body)
        while data := connection.recv(65_536):
            raw += data
    for pattern, mask in _MASKS:
        raw = pattern.sub(mask, raw)
    return raw


def record(gateway: RunningGateway) -> Iterator[str]:
    for name, (path, script, fields) in CASES.items():
        gateway.cluster.script = script
        yield f"==== {name}\n{read_raw(gateway, path, fields).decode('latin-1')!r}\n"


@pytest.mark.parametrize("name", CASES)
def test_the_bytes_are_the_recorded_ones(gateway: RunningGateway, name: str) -> None:
    path, script, fields = CASES[name]
    gateway.cluster.script = script
    raw = read_raw(gateway, path, fields).decode("latin-1")
    recorded = RECORD.read_text(encoding="utf-8").split("==== ")
    [expected] = [text.partition("\n")[2] for text in recorded if text.partition("\n")[0] == name]
    assert repr(raw) == expected.rstrip("\n")


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as directory,
        running_gateway(write_byte_tokenizer(Path(directory) / "tokenizer")) as running,
    ):
        RECORD.write_text("".join(record(running)), encoding="utf-8")
