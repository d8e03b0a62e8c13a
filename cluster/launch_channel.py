"""What the local launcher and a role's process say to each other, one message per packet of a socket pair.

1. The role says `Loaded` once its code is imported; the launcher says `Serve` once the model is prepared.
2. The role says `Serving` when it serves, `Alive` to each `Probe` that its event loop answered, and `Ended`.
3. A router that plans roles says `Wish`.
4. `Stop` asks it to drain. The end of the channel means that the other process is dead.

Both ends are one version of this code. The cluster's token travels in `Serve`, so it is in no file, argument
or environment.
"""

from __future__ import annotations

import socket
from typing import Final

import msgspec

from cluster.role_config import RouterConfig, WorkerConfig

MAX_PACKET_BYTES: Final = 1 << 17  # any Linux takes so much at once


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag=str.lower):
    pass


class Serve(_Message, frozen=True):
    config: RouterConfig | WorkerConfig


class Probe(_Message, frozen=True):
    number: int


class Stop(_Message, frozen=True):
    pass


class Loaded(_Message, frozen=True):
    """`error` is one line, "" for none; after an error the process ends."""

    error: str


class Serving(_Message, frozen=True):
    pass


class Alive(_Message, frozen=True):
    """To the probe of this number."""

    number: int


class Wish(_Message, frozen=True):
    """This worker should have that role."""

    worker: str
    role: str


class Ended(_Message, frozen=True):
    """The service is over: why, in one line, "" after a stop."""

    cause: str


FromLauncher = Serve | Probe | Stop
FromRole = Loaded | Serving | Alive | Wish | Ended

_FROM_LAUNCHER: Final = msgspec.json.Decoder(FromLauncher)
_FROM_ROLE: Final = msgspec.json.Decoder(FromRole)


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """The launcher's end and the role's. Packets arrive whole and in order."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def to_packet(message: FromLauncher | FromRole) -> bytes:
    packet = msgspec.json.encode(message)
    assert len(packet) <= MAX_PACKET_BYTES, f"{type(message).__name__} of {len(packet)} bytes"
    return packet


def from_launcher(packet: bytes) -> FromLauncher:
    """
    Raises:
        msgspec.DecodeError: not a message of this version.
    """
    message: FromLauncher = _FROM_LAUNCHER.decode(packet)
    return message


def from_role(packet: bytes) -> FromRole:
    """
    Raises:
        msgspec.DecodeError: not a message of this version.
    """
    message: FromRole = _FROM_ROLE.decode(packet)
    return message
