"""The JSON a request carries: made before the run, but for a chat's history, which is spliced in as bytes.

A later turn's messages follow all earlier messages and answers of its session; only the answer's text is
encoded while the run goes on.
"""

from __future__ import annotations

import orjson

from bench.load.frames import Job


class Chats:
    """Owner of the histories of one process's sessions."""

    def __init__(self) -> None:
        self._history: dict[int, bytes] = {}  # session |-> the inside of a JSON array

    def body(self, job: Job) -> bytes:
        """The request's body; its own messages become part of the session's history."""
        if job.messages is None:
            return job.body
        messages = job.messages
        if job.session is not None:
            history = self._history.get(job.session)
            if history:
                messages = history + b"," + messages
            if job.has_next_turn:
                self._history[job.session] = messages
        return b'{"messages":[%b]%b%b' % (messages, b"," if len(job.body) > len(b"{}") else b"", job.body[1:])

    def answered(self, job: Job, text: str) -> None:
        """The answer's text is part of what the next turn sends; the last turn lets the history go."""
        if job.session is None or job.messages is None:
            return
        if job.has_next_turn:
            answer = orjson.dumps({"role": "assistant", "content": text})
            self._history[job.session] += b"," + answer
        else:
            self._history.pop(job.session, None)
