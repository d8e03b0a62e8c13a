"""An engine that counts: its i-th token is `first + i`; served by the shim as a peer would be.

A prompt that begins with 666 makes the engine fail; with 777 it yields one token and waits to be cancelled.
As a script: `python scripted_engine.py PORT [die]`.
"""

import queue
import sys
import threading

from bench.peers.openai_shim import Delta, Emit, Failed, Generation, serve

FAIL, HANG = 666, 777
EOS_AFTER = 3  # tokens, unless `ignore_eos`


class ScriptedEngine:
    name = "scripted"
    max_model_len = 512

    def __init__(self) -> None:
        self.cancelled: queue.Queue[int] = queue.Queue()
        self._inbox: queue.Queue[Generation | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def start(self, emit: Emit, failed: Failed) -> None:
        self._thread = threading.Thread(target=self._run, args=(emit, failed))
        self._thread.start()

    def submit(self, generation: Generation) -> None:
        self._inbox.put(generation)

    def cancel(self, request_id: int) -> None:
        self.cancelled.put(request_id)

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode_token(self, token_id: int) -> str:
        return f"<{token_id}>"

    def close(self) -> None:
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _run(self, emit: Emit, failed: Failed) -> None:
        while (generation := self._inbox.get()) is not None:
            first = generation.prompt_ids[0]
            if first == FAIL:
                failed("the engine broke")
                continue
            if first == HANG:
                emit([Delta(generation.request_id, [first])])
                continue
            stops = not generation.ignore_eos and generation.max_tokens > EOS_AFTER
            num = EOS_AFTER if stops else generation.max_tokens
            for i in range(num):
                emit([Delta(generation.request_id, [first + i])])
            emit([Delta(generation.request_id, finish_reason="stop" if stops else "length")])


if __name__ == "__main__":
    if sys.argv[2:] == ["die"]:
        sys.exit("cannot start: the dog ate the weights")
    serve(ScriptedEngine(), "127.0.0.1", int(sys.argv[1]))
