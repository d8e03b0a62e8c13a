"""Streamed requests as a client sees them: what was asked, and everything that came, to be compared.

1. `build_bodies` makes requests from a seed: completions and chats, greedy and sampled, with
   log-probabilities, penalties, stop strings, in turn.
2. `read_stream` sends one and reads its events to the end.
3. `Answer.result` is what must be equal in every run: text, ids, log-probabilities, finish reasons, usage.
"""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

TIMEOUT_S: Final = 180.0  # between two bytes; the server sends a comment every 15 s

_WORDS: Final = (
    *("river", "stone", "lantern", "harbor", "winter", "orchard", "signal", "copper", "meadow", "engine"),
    *("letter", "window", "captain", "garden", "thunder", "market", "island", "feather", "mirror", "candle"),
)


def build_bodies(
    num: int, seed: int, max_prompt_words: int, max_tokens: int
) -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of `num` different streamed requests."""
    rng = random.Random(seed)
    bodies: list[tuple[str, dict[str, Any]]] = []
    for index in range(num):
        words = [rng.choice(_WORDS) for _ in range(rng.randrange(8, max_prompt_words))]
        body: dict[str, Any] = {
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "timings": True,
            "max_tokens": rng.randrange(max_tokens // 2, max_tokens + 1),
        }
        if index % 2:
            body |= {"temperature": 0.9, "top_p": 0.95, "seed": rng.randrange(1 << 30)}
        else:
            body["temperature"] = 0
        if index % 3 == 0:
            body |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
        if index % 5 == 1:
            body["stop"] = ["\n\n", " the end", "ing "]
        else:
            body["ignore_eos"] = True
        if index % 4 == 3:
            body |= {"messages": [{"role": "user", "content": f"Tell me about: {' '.join(words)}."}]}
            if index % 8 == 3:
                body |= {"logprobs": True, "top_logprobs": 3}
            bodies.append(("/v1/chat/completions", body))
        else:
            body["prompt"] = f"Story {index}. " + " ".join(words)
            if index % 3 == 1:
                body["logprobs"] = 2
            bodies.append(("/v1/completions", body))
    return bodies


@dataclass(slots=True)
class Answer:
    """Everything of one stream. Times are wall-clock seconds."""

    status: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    num_prompt_tokens: int | None = None
    num_completion_tokens: int | None = None
    error: str | None = None
    done: bool = False
    attempts: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0
    max_gap_s: float = 0.0  # between two deliveries of tokens

    @property
    def is_complete(self) -> bool:
        return self.done and self.error is None and len(self.finish_reasons) == 1

    def result(self) -> tuple[Any, ...]:
        """What must not depend on the run."""
        return (
            self.text,
            tuple(self.token_ids),
            json.dumps(self.logprobs),
            tuple(self.finish_reasons),
            self.num_prompt_tokens,
            self.num_completion_tokens,
        )


def read_stream(
    host: str, port: int, path: str, body: dict[str, Any], on_token: Callable[[], object] = lambda: None
) -> Answer:
    """One request to its end; whatever breaks is in the answer. `on_token` is called with each delivery."""
    answer = Answer(started_at=time.time())
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer.status = response.status
        if response.status != 200:
            answer.error = response.read(500).decode(errors="replace")
            return answer
        last_s: float | None = None
        for line in response:
            if line.startswith(b"data: [DONE]"):
                answer.done = True
            elif line.startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                if _take(answer, event):
                    now = time.monotonic()
                    answer.max_gap_s = max(answer.max_gap_s, now - (last_s or now))
                    last_s = now
                    on_token()
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
        answer.ended_at = time.time()
    return answer


def _take(answer: Answer, event: dict[str, Any]) -> bool:
    """True if it brought tokens."""
    if "error" in event:
        answer.error = json.dumps(event["error"])
    if event.get("timings"):
        answer.attempts = event["timings"]["attempts"]
    if event.get("usage"):
        answer.num_prompt_tokens = event["usage"]["prompt_tokens"]
        answer.num_completion_tokens = event["usage"]["completion_tokens"]
    brought = False
    for choice in event.get("choices", ()):
        answer.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        answer.token_ids += choice.get("token_ids") or ()
        brought = brought or bool(choice.get("token_ids"))
        if choice.get("logprobs"):
            _take_logprobs(answer, choice["logprobs"])
        if choice.get("finish_reason"):
            answer.finish_reasons.append(choice["finish_reason"])
    return brought


def _take_logprobs(answer: Answer, logprobs: dict[str, Any]) -> None:
    """Per token, however the chunks were cut."""
    if "content" in logprobs:
        answer.logprobs += logprobs["content"] or ()
    else:
        columns = [logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")]
        answer.logprobs += [list(entry) for entry in zip(*columns, strict=True)]
