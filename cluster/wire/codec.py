"""Messages to bytes and back: length-prefixed MessagePack, typed, sans-IO.

A frame is a big-endian u32 body length and the body, one MessagePack map whose `t` names the message type.

1. `encode` turns a message into one frame.
2. `FrameDecoder.feed` takes bytes as they come, split anywhere, and yields each complete message.
3. The first byte that cannot be right ends the decoder with a `ProtocolError` that names it. There is no
   resynchronising: the stream is closed.

A decoder never holds more than one frame of `max_frame_bytes` and what one `feed` brought. The process keeps
up to 64 runs of tokens that were decoded, of 256 KiB each at most (`unpack_run`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from struct import Struct
from typing import Any, Final, Generic, TypeVar

import msgspec

from cluster.errors import ProtocolError

_PREFIX: Final = Struct(">I")
PREFIX_BYTES: Final = _PREFIX.size
MAX_FRAME_BYTES: Final = 16 << 20  # body; a 128 k-token prompt takes 0.6 MB

M = TypeVar("M")

_ENCODER = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """One frame: length prefix and body.

    Raises:
        ProtocolError: the body is longer than a length prefix can say.
    """
    body = _ENCODER.encode(message)
    try:
        return len(body).to_bytes(PREFIX_BYTES, "big") + body
    except OverflowError:
        raise ProtocolError(f"{type(message).__name__} of {len(body)} bytes does not fit a frame") from None


@cache
def _body_decoder(decode_type: Any) -> msgspec.msgpack.Decoder[Any]:
    """Making one of many message types takes half a millisecond; it keeps nothing that it decodes."""
    return msgspec.msgpack.Decoder(decode_type)


class FrameDecoder(Generic[M]):
    """Bytes of one direction of one stream → messages of `decode_type` (a tagged union of Structs).

    Equal bytes give equal messages and errors however they are split.
    """

    def __init__(self, decode_type: Any, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = _body_decoder(decode_type)
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()  # of a frame that is not complete
        self._num_needed = PREFIX_BYTES  # until more can be said of it
        self._error: ProtocolError | None = None

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes of the frame that is not complete yet."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[M]:
        """Take `data`; yields the messages it completes, in order.

        Exhaust the iterator before the next `feed`.

        Raises (while iterating, after every message before the fault):
            ProtocolError: an oversized length, an unknown tag or field, a wrong type, no MessagePack, or what
                the message's own `check` refuses.
        """
        if not self._buffer:  # nearly always: most reads bring whole frames
            return self._messages(data)
        self._buffer += data
        if len(self._buffer) < self._num_needed:
            return iter(())
        data, self._buffer = self._buffer, bytearray()
        return self._messages(data)

    def finish(self) -> None:
        """The peer closed its side.

        Raises:
            ProtocolError: in the middle of a frame.
        """
        if self._buffer and self._error is None:
            raise ProtocolError(f"stream ended inside a frame: {len(self._buffer)} bytes of it arrived")

    def _messages(self, data: bytes | bytearray | memoryview) -> Iterator[M]:
        offset, num_fed, self._num_needed = 0, len(data), PREFIX_BYTES
        if self._error is not None:
            raise self._error
        try:
            while num_fed - offset >= PREFIX_BYTES:
                (num_bytes,) = _PREFIX.unpack_from(data, offset)
                if num_bytes > self._max_frame_bytes:
                    raise self._fail(
                        f"frame of {num_bytes} bytes is over the limit of {self._max_frame_bytes}"
                    )
                start, end = offset + PREFIX_BYTES, offset + PREFIX_BYTES + num_bytes
                if num_fed < end:
                    self._num_needed = PREFIX_BYTES + num_bytes
                    break
                try:
                    message = self._decoder.decode(data[start:end])
                    if (check := getattr(message, "check", None)) is not None:
                        check()
                except (msgspec.DecodeError, ValueError, RecursionError, MemoryError) as error:
                    # ValueError: a text that is none, or a `check`. MemoryError: a header may claim 2**32
                    # elements. RecursionError: nesting is the sender's choice.
                    raise self._fail(f"unreadable frame of {num_bytes} bytes: {error}") from error
                offset = end
                yield message
        finally:
            if offset < num_fed and self._error is None:
                self._buffer = bytearray(data[offset:])

    def _fail(self, message: str) -> ProtocolError:
        self._error = ProtocolError(message)
        return self._error
