"""llama.cpp as an engine for `openai_shim`; runs in an environment of its own.

The batching is what llama.cpp's own server does, in short:

1. Each request takes a free sequence of the one context.
2. A step's batch holds the next token of every request that decodes, then prompt tokens in order of
   arrival, up to `n_batch` in all.
3. `llama_decode` computes it; the largest logit of each row that asked for logits is that request's next
   token.

`python -m bench.peers.shim_llamacpp --libraries DIR --model GGUF --name NAME --port PORT --threads N ...`
With `--write TYPE OUT` it writes the model with weights of another type instead, and serves nothing.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import queue
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers.llamacpp_library import Token, open_library
from bench.peers.openai_shim import Delta, Emit, Failed, Generation, serve

FILE_TYPES = {"f16": 1, "q8_0": 7}
_PIECE_BYTES = 256


@dataclass(slots=True)
class _Slot:
    """One request in work on sequence `sequence`."""

    generation: Generation
    sequence: int
    position: int = 0  # tokens in the context
    next_token: int = -1  # once the prompt is in
    num_output: int = 0


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: int


class LlamaCppEngine:
    """See `openai_shim.Engine`. Context, batch and slots belong to the engine thread."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.name: str = options.name
        self.max_model_len: int = options.max_model_len
        self._library = open_library(options.libraries)
        model = self._library.llama_model_load_from_file(
            str(options.model).encode(), self._library.llama_model_default_params()
        )
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {options.model}")
        self._vocab = self._library.llama_model_get_vocab(model)
        self._num_vocab: int = self._library.llama_vocab_n_tokens(self._vocab)
        params = self._library.llama_context_default_params()
        params.n_ctx = options.cache_tokens
        params.n_batch = options.max_num_batched_tokens
        params.n_seq_max = options.max_num_seqs
        params.n_threads = params.n_threads_batch = options.threads
        params.kv_unified = True
        self._context = self._library.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context of this size")
        self._memory = self._library.llama_get_memory(self._context)
        self._num_batch: int = options.max_num_batched_tokens
        self._batch = self._library.llama_batch_init(self._num_batch, 0, 1)
        self._free = collections.deque(range(options.max_num_seqs))
        self._waiting: collections.deque[Generation] = collections.deque()
        self._slots: dict[int, _Slot] = {}  # by request id, in order of arrival
        self._inbox: queue.SimpleQueue[Generation | _Cancel | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, emit: Emit, failed: Failed) -> None:
        def run() -> None:
            try:
                self._run(emit)
            except Exception as error:  # the thread's one broad catch: every request then ends with this
                failed(f"llama.cpp failed: {error}")
                raise

        self._thread = threading.Thread(target=run, name="llamacpp-steps")
        self._thread.start()

    def submit(self, generation: Generation) -> None:
        self._inbox.put(generation)

    def cancel(self, request_id: int) -> None:
        self._inbox.put(_Cancel(request_id))

    def encode(self, text: str) -> list[int]:
        data = text.encode()
        room = len(data) + 8
        tokens = (Token * room)()
        num = self._library.llama_tokenize(self._vocab, data, len(data), tokens, room, False, True)
        return list(tokens[:num])

    def decode_token(self, token_id: int) -> str:
        buffer = ctypes.create_string_buffer(_PIECE_BYTES)
        num = self._library.llama_token_to_piece(self._vocab, token_id, buffer, _PIECE_BYTES, 0, True)
        return buffer.raw[: max(0, num)].decode(errors="replace")

    def close(self) -> None:
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join(timeout=60)

    def _run(self, emit: Emit) -> None:
        while self._take(wait=not self._slots):
            while self._waiting and self._free:
                generation = self._waiting.popleft()
                self._slots[generation.request_id] = _Slot(generation, self._free.popleft())
            if self._slots:
                emit(self._step())

    def _take(self, wait: bool) -> bool:
        """Everything in the inbox; the first item is waited for if `wait`. False: close."""
        while wait or not self._inbox.empty():
            item = self._inbox.get()
            wait = False
            if item is None:
                return False
            if isinstance(item, Generation):
                self._waiting.append(item)
            elif (slot := self._slots.pop(item.request_id, None)) is not None:
                self._release(slot)
            else:
                self._waiting = collections.deque(g for g in self._waiting if g.request_id != item.request_id)
        return True

    def _step(self) -> list[Delta]:
        self._batch.n_tokens = 0
        rows: list[tuple[int, _Slot]] = []  # (row of the batch with logits, whose)
        for slot in self._slots.values():
            if slot.next_token >= 0:
                self._add(slot, slot.next_token, True)
                rows.append((self._batch.n_tokens - 1, slot))
        for slot in self._slots.values():
            prompt = slot.generation.prompt_ids
            if slot.next_token >= 0 or self._batch.n_tokens == self._num_batch:
                continue
            end = min(len(prompt), slot.position + self._num_batch - self._batch.n_tokens)
            for token in prompt[slot.position : end]:
                self._add(slot, token, slot.position == len(prompt) - 1)
            if end == len(prompt):
                rows.append((self._batch.n_tokens - 1, slot))
        status = self._library.llama_decode(self._context, self._batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        return [self._advance(row, slot) for row, slot in rows]

    def _add(self, slot: _Slot, token: int, wants_logits: bool) -> None:
        batch, row = self._batch, self._batch.n_tokens
        batch.token[row] = token
        batch.pos[row] = slot.position
        batch.n_seq_id[row] = 1
        batch.seq_id[row][0] = slot.sequence
        batch.logits[row] = wants_logits
        batch.n_tokens = row + 1
        slot.position += 1

    def _advance(self, row: int, slot: _Slot) -> Delta:
        """The row's largest logit becomes the next token of its request."""
        logits = self._library.llama_get_logits_ith(self._context, row)
        token = int(np.ctypeslib.as_array(logits, (self._num_vocab,)).argmax())
        slot.next_token = token
        slot.num_output += 1
        generation = slot.generation
        reason = None
        if not generation.ignore_eos and self._library.llama_vocab_is_eog(self._vocab, token):
            reason = "stop"
        elif slot.num_output == generation.max_tokens:
            reason = "length"
        if reason is not None:
            del self._slots[generation.request_id]
            self._release(slot)
        return Delta(generation.request_id, [token], reason)

    def _release(self, slot: _Slot) -> None:
        self._library.llama_memory_seq_rm(self._memory, slot.sequence, -1, -1)
        self._free.append(slot.sequence)


def write_model(libraries: Path, model: Path, file_type: str, out: Path) -> None:
    """The model with its weights as `file_type`; 16-bit weights hold the values of the quantized ones."""
    library: Any = open_library(libraries)
    params = library.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[file_type]
    params.allow_requantize = True
    out.parent.mkdir(parents=True, exist_ok=True)
    status = library.llama_model_quantize(str(model).encode(), str(out).encode(), ctypes.byref(params))
    if status != 0:
        raise RuntimeError(f"llama_model_quantize returned {status}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.shim_llamacpp")
    parser.add_argument("--libraries", required=True, type=Path)
    parser.add_argument("--model", required=True, type=Path, help="GGUF file")
    parser.add_argument("--write", nargs=2, metavar=("TYPE", "OUT"), help=f"TYPE: {', '.join(FILE_TYPES)}")
    parser.add_argument("--name", default="model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--cache-tokens", type=int, default=65536)
    options = parser.parse_args()
    if options.write is not None:
        write_model(options.libraries, options.model, options.write[0], Path(options.write[1]))
        return 0
    serve(LlamaCppEngine(options), options.host, options.port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
