"""Streams between processes, as TCP would have them: ordered, delayed, and broken only as a whole.

Life of a message:

1. `Endpoint.post` gives it a delay; it never overtakes an earlier one of its direction, but ones of other
   streams and of the other direction freely.
2. It arrives, unless the receiver is stopped or the stream stalled: then it and all behind it are held, in
   order, until that is over.
3. When a stream is cut, or its sender dies, a prefix of what was under way still arrives and then the end,
   on each side at its own time. `close` loses nothing.

One message in `CODEC_EVERY` goes through the live codec. Only `duplicate` does what TCP does not: a message
is delivered twice, at once or after the one that follows it; the protocol claims that it does not matter.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from bench.simulator.events import EventQueue
from bench.simulator.process import Process
from cluster.wire.codec import FrameDecoder, encode
from cluster.wire.kv_events import RouterSays, WorkerSays
from cluster.wire.kv_messages import DecodeToPrefill, EdgeHello, EdgeWelcome, PrefillToDecode
from cluster.wire.messages import Refused, Register, Welcome

CODEC_EVERY: Final = 8
_EVERYTHING: Final = 1 << 60
_HANDSHAKE = (Register, Welcome, EdgeHello, EdgeWelcome, Refused)


class _End:
    """The end of a stream, as a message."""


_END: Final = _End()


class Handler(Protocol):
    """Who takes what arrives at one end."""

    def on_message(self, message: Any) -> None: ...

    def on_closed(self) -> None:
        """The stream is over, once; not called for an end that closed it itself."""
        ...


class Endpoint:
    """One process's end of a stream, and the direction towards it."""

    def __init__(self, network: Network, process: Process, decode_type: Any, delay_s: float) -> None:
        self.process = process
        self.handler: Handler | None = None
        self.peer: Endpoint = self  # set by the network
        self.is_open = True
        self.is_cut = False
        self._network = network
        self._queue = network.queue
        self._random = network.rng.random
        self._note = network.note
        self._decoder = network.decoder(decode_type)
        self._delay_s = delay_s
        self._factor = 1.0
        self._last_at = 0.0
        self._num_posted = 0
        self._num_arrived = 0
        self._lost_from = _EVERYTHING  # messages from this serial on are lost
        self._unsent_from = _EVERYTHING  # not sent yet by a sender that is stopped
        self._is_stalled = False
        self._held: deque[tuple[int, Any]] = deque()
        self._num_to_double = 0
        self._double: Any = None
        process.endpoints[self] = None

    # ---- what its process does

    def post(self, message: Any) -> None:
        """Send without waiting; dropped when the stream is over."""
        target = self.peer
        if self.is_open and not target.is_cut:
            target.enqueue(message)

    def close(self) -> None:
        """The peer gets what was posted, then the end. Nothing arrives here any more."""
        if not self.is_open:
            return
        self._shut()
        if not self.peer.is_cut:
            self.peer.enqueue(_END)
            self.peer.is_cut = self.is_cut = True

    # ---- faults

    def cut(self) -> None:
        """The stream breaks: each side gets a part of what was under way, then the end."""
        if not self.process.is_alive:
            self._shut()
        for end in (self, self.peer):
            if end.is_cut:
                continue
            under_way = min(end._num_posted, end._unsent_from)
            end._lost_from = self._network.rng.randint(end._num_arrived, max(under_way, end._num_arrived))
            end.is_cut = True
            end._is_stalled = False
            if end.is_open:
                end.enqueue(_END)
                end._drain()

    def stall(self) -> None:
        """Nothing arrives here until `heal`."""
        self._is_stalled = True

    def heal(self) -> None:
        self._is_stalled = False
        self._drain()

    def slow_down(self, factor: float) -> None:
        """Messages towards here take so many times as long; 1: as usual."""
        self._factor = factor

    @property
    def busy_until(self) -> float:
        """When the last message that is under way to here arrives."""
        return self._last_at

    def duplicate(self, count: int) -> None:
        """The next `count` messages towards here arrive twice."""
        self._num_to_double = count

    # ---- its process stops and goes on

    def hold_back_unsent(self) -> None:
        peer = self.peer
        peer._unsent_from = self._network.rng.randint(peer._num_arrived, peer._num_posted)

    def resume(self, delay_s: float) -> None:
        self.peer._unsent_from = _EVERYTHING
        self._queue.after(delay_s, self._drain)
        self._queue.after(delay_s, self.peer._drain)

    # ---- towards here

    def enqueue(self, message: Any) -> None:
        queue, serial = self._queue, self._num_posted
        self._num_posted = serial + 1
        if serial % CODEC_EVERY == 0 and message is not _END:
            (message,) = self._decoder.feed(encode(message))
        at = queue.now + self._delay_s * self._factor * (0.5 + self._random())
        if at < self._last_at:
            at = self._last_at
        self._last_at = at
        queue.push(at, self._arrive, (serial, message))
        if self._num_to_double and not isinstance(message, (_End, *_HANDSHAKE)):
            self._send_twice(message)

    def _send_twice(self, message: Any) -> None:
        """A copy right behind the message, or behind the one that follows."""
        late, self._double = self._double, None
        self._num_to_double -= 1
        if late is not None:
            self._queue.at(self._last_at, self._arrive, self._num_posted, late)
            self._num_posted += 1
        if self._num_to_double and self._network.rng.random() < 0.5:
            self._double = message
        else:
            self._queue.at(self._last_at, self._arrive, self._num_posted, message)
            self._num_posted += 1

    def _arrive(self, serial: int, message: Any) -> None:
        if self._held or self._is_stalled or self.process.is_stopped or serial >= self._unsent_from:
            self._held.append((serial, message))
            self._drain()
        elif self.is_open and self.process.is_alive and serial < self._lost_from and message is not _END:
            self._hand_over(serial, message)  # as `_take`, and nearly always
        else:
            self._take(serial, message)

    def _drain(self) -> None:
        while self._held and not (self._is_stalled or self.process.is_stopped):
            serial, message = self._held[0]
            if self._unsent_from <= serial < self._lost_from and message is not _END:
                return
            self._held.popleft()
            self._take(serial, message)

    def _take(self, serial: int, message: Any) -> None:
        if not self.is_open or not self.process.is_alive:
            return
        if message is _END:
            assert self.handler is not None, "an end that nobody serves"
            self._shut()
            self._note(self.process, "end of stream", None)
            self.handler.on_closed()
        elif serial < self._lost_from:
            self._hand_over(serial, message)

    def _hand_over(self, serial: int, message: Any) -> None:
        assert self.handler is not None, "a message for an end that nobody serves"
        self._num_arrived = serial + 1
        self._note(self.process, type(message).__name__, message)
        self.handler.on_message(message)

    def _shut(self) -> None:
        self.is_open = False
        self._held.clear()
        self.process.endpoints.pop(self, None)


