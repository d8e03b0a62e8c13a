"""Which worker has which prefix cached: what placement looks up to send a prompt where its KV is.

1. Workers report the hashes of the blocks that enter and leave their caches (`KvEvents`): `store`, `remove`.
   A worker that begins anew (`forget`) says all it has again.
2. A request that is placed `expect`s its prompt's blocks on its workers, until they have had time to report
   them: a burst with one prefix meets there.
3. `lookup` gives, for the hashes of a prompt, how many leading blocks each worker has.

A hash names the whole prefix up to its block (`cluster.block_hash`), and a worker that has a block has all
blocks before it. So holders only get fewer along a prompt, and where the set changes is found by bisection:
a look-up costs a few steps per *distinct set of holders*, not per block or worker; where a system prompt ends
is guessed first, since each step may read memory that nobody has touched for long. A wrong belief costs time,
never correctness: workers match their own caches and verify token ids.

Rows are those of the router's `Fleet`; the holders of a hash are the bits of one integer. Hashes are kept in
plain dictionaries, which the garbage collector does not look into: a million of them in sets would stop the
router for a fifth of a second each time. The index is several, since one that grows is copied at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from cluster.ids import BlockHash
from router.fleet import Column

MAX_LEVELS = 32  # different lengths told apart in one look-up; longer ones count as the last of them
_MAX_MASKS = 256
_MAX_ENDS = 4096
_NUM_PARTS = 16  # of the index: 1.4 million blocks in one dictionary, copied at once, took 60 ms
_FEW = 12  # rows up to which bits are taken one by one


class PrefixIndex:
    """Owns what is known of all workers' caches."""

    def __init__(self) -> None:
        self._parts: list[dict[BlockHash, int]] = [{} for _ in range(_NUM_PARTS)]
        # by a hash's last byte: hash |-> rows as bits; none is 0
        self._holders = tuple(self._parts[byte % _NUM_PARTS] for byte in range(256))
        self._stored: dict[int, dict[BlockHash, None]] = {}  # row |-> what its worker reported
        self._expected: dict[
            int, dict[BlockHash, int]
        ] = {}  # row |-> hash |-> requests that will have it there
        self._bits: list[int] = []
        self._ends: dict[BlockHash, int] = {}  # first block |-> last one that all its holders had, lately
        self._masks: dict[int, Column] = {}  # rows as bits |-> 1.0 at those; of large sets seen lately

    def __len__(self) -> int:
        """Blocks known, each once, however many workers have it."""
        return sum(map(len, self._parts))

    def stored(self, row: int) -> frozenset[BlockHash]:
        """Blocks this row's worker has reported."""
        return frozenset(self._stored.get(row, ()))

    # ---- what workers say

    def store(self, row: int, hashes: Iterable[BlockHash]) -> None:
        """Blocks that are in this worker's cache now. Fine for known ones."""
        stored = self._stored.setdefault(row, {})
        holders, bit = self._holders, self._bit(row)
        for block_hash in hashes:
            stored[block_hash] = None
            part = holders[block_hash[-1]]
            held = part.get(block_hash)  # alone it is the row's own number: a large one, that all share
            part[block_hash] = bit if held is None else held | bit

    def remove(self, row: int, hashes: Iterable[BlockHash]) -> None:
        """Blocks that have left this worker's cache. Fine for unknown ones."""
        stored = self._stored.get(row)
        if stored is None:
            return
        expected = self._expected.get(row, ())
        for block_hash in hashes:
            if block_hash in stored:
                del stored[block_hash]
                if block_hash not in expected:
                    self._drop(row, block_hash)

    def forget(self, row: int) -> None:
        """What this worker has reported is void."""
        self.remove(row, list(self._stored.get(row, ())))
        self._stored.pop(row, None)

    # ---- what requests will leave

    def expect(self, row: int, hashes: Sequence[BlockHash]) -> None:
        """A request's blocks will soon be in this worker's cache."""
        expected = self._expected.setdefault(row, {})
        holders, bit = self._holders, self._bit(row)
        for block_hash in hashes:
            num_requests = expected.get(block_hash, 0)
            expected[block_hash] = num_requests + 1
            if not num_requests:
                part = holders[block_hash[-1]]
                held = part.get(block_hash)
                part[block_hash] = bit if held is None else held | bit

    def unexpect(self, row: int, hashes: Sequence[BlockHash]) -> None:
        """Undo one `expect` of the same hashes. Fine after `leave`."""
        expected = self._expected.get(row)
        if expected is None:
            return
        stored = self._stored.get(row, ())
        for block_hash in hashes:
            num_requests = expected.pop(block_hash)
            if num_requests > 1:
                expected[block_hash] = num_requests - 1
            elif block_hash not in stored:
                self._drop(row, block_hash)
        if not expected:
            del self._expected[row]

    def leave(self, row: int) -> None:
        """The worker is gone: nothing of this row remains."""
        hashes = self._stored.pop(row, {}).keys() | self._expected.pop(row, {}).keys()
        for block_hash in hashes:
            self._drop(row, block_hash)

    # ---- look-ups

    def lookup(self, hashes: Sequence[BlockHash], num_rows: int) -> Column | None:
        """Leading blocks of a prompt by row; None if nobody has any."""
        levels = self._levels(hashes)
        if not levels:
            return None
        column: Column | None = None
        for num_blocks, rows in levels:
            if column is None:
                column = self._mask(rows, num_rows) * float(num_blocks)
            elif rows.bit_count() > _FEW:
                np.maximum(column, self._mask(rows, num_rows) * float(num_blocks), out=column)
            else:
                while rows:
                    lowest = rows & -rows
                    column[lowest.bit_length() - 1] = num_blocks
                    rows ^= lowest
        return column

    def _mask(self, rows: int, num_rows: int) -> Column:
        """1.0 at these rows, 0.0 elsewhere. Holders of a system prompt are the same in many look-ups."""
        mask = self._masks.get(rows)
        if mask is None or len(mask) != num_rows:
            packed = np.frombuffer(rows.to_bytes((num_rows + 7) // 8, "little"), dtype=np.uint8)
            mask = np.unpackbits(packed, count=num_rows, bitorder="little").astype(np.float64)
            if len(self._masks) >= _MAX_MASKS:
                self._masks.clear()
            self._masks[rows] = mask
        return mask

    def _levels(self, hashes: Sequence[BlockHash]) -> list[tuple[int, int]]:
        """(leading blocks, rows that have so many or more), fewest blocks first."""
        holders, levels = self._holders, []
        rows = self._rows(hashes[0]) if hashes else 0
        last = len(hashes) - 1
        end = guess = self._ends.get(hashes[0], 0) if rows else 0
        at = 0  # all of `rows` have the blocks up to this one
        while rows:
            if (held := self._rows(hashes[last])) == rows or held & rows == rows:
                levels.append((last + 1, rows))
                break
            if len(levels) == MAX_LEVELS:
                levels.append((at + 1, rows))
                break
            low, high = at, last  # all have the one, not all the other
            while high - low > 1:
                middle = (low + high) // 2
                if low < guess < high:
                    middle, guess = guess, end + 1 if guess == end else 0
                block_hash = hashes[middle]
                held = holders[block_hash[-1]].get(block_hash, 0)
                if held == rows or held & rows == rows:
                    low = middle
                else:
                    high = middle
            if at == 0 and rows.bit_count() > _FEW:
                self._note_end(hashes[0], low)
            further = self._rows(hashes[high]) & rows
            levels.append((low + 1, rows))
            rows, at = further, high
        return levels

    # ---- parts

    def _note_end(self, first: BlockHash, end: int) -> None:
        if len(self._ends) >= _MAX_ENDS:
            self._ends.clear()
        self._ends[first] = end

    def _rows(self, block_hash: BlockHash) -> int:
        """Those that have it, as bits."""
        return self._holders[block_hash[-1]].get(block_hash, 0)

    def _bit(self, row: int) -> int:
        while row >= len(self._bits):
            self._bits.append(1 << len(self._bits))
        return self._bits[row]

    def _drop(self, row: int, block_hash: BlockHash) -> None:
        """This row, which is a holder, is none any more."""
        part = self._holders[block_hash[-1]]
        rest = part[block_hash] ^ self._bits[row]
        if rest:
            part[block_hash] = rest
        else:
            del part[block_hash]
