"""Real conversations: a JSON list as ShareGPT's exports have it.

`[{"id": …, "conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}, …]}, …]`; the list
of turns may also be called `conversation` or `messages`, and a turn may say `role` and `content`.

A conversation becomes its exchanges (question, recorded answer) and a system message, if it begins with one.
What comes before the first question is left out; it ends where questions and answers no longer alternate, or
one is empty. A conversation without an exchange is left out and counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from bench.load.plans.traces import TraceError, read_bytes

_LISTS = ("conversations", "conversation", "messages")
_ROLES = {
    "human": "user", "user": "user",
    "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant", "bing": "assistant",
    "bard": "assistant",
    "system": "system",
}  # fmt: skip
_OTHER_ROLES = ("tool", "function", "observation", "function_call", "function_response")
_EXPECTED = 'expected `{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}`'


@dataclass(frozen=True, slots=True)
class Exchange:
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Conversation:
    exchanges: tuple[Exchange, ...]
    system: str | None = None


@dataclass(frozen=True, slots=True)
class Conversations:
    path: str
    sha256: str
    conversations: tuple[Conversation, ...]
    num_empty: int  # left out: without a question and its answer


def read_sharegpt(path: Path) -> Conversations:
    """All conversations of `path`.

    Raises:
        TraceError: the file cannot be read, is not such a list, or has no usable conversation; names the
        entry.
    """
    content = read_bytes(path)
    try:
        entries = msgspec.json.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{path} is not JSON: {error}; {_EXPECTED} in a list.") from None
    if not isinstance(entries, list):
        raise TraceError(f"{path} is not a JSON list of conversations; {_EXPECTED} in a list.")
    read = [_conversation(entry, f"{path}, entry {number}") for number, entry in enumerate(entries, 1)]
    usable = tuple(conversation for conversation in read if conversation.exchanges)
    if not usable:
        raise TraceError(
            f"{path} has no conversation with a question and an answer: there is nothing to offer."
        )
    return Conversations(str(path), sha256(content).hexdigest(), usable, len(read) - len(usable))


def _conversation(entry: Any, where: str) -> Conversation:
    turns = next((entry[name] for name in _LISTS if name in entry), None) if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        raise TraceError(f"{where}: no list of turns; {_EXPECTED}.")
    messages = [_message(turn, f"{where}, turn {number}") for number, turn in enumerate(turns, 1)]
    system = messages[0][1] if messages and messages[0][0] == "system" else None
    roles = [role for role, _ in messages]
    start = roles.index("user") if "user" in roles else len(messages)
    exchanges = []
    for (role, question), (next_role, answer) in zip(
        messages[start::2], messages[start + 1 :: 2], strict=False
    ):
        if (role, next_role) != ("user", "assistant") or not question.strip() or not answer.strip():
            break
        exchanges.append(Exchange(question, answer))
    return Conversation(tuple(exchanges), system or None)


def _message(turn: Any, where: str) -> tuple[str, str]:
    if isinstance(turn, dict):
        role = turn.get("from", turn.get("role"))
        text = turn.get("value", turn.get("content"))
        if isinstance(role, str) and isinstance(text, str):
            known = _ROLES.get(role.lower())
            if known is not None:
                return known, text
            if role.lower() in _OTHER_ROLES:
                return role.lower(), text
            raise TraceError(f"{where}: the speaker `{role[:40]}` is unknown; {_EXPECTED}.")
    raise TraceError(f"{where}: not a speaker and a text; {_EXPECTED}.")