class Network:
    """Makes streams. `note(process, what, message)` is told of everything that arrives there."""

    def __init__(
        self,
        queue: EventQueue,
        rng: random.Random,
        delay_s: float,
        note: Callable[[Process, str, Any], None],
    ) -> None:
        self.queue = queue
        self.rng = rng
        self.note = note
        self._delay_s = delay_s
        self._decoders: dict[Any, FrameDecoder[Any]] = {}  # of one kind of stream each

    def decoder(self, decode_type: Any) -> FrameDecoder[Any]:
        """Shared by all streams that carry such messages: they are given whole frames."""
        decoder = self._decoders.get(decode_type)
        if decoder is None:
            decoder = self._decoders[decode_type] = FrameDecoder(decode_type)
        return decoder

    def control_stream(self, worker: Process, router: Process) -> tuple[Endpoint, Endpoint]:
        return self._connect((worker, RouterSays), (router, WorkerSays))

    def kv_stream(self, prefill: Process, decode: Process) -> tuple[Endpoint, Endpoint]:
        return self._connect((prefill, DecodeToPrefill), (decode, PrefillToDecode))

    def delay(self) -> float:
        """Some delay between two processes."""
        return self._delay_s * (0.5 + self.rng.random())

    def _connect(
        self, dialer: tuple[Process, Any], listener: tuple[Process, Any]
    ) -> tuple[Endpoint, Endpoint]:
        """(the dialer's end, the listener's end); what each process can read."""
        near, far = (
            Endpoint(self, process, decode_type, self._delay_s * (0.5 + self.rng.random()))
            for process, decode_type in (dialer, listener)
        )
        near.peer, far.peer = far, near
        return near, far
