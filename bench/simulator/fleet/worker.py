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
    """KV of ended requests, by block; the least recently used goes first. It holds no more than is free."""

    def __init__(self, holders: dict[int, int] | None = None, index: int = 0) -> None:
        """`holders`: of all workers of a pool, block |-> those that have it, as bits; `index`: which of them
        this one is."""
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.holders: dict[int, int] = {} if holders is None else holders
        self._bit = 1 << index

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
        holders, bit = self.holders, self._bit
        for block in reversed(blocks):
            if block not in self._blocks:
                others = holders.get(block)
                holders[block] = bit if others is None else others | bit
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        self.shrink(capacity)

    def shrink(self, capacity: int) -> None:
        while len(self._blocks) > max(0, capacity):
            block, _ = self._blocks.popitem(last=False)
            others = self.holders[block] & ~self._bit
            if others:
                self.holders[block] = others
            else:
                del self.holders[block]


def leading_blocks(holders: dict[int, int], blocks: tuple[int, ...]) -> dict[int, int]:
    """How many of the first blocks each worker has, by index; those that have none are left out. As
    `PrefixCache.match` of each."""
    found: dict[int, int] = {}
    count, having = 0, holders.get(blocks[0], 0)
    while having:
        count += 1
        still = having & holders.get(blocks[count], 0) if count < len(blocks) else 0
        lost = having & ~still
        while lost:
            lowest = lost & -lost
            found[lowest.bit_length() - 1] = count
            lost ^= lowest
        having = still
    return found


class Batch:
    """Rows that decode in the same steps: counts, sums, and when each is done."""

    __slots__ = ("context", "finishing", "long_steps", "rows", "steps")

    def __init__(self) -> None:
        self.rows = 0
        self.context = 0
        self.steps = 0
        self.finishing: list[tuple[int, int, Request]] = []  # heap: (step, index, request)
        self.long_steps: list[tuple[int, float]] = []  # (step, seconds): each longer than all later ones

    def join(self, request: Request) -> None:
        self.rows += 1
        self.context += request.num_tokens + 1
        request.start_step = self.steps
        finish = self.steps + request.num_output - request.num_generated
        heapq.heappush(self.finishing, (finish, request.index, request))

    def leave(self, request: Request) -> int:
        """Out of the sums; its worst gap is known now. The caller takes it out of the heap. Returns the
        tokens it generated here."""
        grown = self.steps - request.start_step
        self.rows -= 1
        self.context -= request.num_tokens + 1 + grown
        request.worst_gap_s = max(request.worst_gap_s, self._longest_since(request.start_step))
        if not self.rows:
            self.long_steps.clear()  # whoever joins asks of later steps only
        return grown

    def next_finish(self) -> int:
        """Steps until the first of them is done."""
        return self.finishing[0][0] - self.steps

    def advance(self, num_steps: int, longest_s: float) -> list[Request]:
        """Take steps, the longest of `longest_s` from token to token; those that are done, still counted."""
        self.steps += num_steps
        self.context += self.rows * num_steps
        stack = self.long_steps
        while stack and stack[-1][1] <= longest_s:
            stack.pop()
        stack.append((self.steps, longest_s))
        done = []
        while self.finishing and self.finishing[0][0] <= self.steps:
            done.append(heapq.heappop(self.finishing)[2])
        return done

    def pop_latest(self) -> Request:
        """The row that joined last, out of the heap."""
        at = max(
            range(len(self.finishing)), key=lambda i: (self.finishing[i][2].start_step, self.finishing[i][1])
        )
        request = self.finishing.pop(at)[2]
        heapq.heapify(self.finishing)
        return request

    def _longest_since(self, step: int) -> float:
        index = bisect_left(self.long_steps, (step + 1, -1.0))
        return self.long_steps[index][1] if index < len(self.long_steps) else 0.0


class Worker:
    """Owned by the simulation; policies read it."""

    def __init__(self, index: int, hardware: Hardware, holders: dict[int, int] | None = None) -> None:
        self.index = index
        self.hardware = hardware
        self.model: StepModel = hardware.model
        self.batch = Batch()  # in every step
        self.yielding = Batch()  # rows whose first token was late: in the steps that the policy allows
        self.yielded_s = 0.0  # end of the last step that they were in
        self.steps = 0
        self.kv_used = 0  # by requests that compute or decode here; the cache has the rest
        self.cache = PrefixCache(holders, index)
        self.landed: list[Request] = []  # join at the next step
        self.due: list[tuple[float, int, Request]] = []  # heap: (first token - steps * TPOT, index, request)
        self.is_busy = False
        self.version = 0  # of the step or run in progress
        self.chunks: list[tuple[Request, int]] = []
        self.runs_yielding = False
        self.run_start_s = self.run_base_s = self.run_growth_s = 0.0
        self.run_length = 0
        self.in_free_s = self.out_free_s = 0.0
        self.busy_s = 0.0

    @property
    def rows(self) -> int:
        return self.batch.rows + self.yielding.rows

    @property
    def context(self) -> int:
        return self.batch.context + self.yielding.context

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

    def is_due(self, request: Request, due_s: float) -> None:
        """A row of the batch must be done by `due_s`, with as many steps as there have been subtracted."""
        due = self.due
        if len(due) > 16 + 2 * self.batch.rows:  # most of them have ended, below the first
            due[:] = [one for one in due if one[2].finish_s is None and not one[2].num_preemptions]
            heapq.heapify(due)
        heapq.heappush(due, (due_s, request.index, request))

    def slack_s(self, now: float, tpot_s: float) -> float:
        """From now until the tightest stream is due."""
        due = self.due
        while due and (due[0][2].finish_s is not None or due[0][2].num_preemptions):
            heapq.heappop(due)
        return due[0][0] + (self.batch.steps + 1) * tpot_s - now if due else math.inf

    def slacks_s(self, now: float, tpot_s: float) -> list[float]:
        """From now until each stream is due."""
        from_s = (self.batch.steps + 1) * tpot_s - now
        return [
            due_s + from_s for due_s, _, one in self.due if one.finish_s is None and not one.num_preemptions
        ]

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
