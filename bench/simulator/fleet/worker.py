"""One simulated worker: its decode batch as counts and sums, its KV, its prefix cache.

A step costs O(1) whatever the batch: the batch is (rows, sum of contexts), a heap of the steps at which rows
finish, and a heap of when streams are due. All rows have been in every step since they joined, so a row's
worst gap is the longest step since then: a stack of steps, each longer than all after it, answers that.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import OrderedDict

from bench.simulator.fleet.request import Request
from bench.simulator.hardware import Hardware
from cluster.step_model import StepModel

BLOCK_TOKENS = 512  # of the traces' block ids


class PrefixCache:
    """KV of ended requests, by block; the least recently used goes first. It never holds more than is free."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, blocks: tuple[int, ...]) -> int:
        """How many of the first blocks are here."""
        count = 0
        for block in blocks:
            if block not in self._blocks:
                break
            count += 1
        return count

    def touch(self, blocks: tuple[int, ...], capacity: int) -> None:
        """Enter blocks as the most recently used ones, the first of a prompt last: it is the most shared."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        self.shrink(capacity)

    def shrink(self, capacity: int) -> None:
        while len(self._blocks) > max(0, capacity):
            self._blocks.popitem(last=False)


class Worker:
    """Owned by the simulation; policies read it."""

    __slots__ = (
        "busy_s",
        "cache",
        "chunks",
        "context",
        "due",
        "finishing",
        "hardware",
        "in_free_s",
        "index",
        "is_busy",
        "kv_used",
        "landed",
        "long_steps",
        "model",
        "num_prefilled",
        "out_free_s",
        "rows",
        "run_base_s",
        "run_growth_s",
        "run_length",
        "run_start_s",
        "steps",
        "version",
    )

    def __init__(self, index: int, hardware: Hardware) -> None:
        self.index = index
        self.hardware = hardware
        self.model: StepModel = hardware.model
        self.rows = 0
        self.context = 0
        self.steps = 0
        self.kv_used = 0  # by requests that compute or decode here; the cache has the rest
        self.cache = PrefixCache()
        self.landed: list[Request] = []  # join at the next step
        self.finishing: list[tuple[int, int, Request]] = []  # heap: (step, index, request)
        self.due: list[tuple[float, int, Request]] = []  # heap: (first token - steps * TPOT, index, request)
        self.long_steps: list[tuple[int, float]] = []  # (step, seconds): each longer than all later ones
        self.is_busy = False
        self.version = 0  # of the step or run in progress
        self.chunks: list[tuple[Request, int]] = []
        self.run_start_s = self.run_base_s = self.run_growth_s = 0.0
        self.run_length = 0
        self.in_free_s = self.out_free_s = 0.0
        self.busy_s = 0.0
        self.num_prefilled = 0

    @property
    def kv_room(self) -> int:
        return self.hardware.kv_tokens - self.kv_used

    def hold(self, num_tokens: int) -> None:
        """Take KV; cached blocks make room."""
        self.kv_used += num_tokens
        if self.cache and num_tokens > 0:
            self.cache.shrink(self.cache_blocks())

    def cache_blocks(self) -> int:
        return max(0, self.kv_room) // BLOCK_TOKENS

    def slack_s(self, now: float, tpot_s: float) -> float:
        """From now until the tightest stream is due."""
        due = self.due
        while due and (due[0][2].finish_s is not None or due[0][2].num_preemptions):
            heapq.heappop(due)
        return due[0][0] + (self.steps + 1) * tpot_s - now if due else math.inf

    def run_s(self, num_steps: int) -> float:
        """Seconds of the first `num_steps` of a run of decode steps; contexts grow by a row each."""
        return num_steps * self.run_base_s + self.run_growth_s * num_steps * (num_steps - 1) / 2

    def steps_until(self, elapsed_s: float) -> int:
        """Steps of the run that have ended, or are being computed, after `elapsed_s`."""
        low, high = 1, self.run_length
        while low < high:
            middle = (low + high) // 2
            if self.run_s(middle) >= elapsed_s:
                high = middle
            else:
                low = middle + 1
        return low

    def note_step(self, seconds: float) -> None:
        """A step (or a run, by its longest) that ends with step number `self.steps`."""
        stack = self.long_steps
        while stack and stack[-1][1] <= seconds:
            stack.pop()
        stack.append((self.steps, seconds))

    def longest_since(self, step: int) -> float:
        """The longest of the steps after number `step`."""
        index = bisect_left(self.long_steps, (step + 1, -1.0))
        return self.long_steps[index][1] if index < len(self.long_steps) else 0.0
