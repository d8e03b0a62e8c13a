"""How a piece crosses a gloo link: cut into parts, each a long message between two short ones.

1. `Slots.parts` cuts a piece's blocks, alike on both sides.
2. P posts the receive of a one-byte receipt, then sends the part and a trailer that names piece and part
   (`PartSent`). D has posted the receives of both (`PartPosted`).
3. D waits for the trailer: the part, sent before it, is complete then. It compares the name and sends the
   receipt. P waits for the receipt: the part is D's, and its slot may be used again.

Each side waits for a short message only, so a peer that dies fails it at once, even in the middle of the
part, which gloo does not do for the part itself (see `edge_gloo_link`).
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from cluster.kv.block_copy import BlockRegion
from cluster.kv.edge import Piece
from cluster.kv.edge_gloo_link import NUM_TAGS, GlooLink

_TRAILER_BYTES = 16


class Tags(NamedTuple):
    """The gloo tags of a piece's messages, the same on both sides."""

    part: int
    trailer: int
    receipt: int


def piece_tags(piece: Piece) -> Tags:
    digest = blake2b(_identity(piece), digest_size=8).digest()
    first = 3 * (int.from_bytes(digest, "little") % (NUM_TAGS // 3 - 1)) + 1
    return Tags(first, first + 1, first + 2)


def trailer_of(piece: Piece, part: range) -> Tensor:
    """What follows a part of a piece; unlike a tag, no other part's is the same."""
    text = _identity(piece) + f"/{part.start}/{part.stop}".encode()
    return torch.frombuffer(bytearray(blake2b(text, digest_size=_TRAILER_BYTES).digest()), dtype=torch.uint8)


def _identity(piece: Piece) -> bytes:
    return f"{piece.attempt}/{piece.index}/{piece.first_block}/{piece.num_blocks}/{piece.request}".encode()


class Slots:
    """A staging buffer `[num_slots, blocks_per_slot, *block shape]` like the region it stages."""

    def __init__(self, region: BlockRegion, num_slots: int, blocks_per_slot: int) -> None:
        self.blocks_per_slot = blocks_per_slot
        self._blocks = torch.empty(
            (num_slots, blocks_per_slot, *region.blocks.shape[1:]), dtype=region.blocks.dtype
        )
        self.regions = [BlockRegion(slot) for slot in self._blocks]

    def bytes_of(self, slot: int, num_blocks: int) -> Tensor:
        """The first blocks of a slot as one flat tensor."""
        part: Tensor = self._blocks[slot, :num_blocks].view(-1)
        return part

    def parts(self, num_blocks: int) -> list[range]:
        """How a piece's blocks [0, num_blocks) are cut; the last part may be shorter."""
        step = self.blocks_per_slot
        return [range(start, min(start + step, num_blocks)) for start in range(0, num_blocks, step)]


class PartSent:
    """A part under way: its transfers, and the memory they use."""

    def __init__(self, link: GlooLink, data: Tensor, trailer: Tensor, tags: Tags) -> None:
        self._receipt, self._trailer = torch.empty(1, dtype=torch.uint8), trailer
        self._received = link.receive(self._receipt, tags.receipt)
        self._sent = [link.send(data, tags.part), link.send(trailer, tags.trailer)]

    def finish(self, link: GlooLink, deadline: float) -> None:
        """Until D has the part; the slot may be used again."""
        link.wait(self._received, deadline)
        for work in self._sent:  # done by now
            link.wait(work, deadline)


class PartPosted:
    """A posted part: its transfers, and the memory they use."""

    def __init__(self, link: GlooLink, data: Tensor, expected: Tensor, tags: Tags) -> None:
        self._expected, self._trailer = expected, torch.empty(_TRAILER_BYTES, dtype=torch.uint8)
        self._receipt, self._tags = torch.zeros(1, dtype=torch.uint8), tags
        self._data_received = link.receive(data, tags.part)
        self._trailer_received = link.receive(self._trailer, tags.trailer)

    def finish(self, link: GlooLink, deadline: float) -> None:
        """Until the part is here, and P knows."""
        link.wait(self._trailer_received, deadline)
        link.wait(self._data_received, deadline)  # done by now
        if not torch.equal(self._trailer, self._expected):
            raise link.failure("a part of another piece arrived")
        link.wait(link.send(self._receipt, self._tags.receipt), deadline)
