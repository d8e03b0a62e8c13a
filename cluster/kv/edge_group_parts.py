"""How a piece crosses a link: cut into parts (`edge_ring.cut`), each a long message and a short one.

1. P sends the part and then a trailer that names piece and part (`PartSent`). D has posted the receives of
   both, in this order (`PartPosted`).
2. D waits for the trailer: the part, sent before it, is complete then. It compares the name.
3. Where the backend has receipts, P has posted the receive of one byte before, D sends it, and P waits for
   it. Elsewhere P waits until its sends are through. The slot may be used again.

Each side waits for a short message only, so over gloo a peer that dies fails it at once, even in the middle
of the part, which gloo does not do for the part itself (see `edge_group_link`). Without receipts nothing
goes from D to P, and all that is on a group is in one order on both sides.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cluster.errors import EdgeError
from cluster.kv.block_copy import BlockRegion
from cluster.kv.edge import Piece
from cluster.kv.edge_device import CopyQueue
from cluster.kv.edge_group_link import NUM_TAGS, GroupLink

TRAILER_BYTES = 16


class Tags(NamedTuple):
    """The tags of a piece's messages, the same on both sides. NCCL has none: order alone matches there."""

    part: int
    trailer: int
    receipt: int


def piece_tags(piece: Piece) -> Tags:
    digest = blake2b(_identity(piece), digest_size=8).digest()
    first = 3 * (int.from_bytes(digest, "little") % (NUM_TAGS // 3 - 1)) + 1
    return Tags(first, first + 1, first + 2)


def trailer_of(piece: Piece, part: range) -> Tensor:
    """What follows a part of a piece; unlike a tag, no other part's is the same. On the host."""
    text = _identity(piece) + f"/{part.start}/{part.stop}".encode()
    return torch.frombuffer(bytearray(blake2b(text, digest_size=TRAILER_BYTES).digest()), dtype=torch.uint8)


def _identity(piece: Piece) -> bytes:
    return f"{piece.attempt}/{piece.index}/{piece.first_block}/{piece.num_blocks}/{piece.request}".encode()


class Slots:
    """A staging buffer `[num_slots, blocks_per_slot, *block shape]` like the region it stages, on `device`:
    beside it, or in host memory that its GPU copies to and from by itself. Each slot has room for the trailer
    of its part: once an edge is built it needs no more memory of a GPU, which may have none left."""

    def __init__(
        self, region: BlockRegion, num_slots: int, blocks_per_slot: int, device: torch.device
    ) -> None:
        """
        Raises:
            EdgeError: a GPU has no room for it.
        """
        is_pinned = device.type == "cpu" and not region.is_on_host
        try:
            self._blocks = torch.empty(
                (num_slots, blocks_per_slot, *region.blocks.shape[1:]),
                dtype=region.blocks.dtype,
                device=device,
                pin_memory=is_pinned,
            )
            self.trailers = torch.empty(
                (num_slots, TRAILER_BYTES), dtype=torch.uint8, device=device, pin_memory=is_pinned
            )
        except torch.OutOfMemoryError as error:
            num_bytes = num_slots * blocks_per_slot * region.block_bytes
            raise EdgeError(
                f"no room on {device} for {num_bytes / 2**20:.0f} MiB of staging: give the KV pool less"
            ) from error
        self.regions = [BlockRegion(slot) for slot in self._blocks]

    def bytes_of(self, slot: int, num_blocks: int) -> Tensor:
        """The first blocks of a slot as one flat tensor."""
        part: Tensor = self._blocks[slot, :num_blocks].view(-1)
        return part


class PartSent:
    """A part under way: its transfers, and the memory they use."""

    def __init__(self, link: GroupLink, data: Tensor, room: Tensor, trailer: Tensor, tags: Tags) -> None:
        """Posts after what the calling thread's stream has in it. `room`: for the trailer, beside `data`."""
        self._receipt = torch.empty(1, dtype=torch.uint8)
        self._received: Any = None
        if link.backend.has_receipts:
            self._received = link.receive(self._receipt, tags.receipt)
        room.copy_(trailer, non_blocking=True)
        self._sent: list[Any] = [link.send(data, tags.part), link.send(room, tags.trailer)]

    def finish(self, link: GroupLink, deadline: float) -> None:
        """Until D has the part, or will have it; the slot may be used again."""
        if self._received is not None:
            link.wait(self._received, deadline)
        for work in self._sent:  # with a receipt, done by now
            link.wait(work, deadline)


class PartPosted:
    """A posted part: its transfers, and the memory they use."""

    def __init__(
        self, link: GroupLink, data: Tensor, room: Tensor, expected: Tensor, tags: Tags, queue: CopyQueue
    ) -> None:
        """`room`: for the part's trailer, `expected`, beside `data`; `queue`: the edge's, on that device."""
        self._trailer, self._expected, self._tags, self._queue = room, expected, tags, queue
        self._receipt = torch.zeros(1, dtype=torch.uint8)
        with queue.order():
            room.zero_()
            self._data_received = link.receive(data, tags.part)
            self._trailer_received = link.receive(room, tags.trailer)

    def finish(self, link: GroupLink, deadline: float) -> None:
        """Until the part is here, and P knows."""
        link.wait(self._trailer_received, deadline)
        link.wait(self._data_received, deadline)  # done by now
        with self._queue.order():
            is_ours = torch.equal(self._trailer.cpu(), self._expected)
        if not is_ours:
            raise link.failure("a part of another piece arrived")
        if link.backend.has_receipts:
            link.wait(link.send(self._receipt, self._tags.receipt), deadline)
