"""What the parent and its client processes tell each other: MessagePack frames with a length prefix.

Parent: `Setup`, then `Jobs` until all of them are there, later `Start`; `Stop` at any time. Client: `Ready`
once all is loaded, `Tick` several times a second (it is also the sign of life), `Finished` last.
"""

from __future__ import annotations

import msgspec

from bench.load.records import ClientReport, RequestRecord
from cluster.errors import ProtocolError

PREFIX_BYTES = 4
MAX_FRAME_BYTES = 1 << 30


class Job(msgspec.Struct, frozen=True, array_like=True):
    """A planned request, ready to be sent: its JSON is made before the run starts.

    The request's body is `body`, with `"messages": [history…, messages…]` put first when `messages` is not
    None.
    """

    index: int
    scheduled_s: float
    body: bytes  # a JSON object
    messages: bytes | None = None  # the inside of a JSON array: this turn's own messages
    session: int | None = None
    turn: int = 0
    think_s: float = 0.0
    has_next_turn: bool = False  # the answer belongs to a later turn's history
    input_tokens: int | None = None
    output_tokens: int | None = None
    prefix_group: int | None = None


class Setup(msgspec.Struct, frozen=True, tag=True):
    process: int
    host: str
    port: int
    is_tls: bool
    verify_tls: bool
    head: bytes  # request line and headers up to the value of content-length
    num_slots: int | None  # closed loop: requests in flight; None: open loop
    timeout_s: float  # per request, from the moment its sending began
    stall_s: float  # longest time without a byte from the server
    keep_text: bool
    core: int | None  # pin the process to it
    num_jobs: int


class Jobs(msgspec.Struct, frozen=True, tag=True):
    jobs: list[Job]


class Start(msgspec.Struct, frozen=True, tag=True):
    start_ns: int  # perf_counter_ns of the run's start, the same in all processes of a machine


class Stop(msgspec.Struct, frozen=True, tag=True):
    pass


class Ready(msgspec.Struct, frozen=True, tag=True):
    pass


class Tick(msgspec.Struct, frozen=True, tag=True):
    started: list[tuple[int, float]]  # (index, scheduled_s) since the last tick
    num_in_flight: int
    num_chunks: int  # with content, of the requests in flight
    records: list[RequestRecord]  # ended since the last tick


class Finished(msgspec.Struct, frozen=True, tag=True):
    report: ClientReport


ToClient = Setup | Jobs | Start | Stop
FromClient = Ready | Tick | Finished

_ENCODER = msgspec.msgpack.Encoder()


def encode_frame(message: ToClient | FromClient) -> bytes:
    payload = _ENCODER.encode(message)
    return len(payload).to_bytes(PREFIX_BYTES, "little") + payload


def frame_length(prefix: bytes) -> int:
    length = int.from_bytes(prefix, "little")
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return length


class FrameReader:
    """Cuts frames out of bytes as they come."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._buffer += data
        frames = []
        start = 0
        while len(self._buffer) - start >= PREFIX_BYTES:
            body = start + PREFIX_BYTES
            end = body + frame_length(bytes(self._buffer[start:body]))
            if len(self._buffer) < end:
                break
            frames.append(bytes(self._buffer[body:end]))
            start = end
        del self._buffer[:start]
        return frames
