"""Choosing tokens by the compiled library: all rows of a step in one call, which drops the GIL.

1. Each request's parameters are laid out once (`kernels.cpu.sampling_rules`). While the rows of a step are
   those of the step before, nothing of them is touched again.
2. Positions are read where they lie. Every step writes what was generated since where a rule looks at the
   history.
3. One call chooses the tokens; results are read from arrays that grow as needed and are used again.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kernels.cpu.checks import check_index
from kernels.cpu.sampling_rules import History, Rule
from kernels.ops import (
    MAXIMA_BLOCK,
    ChosenTokens,
    Positions,
    SamplingParameters,
    SamplingRequest,
    StepResult,
    TokenDetail,
)

_SPARE_ENTRIES = 64  # kept beyond twice the rows of a step


class NativeSampler:
    """`kernels.ops.FusedSampler`."""

    def __init__(self, library: Any, num_threads: int) -> None:
        """Raises:
        RuntimeError: the threads cannot be started.
        """
        sampler = library.baton_sampler_create(num_threads)
        if sampler is None:
            raise RuntimeError(f"a team of {num_threads} sampling threads cannot be started")
        self._library, self._sampler = library, sampler
        weakref.finalize(self, library.baton_sampler_destroy, sampler)
        self.largest_vocabulary: int = library.baton_sampler_largest_vocabulary()
        self._rules: dict[int, Rule] = {}  # by the id of the parameters, which the entry keeps alive
        self._histories: dict[int, History] = {}  # by the id of the request
        self._prompts: dict[int, History] = {}  # one of those, by the id of the prompt's ids
        # what was looked over last
        self._requests: Sequence[SamplingRequest] | None = None
        self._positions: Positions | None = None
        self._places = np.empty(0, np.int64)  # those positions, as they are read, if they were copied
        # others and where they lie, by their ids
        self._known_positions: dict[int, tuple[Positions, int]] = {}
        self._chosen = memoryview(b"")  # tokens of those rows
        self._params: list[SamplingParameters] = []  # of the rows the arrays below were written for
        self._row_rules: list[Rule] = []
        self._num_top = 0
        self._detailed: list[tuple[int, int]] = []  # (row, num_logprobs)
        self._following: list[int] = []  # rows whose rule looks at the history, or at its length
        self._seen: StepResult | None = None  # what the fields are for; its tensors are never others
        self._vocab_size = self._num_rows = 0  # of that
        self._fields = (ctypes.c_int64 * 14)()  # `Request` in sampling.h
        self._address = ctypes.addressof(self._fields)
        self._top_ids = np.empty(0, np.int64)
        self._top_logprobs = np.empty(0, np.float32)
        self._grow(8)

    def __call__(
        self, result: StepResult, requests: Sequence[SamplingRequest], positions: Positions
    ) -> ChosenTokens:
        """Raises:
        TypeError, ValueError: a tensor has another dtype or shape than it must.
        IndexError: an id in `best` names no logit; nothing was chosen.
        """
        if requests is not self._requests or positions is not self._positions or result is not self._seen:
            self._meet(result, requests, positions)
        if self._following:
            self._follow(requests)
        bad = self._library.baton_sample(self._sampler, self._address)
        if bad < 0:
            best = result.best[-1 - bad]
            raise IndexError(f"`best` names no logit of row {-1 - bad}: {best} of {self._vocab_size}")
        tokens = self._chosen.tolist()
        details: list[TokenDetail] = []
        num_top = self._num_top
        for row, num_logprobs in self._detailed:
            ids = self._top_ids[row * num_top : row * num_top + min(num_logprobs, self._vocab_size)].tolist()
            values = self._top_logprobs[row * num_top : row * num_top + len(ids)].tolist()
            details.append(TokenDetail(row, float(self._logprobs[row]), tuple(zip(ids, values, strict=True))))
        return tokens, details, bad

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the library's sampler and of what it is asked: the same as long as this lives."""
        return self._sampler, self._address

    @property
    def chosen(self) -> memoryview:
        """The tokens of the last call's rows, where calls for the same rows write them."""
        return self._chosen

    def is_plain(self, result: StepResult) -> bool:
        """Whether the last call was for `result`, reads positions where they were given, and did as all its
        rows want with nothing but logits and positions changed since."""
        is_same = result is self._seen and self._requests is not None and self._positions is not None
        return is_same and not self._following and not self._detailed

    def _meet(self, result: StepResult, requests: Sequence[SamplingRequest], positions: Positions) -> None:
        """What are the very ones of the call before need no look."""
        self._requests = None
        if result is not self._seen:
            self._look_at(result)
        num_rows = len(requests)
        if self._num_rows != num_rows or len(positions) != num_rows:
            raise ValueError(
                f"{len(positions)} positions, {num_rows} requests, {self._num_rows} rows of logits"
            )
        params = [request.params for request in requests]
        if params != self._params:
            self._lay_out(params)
        if positions is not self._positions:
            known = self._known_positions.get(id(positions)) or self._find(positions)
            self._positions, self._fields[8] = known
        self._requests = requests

    def _find(self, positions: Positions) -> tuple[Positions | None, int]:
        """These, if the next step's will be in the same place, and where they lie."""
        self._places = places = np.ascontiguousarray(positions, np.int64)
        if places is not positions:
            return None, places.ctypes.data
        if len(self._known_positions) >= _SPARE_ENTRIES:
            self._known_positions.clear()
        known = self._known_positions[id(positions)] = positions, places.ctypes.data
        return known

    def _look_at(self, result: StepResult) -> None:
        """Write the first fields."""
        fields = result.notes
        if fields is None:
            fields = result.notes = self._look_over(result)
        self._fields[:6] = fields
        self._seen, self._vocab_size, self._num_rows = result, fields[2], fields[3]

    def _look_over(self, result: StepResult) -> list[int]:
        """Check the tensors; the first fields for them."""
        logits, best, maxima = result.logits, result.best, result.maxima
        if logits.dtype is not torch.float32 or logits.dim() != 2 or not logits.is_cpu:
            raise TypeError(f"`logits` must be fp32 [rows, vocabulary] on the CPU: {logits.dtype}")
        stride, last_stride = logits.stride()
        num_rows, vocab_size = logits.shape
        if last_stride != 1:
            raise ValueError(f"`logits` must be rows of adjacent numbers: strides {stride}, {last_stride}")
        if not 0 < vocab_size <= self.largest_vocabulary:
            raise ValueError(f"a vocabulary of {vocab_size} is not between 1 and {self.largest_vocabulary}")
        check_index(best, (num_rows,), torch.int64, "best")
        if maxima is not None:
            check_index(maxima, (num_rows, -(-vocab_size // MAXIMA_BLOCK)), torch.float32, "maxima")
        if not best.is_contiguous() or not (maxima is None or maxima.is_contiguous()):
            raise ValueError("`best` and `maxima` must be contiguous")
        maxima_address = 0 if maxima is None else maxima.data_ptr()
        return [logits.data_ptr(), stride, vocab_size, num_rows, best.data_ptr(), maxima_address]

    def _lay_out(self, params: list[SamplingParameters]) -> None:
        """Prepare for rows of these parameters."""
        self._params = []
        rules = [self._rules.get(id(one)) or self._rule(one) for one in params]
        if len(rules) > len(self._tokens):
            self._grow(2 * len(rules))
        self._chosen = memoryview(self._tokens)[: len(rules)]  # type: ignore[arg-type]
        self._addresses[: len(rules)] = [rule.address for rule in rules]
        special = [(i, rule) for i, rule in enumerate(rules) if not rule.is_plain]
        if self._following:  # they have written there, addresses too
            self._progress.fill(0)
        self._following = [i for i, rule in special if rule.needs_history or rule.needs_count]
        self._detailed = [(i, rule.num_logprobs) for i, rule in special if rule.num_logprobs is not None]
        num_top = max([num for _, num in self._detailed], default=0)
        needed = num_top * len(rules)
        if needed > len(self._top_ids):
            self._top_ids, self._top_logprobs = np.empty(needed, np.int64), np.empty(needed, np.float32)
            self._point()
        if num_top != self._num_top:
            self._num_top = num_top
            self._point()
        if len(self._rules) > 2 * len(rules) + _SPARE_ENTRIES:
            self._rules = {id(rule.params): rule for rule in rules}
        self._row_rules, self._params = rules, params

    def _rule(self, params: SamplingParameters) -> Rule:
        """Of parameters that are new here."""
        rule = self._rules[id(params)] = Rule(params)
        return rule

    def _follow(self, requests: Sequence[SamplingRequest]) -> None:
        """Say what the rows that ask for it have generated."""
        if len(self._histories) > 2 * len(requests) + _SPARE_ENTRIES:
            current = {id(request) for request in requests}
            self._histories = {key: value for key, value in self._histories.items() if key in current}
            self._prompts = {id(one.request.prompt_ids): one for one in self._histories.values()}
        for row in self._following:
            request = requests[row]
            self._progress[row, 0] = len(request.output_ids)
            if not self._row_rules[row].needs_history:
                continue
            history = self._histories.get(id(request))
            if history is None:
                like = self._prompts.get(id(request.prompt_ids))  # drafts differ in their answers alone
                history = History(request, None if like is None else like.prompt)
                self._histories[id(request)] = self._prompts[id(request.prompt_ids)] = history
            self._progress[row, 1:] = history.follow()

    def _grow(self, num_rows: int) -> None:
        """Arrays for so many rows."""
        self._addresses = np.zeros(num_rows, np.uintp)
        # `Progress` in processors.h: number of generated ids; addresses, sizes of prompt and output
        self._progress = np.zeros((num_rows, 5), np.int64)
        self._tokens = np.empty(num_rows, np.int64)
        self._logprobs = np.empty(num_rows, np.float32)
        self._point()

    def _point(self) -> None:
        """Write the last fields."""
        self._fields[6:8] = [self._addresses.ctypes.data, self._progress.ctypes.data]
        self._fields[9:] = [
            self._tokens.ctypes.data,
            self._logprobs.ctypes.data,
            self._num_top,
            self._top_ids.ctypes.data,
            self._top_logprobs.ctypes.data,
        ]
