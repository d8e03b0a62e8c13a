"""The block manager against a naive model, over random lives of sequences."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from cluster.ids import BlockId
from cluster.kv.block_manager import BlockManager

NUM_BLOCKS = 12
BLOCK_SIZE = 2
PROMPTS = st.lists(st.integers(0, 1), max_size=9).map(tuple)  # few letters: prefixes are shared often
SALTS = st.sampled_from(["", "s"])


class Sequence:
    """What the model knows of one sequence: its tokens, its blocks in order, and how much is computed."""

    def __init__(self, tokens: tuple[int, ...], salt: str, blocks: list[BlockId]) -> None:
        self.tokens, self.salt, self.blocks = tokens, salt, blocks


class BlockManagerMachine(RuleBasedStateMachine):
    """The model: a multiset of references, and for each block what its bytes were computed for."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE, "model")
        self.references = [0] * NUM_BLOCKS
        # Full blocks only: (salt, every token up to the block's end); None for partial or written ones.
        self.contents: list[tuple[str, tuple[int, ...]] | None] = [None] * NUM_BLOCKS

    def _hold(self, blocks: list[BlockId]) -> None:
        for block in blocks:
            self.references[block] += 1

    @rule(target=sequences, tokens=PROMPTS, salt=SALTS)
    def start(self, tokens: tuple[int, ...], salt: str):  # type: ignore[no-untyped-def]
        before = self.manager.counts()
        hit = self.manager.match(tokens, salt)
        assert len(hit) <= len(tokens) // BLOCK_SIZE
        for index, block in enumerate(hit):
            assert self.contents[block] == (salt, tokens[: (index + 1) * BLOCK_SIZE])
        self._hold(hit)
        num_rest = -(-len(tokens) // BLOCK_SIZE) - len(hit)
        available = self.manager.num_available
        assert available == sum(count == 0 for count in self.references)
        rest = self.manager.allocate(num_rest)
        if rest is None:
            assert num_rest > available
            self.manager.release(hit)
            for block in hit:
                self.references[block] -= 1
            assert self.manager.counts() == before
            return multiple()
        assert all(self.references[block] == 0 for block in rest)
        assert len(set(rest)) == len(rest)
        self._hold(rest)
        blocks = hit + rest
        for index in range(len(hit), len(blocks)):
            end = (index + 1) * BLOCK_SIZE
            self.contents[blocks[index]] = (salt, tokens[:end]) if end <= len(tokens) else None
        return Sequence(tokens, salt, blocks)

    @rule(sequence=sequences)
    def publish(self, sequence: Sequence) -> None:
        self.manager.publish(sequence.blocks, sequence.tokens, sequence.salt)
        found = self.manager.match(sequence.tokens, sequence.salt)
        assert len(found) == len(sequence.tokens) // BLOCK_SIZE
        self.manager.release(found)

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: Sequence) -> Sequence:
        self.manager.fork(sequence.blocks)
        self._hold(sequence.blocks)
        return Sequence(sequence.tokens, sequence.salt, list(sequence.blocks))

    @rule(target=sequences, sequence=consumes(sequences), token=st.integers(0, 1))
    def append(self, sequence: Sequence, token: int) -> Sequence:
        """Decode one token: write it into the last block, copied first when others hold it."""
        offset = len(sequence.tokens) % BLOCK_SIZE
        blocks = list(sequence.blocks)
        if offset == 0:
            grown = self.manager.allocate(1)
            if grown is None:
                assert all(count > 0 for count in self.references)
                return sequence
            self._hold(grown)
            blocks += grown
        else:
            written = self.manager.make_writable(blocks[-1])
            if written is None:
                assert all(count > 0 for count in self.references)
                return sequence
            block, source = written
            assert (source is None) == (self.references[blocks[-1]] == 1)
            if source is not None:
                self._hold([block])
                self.manager.release([source])
                self.references[source] -= 1
                blocks[-1] = block
        tokens = (*sequence.tokens, token)
        full = len(tokens) % BLOCK_SIZE == 0
        self.contents[blocks[-1]] = (sequence.salt, tokens) if full else None
        return Sequence(tokens, sequence.salt, blocks)

    @rule(sequence=sequences)
    def overwrite_last(self, sequence: Sequence) -> None:
        """A write into a block that may be published: no one may find it afterwards."""
        if not sequence.blocks or self.references[sequence.blocks[-1]] != 1:
            return
        last = sequence.blocks[-1]
        assert self.manager.make_writable(last) == (last, None)
        found = self.manager.match(sequence.tokens, sequence.salt)
        assert last not in found
        self.manager.release(found)

    @rule(sequence=consumes(sequences), whole=st.booleans())
    def release(self, sequence: Sequence, whole: bool) -> None:
        if whole:
            self.manager.release(sequence.blocks)
        else:  # head first, block by block: allowed, if unusual
            for block in sequence.blocks:
                self.manager.release([block])
        for block in sequence.blocks:
            self.references[block] -= 1

    @rule()
    def reset_cache(self) -> None:
        self.manager.reset_cache()
        assert self.manager.counts().cached == 0

    @invariant()
    def books_balance(self) -> None:
        self.manager.check_integrity()
        counts = self.manager.counts()
        assert counts.used == sum(count > 0 for count in self.references)
        assert counts.used + counts.cached + counts.free == NUM_BLOCKS
        assert self.manager.num_available == counts.cached + counts.free


BlockManagerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestBlockManager = BlockManagerMachine.TestCase
