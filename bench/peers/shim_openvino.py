"""OpenVINO GenAI's continuous-batching pipeline as an engine for `openai_shim`; runs in its own environment.

1. `submit` puts the request into an inbox; the one engine thread takes all of it before each step.
2. Each `step` of the pipeline may produce one token for every running request; all are emitted together.
3. A cancelled request is cancelled in the pipeline before the next step.

`python -m bench.peers.shim_openvino --model DIR_OR_GGUF --name NAME --port PORT --threads N ...`
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from bench.peers.openai_shim import Delta, Emit, Failed, Generation, serve


class _Cancel:
    def __init__(self, request_id: int) -> None:
        self.request_id = request_id


class OpenVinoEngine:
    """See `openai_shim.Engine`. Handles belong to the engine thread."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.name: str = options.name
        self.max_model_len: int = options.max_model_len
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = options.max_num_batched_tokens
        scheduler.max_num_seqs = options.max_num_seqs
        scheduler.cache_size = options.cache_gb
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = options.prefix_caching
        properties: dict[str, Any] = {
            "PERFORMANCE_HINT": options.hint,
            "INFERENCE_NUM_THREADS": options.threads,
        }
        properties |= json.loads(options.properties)
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(options.model), scheduler, "CPU", properties
        )
        self._tokenizer = self._pipeline.get_tokenizer()
        self._inbox: queue.SimpleQueue[Generation | _Cancel | None] = queue.SimpleQueue()
        self._handles: dict[int, Any] = {}
        self._thread: threading.Thread | None = None

    def start(self, emit: Emit, failed: Failed) -> None:
        def run() -> None:
            try:
                self._run(emit)
            except (
                Exception
            ) as error:  # the thread's one broad catch: every request then ends with this sentence
                failed(f"the OpenVINO pipeline failed: {error}")
                raise

        self._thread = threading.Thread(target=run, name="openvino-steps")
        self._thread.start()

    def submit(self, generation: Generation) -> None:
        self._inbox.put(generation)

    def cancel(self, request_id: int) -> None:
        self._inbox.put(_Cancel(request_id))

    def encode(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=False).input_ids.data
        return [int(i) for i in ids[0]]

    def decode_token(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def close(self) -> None:
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join(timeout=60)

    def _run(self, emit: Emit) -> None:
        while self._take(wait=not self._handles):
            if not self._handles:
                continue
            self._pipeline.step()
            deltas = [delta for i, handle in self._handles.items() for delta in _news(i, handle)]
            for delta in deltas:
                if delta.finish_reason is not None or delta.error is not None:
                    del self._handles[delta.request_id]
            if deltas:
                emit(deltas)

    def _take(self, wait: bool) -> bool:
        """Everything in the inbox; the first item is waited for if `wait`. False: close."""
        while wait or not self._inbox.empty():
            item = self._inbox.get()
            wait = False
            if item is None:
                return False
            if isinstance(item, _Cancel):
                handle = self._handles.pop(item.request_id, None)
                if handle is not None:
                    handle.cancel()
            else:
                self._handles[item.request_id] = self._add(item)
        return True

    def _add(self, generation: Generation) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = generation.max_tokens
        config.ignore_eos = generation.ignore_eos
        config.do_sample = False
        if not generation.ignore_eos:
            config.set_eos_token_id(self._tokenizer.get_eos_token_id())
        ids = openvino.Tensor(np.array([generation.prompt_ids], dtype=np.int64))
        return self._pipeline.add_request(generation.request_id, ids, config)


_REASONS = {
    openvino_genai.GenerationFinishReason.STOP: "stop",
    openvino_genai.GenerationFinishReason.LENGTH: "length",
}


def _news(request_id: int, handle: Any) -> list[Delta]:
    deltas = []
    while handle.can_read():
        for output in handle.read().values():
            reason = _REASONS.get(output.finish_reason)
            deltas.append(Delta(request_id, list(output.generated_ids), reason))
    if not deltas and handle.get_status() == openvino_genai.GenerationStatus.IGNORED:
        deltas.append(Delta(request_id, error="the pipeline had no room for this request"))
    return deltas


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.shim_openvino")
    parser.add_argument("--model", required=True, type=Path, help="exported directory or .gguf file")
    parser.add_argument("--name", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--hint", choices=("LATENCY", "THROUGHPUT"), default="LATENCY")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--cache-gb", type=int, default=4)
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--properties", default="{}", help="JSON object of further OpenVINO properties")
    options = parser.parse_args()
    serve(OpenVinoEngine(options), options.host, options.port)


if __name__ == "__main__":
    main()
