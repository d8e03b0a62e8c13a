"""transformers as an engine for `openai_shim`, in two ways; runs in its own environment.

- `continuous`: its ContinuousBatchingManager. The manager's thread computes, ours hands its tokens on.
- `generate`: plain `model.generate`, one request after another in the order they came; a streamer hands on
  each token as it is produced.

`python -m bench.peers.shim_transformers --mode continuous --model DIR --name NAME --port PORT ...`
"""

from __future__ import annotations

import argparse
import queue
import threading
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.peers.openai_shim import Delta, Emit, Engine, Failed, Generation, serve

_NO_EOS = -1
_RESULT_WAIT_S = 1.0
_STOP_S = 10.0


class _TransformersEngine:
    """What both ways share: the model and its tokenizer."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.name: str = options.name
        self.max_model_len: int = options.max_model_len
        torch.set_num_threads(options.threads)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, local_files_only=True)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            options.model,
            dtype=getattr(torch, options.dtype),
            attn_implementation=options.attention,
            local_files_only=True,
        ).eval()
        eos = self._model.generation_config.eos_token_id
        self._eos_ids: list[int] = eos if isinstance(eos, list) else [] if eos is None else [eos]

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode_token(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id]))

    def _reason(self, last_id: int, ignore_eos: bool) -> str:
        return "stop" if not ignore_eos and last_id in self._eos_ids else "length"


class ContinuousEngine(_TransformersEngine):
    """`_sent` belongs to the thread that reads results, once a request's entry is made by `submit`."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        page_size, num_tokens = options.page_size, options.cache_tokens
        config = transformers.generation.ContinuousBatchingConfig(
            page_size=page_size,
            num_blocks=num_tokens // page_size,
            max_batch_tokens=options.max_num_batched_tokens,
            max_requests_per_batch=options.max_num_seqs,
            allow_block_sharing=False,
            use_cuda_graph=False,
        )
        generation = transformers.GenerationConfig(do_sample=False, eos_token_id=_NO_EOS, use_cache=True)
        self._manager = self._model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=config
        )
        self._sent: dict[int, int] = {}
        self._ignore_eos: dict[int, bool] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, emit: Emit, failed: Failed) -> None:
        def run() -> None:
            try:
                self._read_results(emit)
            except Exception as error:  # the thread's one broad catch: every request then ends with this
                failed(f"transformers failed: {error}")
                raise

        self._manager.start()
        self._thread = threading.Thread(target=run, name="transformers-results")
        self._thread.start()

    def submit(self, generation: Generation) -> None:
        self._sent[generation.request_id] = 0
        self._ignore_eos[generation.request_id] = generation.ignore_eos
        self._manager.add_request(
            generation.prompt_ids,
            request_id=str(generation.request_id),
            max_new_tokens=generation.max_tokens,
            streaming=True,
            eos_token_id=_NO_EOS if generation.ignore_eos else self._eos_ids or _NO_EOS,
        )

    def cancel(self, request_id: int) -> None:
        self._manager.cancel_request(str(request_id))

    def close(self) -> None:
        self._closed.set()
        self._manager.stop(block=True, timeout=_STOP_S, hard_stop=True)
        if self._thread is not None:
            self._thread.join(timeout=60)

    def _read_results(self, emit: Emit) -> None:
        while not self._closed.is_set():
            result = self._manager.get_result(timeout=_RESULT_WAIT_S)
            if result is not None:
                emit([self._news(result)])
            elif not self._manager.is_running() and not self._closed.is_set():
                raise RuntimeError("the generation thread ended; its log names the cause")

    def _news(self, result: Any) -> Delta:
        request_id = int(result.request_id)
        ids = result.generated_tokens[self._sent[request_id] :]
        self._sent[request_id] += len(ids)
        if not result.is_finished():
            return Delta(request_id, ids)
        del self._sent[request_id]
        ignore_eos = self._ignore_eos.pop(request_id)
        if result.error is not None:
            return Delta(request_id, ids, error=str(result.error))
        return Delta(request_id, ids, self._reason(result.generated_tokens[-1], ignore_eos))


class GenerateEngine(_TransformersEngine):
    """One `generate` call at a time."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self._inbox: queue.SimpleQueue[Generation | None] = queue.SimpleQueue()
        self._cancelled: set[int] = set()  # added to by the event loop, looked at by the thread
        self._thread: threading.Thread | None = None

    def start(self, emit: Emit, failed: Failed) -> None:
        def run() -> None:
            try:
                while (generation := self._inbox.get()) is not None:
                    if generation.request_id not in self._cancelled:
                        self._generate(generation, emit)
                    self._cancelled.discard(generation.request_id)
            except Exception as error:  # the thread's one broad catch: every request then ends with this
                failed(f"transformers failed: {error}")
                raise

        self._thread = threading.Thread(target=run, name="transformers-generate")
        self._thread.start()

    def submit(self, generation: Generation) -> None:
        self._inbox.put(generation)

    def cancel(self, request_id: int) -> None:
        self._cancelled.add(request_id)

    def close(self) -> None:
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join(timeout=60)

    def _generate(self, generation: Generation, emit: Emit) -> None:
        request_id = generation.request_id
        streamer = _TokenStreamer(request_id, emit)
        ids = torch.tensor([generation.prompt_ids])

        def is_cancelled(*_: Any, **__: Any) -> torch.Tensor:
            return torch.tensor([request_id in self._cancelled])

        with torch.inference_mode():
            self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=generation.max_tokens,
                do_sample=False,
                eos_token_id=None if generation.ignore_eos else self._eos_ids,
                streamer=streamer,
                stopping_criteria=[is_cancelled],
            )
        emit([Delta(request_id, finish_reason=self._reason(streamer.last_id, generation.ignore_eos))])


class _TokenStreamer(transformers.generation.streamers.BaseStreamer):  # type: ignore[misc]
    """Called by `generate` with the prompt, then with each new token."""

    def __init__(self, request_id: int, emit: Emit) -> None:
        self._request_id = request_id
        self._emit = emit
        self._is_prompt = True
        self.last_id = _NO_EOS

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        ids = value.flatten().tolist()
        self.last_id = ids[-1]
        self._emit([Delta(self._request_id, ids)])

    def end(self) -> None:
        """Nothing is held back."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.shim_transformers")
    parser.add_argument("--mode", choices=("continuous", "generate"), required=True)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), required=True)
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--page-size", type=int, default=256)
    parser.add_argument("--cache-tokens", type=int, default=65536)
    options = parser.parse_args()
    engine: Engine = ContinuousEngine(options) if options.mode == "continuous" else GenerateEngine(options)
    serve(engine, options.host, options.port)


if __name__ == "__main__":
    main()
