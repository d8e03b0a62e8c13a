"""Who may speak: version check and mutual proof of the cluster token, before any message is read. Sans-IO.

Every frame has the same fixed size, so an unauthenticated peer can make us hold 72 bytes and no more.

1. dialler → listener  HELLO      nonce_d
2. listener → dialler  CHALLENGE  nonce_l, HMAC(token, "listener" nonce_d nonce_l)
3. dialler → listener  PROOF      HMAC(token, "dialler" nonce_d nonce_l)
4. listener → dialler  WELCOME

Each side proves the token over both nonces under its own label, so a proof can be neither replayed nor
reflected. A peer of another version gets a REJECT that carries ours, so both ends can name both numbers.

`receive(frame)` returns the bytes to send back; afterwards exactly one of: more is expected, `is_done`,
or `error` is set (send the reply if there is one, then close).
"""

from __future__ import annotations

import hmac
import secrets
from enum import Enum
from hashlib import sha256
from typing import Final, Protocol

from cluster.errors import AuthenticationError, ProtocolError, WireError
from cluster.wire.messages import PROTOCOL_VERSION

NONCE_BYTES: Final = 32
FRAME_BYTES: Final = 72  # magic 5, kind 1, version 2, nonce 32, proof 32
MIN_TOKEN_BYTES: Final = 16

_MAGIC: Final = b"BATON"
_EMPTY: Final = bytes(32)


class Kind(Enum):
    """What a handshake frame is; the value is its byte."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REJECT = 5


class Handshake(Protocol):
    """Either end, as the driver sees it."""

    is_done: bool
    error: WireError | None

    def start(self) -> bytes: ...

    def receive(self, frame: bytes) -> bytes: ...


class DiallerHandshake:
    """The end that connects. `nonce` is for tests only."""

    def __init__(self, token: bytes, nonce: bytes | None = None) -> None:
        self._token = _checked(token)
        self._nonce = nonce if nonce is not None else secrets.token_bytes(NONCE_BYTES)
        self._expected = Kind.CHALLENGE
        self.is_done = False
        self.error: WireError | None = None

    def start(self) -> bytes:
        return _frame(Kind.HELLO, self._nonce, _EMPTY)

    def receive(self, frame: bytes) -> bytes:
        try:
            nonce, proof = _parse(frame, self._expected)
        except WireError as error:
            self.error = error
            return b""
        if self._expected is Kind.WELCOME:
            self.is_done = True
            return b""
        if not hmac.compare_digest(proof, _proof(self._token, b"listener", self._nonce, nonce)):
            self.error = AuthenticationError("the listener does not know the cluster token")
            return b""
        self._expected = Kind.WELCOME
        return _frame(Kind.PROOF, _EMPTY, _proof(self._token, b"dialler", self._nonce, nonce))


class ListenerHandshake:
    """The end that accepts. `nonce` is for tests only."""

    def __init__(self, token: bytes, nonce: bytes | None = None) -> None:
        self._token = _checked(token)
        self._nonce = nonce if nonce is not None else secrets.token_bytes(NONCE_BYTES)
        self._peer_nonce = b""
        self._expected = Kind.HELLO
        self.is_done = False
        self.error: WireError | None = None

    def start(self) -> bytes:
        return b""

    def receive(self, frame: bytes) -> bytes:
        try:
            nonce, proof = _parse(frame, self._expected)
        except ProtocolError as error:
            self.error = error
            return _frame(Kind.REJECT, _EMPTY, _EMPTY) if frame.startswith(_MAGIC) else b""
        except WireError as error:
            self.error = error
            return b""
        if self._expected is Kind.HELLO:
            self._peer_nonce = nonce
            self._expected = Kind.PROOF
            return _frame(Kind.CHALLENGE, self._nonce, _proof(self._token, b"listener", nonce, self._nonce))
        if not hmac.compare_digest(proof, _proof(self._token, b"dialler", self._peer_nonce, self._nonce)):
            self.error = AuthenticationError("the dialler does not know the cluster token")
            return b""
        self.is_done = True
        return _frame(Kind.WELCOME, _EMPTY, _EMPTY)


def _checked(token: bytes) -> bytes:
    if len(token) < MIN_TOKEN_BYTES:
        raise AuthenticationError(
            f"the cluster token has {len(token)} bytes, at least {MIN_TOKEN_BYTES} are needed"
        )
    return token


def _proof(token: bytes, label: bytes, dialler_nonce: bytes, listener_nonce: bytes) -> bytes:
    version = PROTOCOL_VERSION.to_bytes(2, "big")
    return hmac.digest(token, b"baton:" + version + label + dialler_nonce + listener_nonce, sha256)


def _frame(kind: Kind, nonce: bytes, proof: bytes) -> bytes:
    return _MAGIC + bytes([kind.value]) + PROTOCOL_VERSION.to_bytes(2, "big") + nonce + proof


def _parse(frame: bytes, expected: Kind) -> tuple[bytes, bytes]:
    """(nonce, proof) of a frame that must be `expected`."""
    if len(frame) != FRAME_BYTES or not frame.startswith(_MAGIC):
        raise ProtocolError("the peer does not speak Baton's protocol")
    version = int.from_bytes(frame[6:8], "big")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"the peer speaks protocol version {version}, this is {PROTOCOL_VERSION}")
    if frame[5] == Kind.REJECT.value:
        raise AuthenticationError("the peer refused the handshake")
    if frame[5] != expected.value:
        raise ProtocolError(f"handshake frame of kind {frame[5]}, expected {expected.name}")
    return frame[8:40], frame[40:72]
