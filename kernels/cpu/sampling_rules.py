"""Sampling parameters and histories as the compiled sampler reads them, made once per request.

Parameters never change and generated ids are only ever appended to, so what was written for an object is
still right as long as that object lives: entries hold on to it, until there are too many.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernels.draw_kind import is_greedy
from kernels.ops import SamplingParameters, SamplingRequest

_LARGEST = float(np.finfo(np.float32).max)


class _Ids(ctypes.Structure):
    """`Ids` in processors.h."""

    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_int64))


class _Rule(ctypes.Structure):
    """`Rule` in processors.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("seed", "top_k", "num_logprobs", "min_tokens")),
        *((name, ctypes.c_double) for name in ("temperature", "top_p", "min_p")),
        *((name, ctypes.c_double) for name in ("repetition", "frequency", "presence")),
        ("bias_ids", _Ids),
        ("biases", ctypes.c_void_p),
        *((name, _Ids) for name in ("allowed", "ends", "bad_words")),
    )


class Rule:
    """One request's parameters; `address` is good as long as this object is kept."""

    __slots__ = (
        "_kept",
        "_rule",
        "address",
        "is_plain",
        "needs_count",
        "needs_history",
        "num_logprobs",
        "params",
    )

    def __init__(self, params: SamplingParameters) -> None:
        self.params = params
        self.num_logprobs = params.num_logprobs
        self._kept: list[NDArray[np.int64] | NDArray[np.float32]] = []
        biases = None
        if params.logit_bias:
            biases = np.array([bias for _, bias in params.logit_bias], np.float64).astype(np.float32)
            self._kept.append(biases)
        self._rule = _Rule(
            seed=_signed(params.seed),
            top_k=min(params.top_k, 2**62),
            num_logprobs=-1 if params.num_logprobs is None else params.num_logprobs,
            min_tokens=params.min_tokens,
            temperature=0.0 if is_greedy(params) else min(params.temperature, _LARGEST),
            top_p=params.top_p,
            min_p=min(params.min_p, 1.0),
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
            bias_ids=self._ids([token_id for token_id, _ in params.logit_bias]),
            biases=None if biases is None else biases.ctypes.data,
            allowed=self._ids(params.allowed_token_ids),
            ends=self._ids((*params.eos_token_ids, *params.stop_token_ids)),
            bad_words=self._ids([x for word in params.bad_words_ids for x in (len(word), *word)]),
        )
        self.address = ctypes.addressof(self._rule)
        self.needs_count = params.min_tokens > 0
        self.needs_history = (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
            or any(len(word) > 1 for word in params.bad_words_ids)
        )
        # neither what was generated before nor anything but the token is to be looked at
        self.is_plain = not self.needs_count and not self.needs_history and params.num_logprobs is None

    def _ids(self, ids: Sequence[int]) -> _Ids:
        if not ids:
            return _Ids()
        array = np.array(ids, np.int64)
        self._kept.append(array)
        return _Ids(array.ctypes.data, len(array))


class History:
    """A request's prompt and generated ids as arrays that follow its lists."""

    __slots__ = ("_num_output", "_output", "_output_address", "_prompt_address", "prompt", "request")

    def __init__(self, request: SamplingRequest, prompt: NDArray[np.int64] | None = None) -> None:
        """`prompt`: that of another history with the same list of prompt ids."""
        self.request = request
        self.prompt = np.array(request.prompt_ids, np.int64) if prompt is None else prompt
        self._prompt_address: int = self.prompt.ctypes.data
        self._output = np.empty(0, np.int64)
        self._output_address = 0
        self._num_output = 0

    def follow(self) -> tuple[int, int, int, int]:
        """Take what was generated since; addresses and sizes of the prompt and of the generated ids."""
        ids = self.request.output_ids
        num_ids = len(ids)
        if num_ids > len(self._output):
            self._output = np.empty(max(2 * num_ids, 64), np.int64)
            self._output_address = self._output.ctypes.data
            self._num_output = 0
        self._output[self._num_output : num_ids] = ids[self._num_output :]
        self._num_output = num_ids
        return self._prompt_address, len(self.prompt), self._output_address, num_ids


def _signed(seed: int) -> int:
    """The seed modulo 2^64, as the bits of an int64."""
    return ((seed + 2**63) & (2**64 - 1)) - 2**63
