"""The handshake: both ends prove the token, and nothing else passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import AuthenticationError, ProtocolError, WireError
from cluster.wire import handshake
from cluster.wire.handshake import FRAME_BYTES, DiallerHandshake, Handshake, ListenerHandshake
from cluster.wire.messages import PROTOCOL_VERSION

TOKEN = b"t" * 32
OTHER = b"o" * 32


def run(dialler: Handshake, listener: Handshake) -> list[bytes]:
    """Exchange frames until one end stops; returns all frames in order."""
    frames = [dialler.start()]
    ends = [listener, dialler]
    while frames[-1] and not (dialler.is_done and listener.is_done):
        end = ends[(len(frames) - 1) % 2]
        frames.append(end.receive(frames[-1]))
        if end.error is not None:
            break
    return frames


def test_both_ends_finish_with_fixed_size_frames() -> None:
    dialler, listener = DiallerHandshake(TOKEN), ListenerHandshake(TOKEN)
    frames = run(dialler, listener)
    assert dialler.is_done
    assert listener.is_done
    assert [len(frame) for frame in frames[:4]] == [FRAME_BYTES] * 4
    assert all(TOKEN not in frame for frame in frames)


def test_nonces_are_fresh() -> None:
    first, second = (DiallerHandshake(TOKEN).start() for _ in range(2))
    assert first != second


def test_wrong_token_is_seen_by_the_dialler_before_it_proves_anything() -> None:
    dialler, listener = DiallerHandshake(TOKEN), ListenerHandshake(OTHER)
    frames = run(dialler, listener)
    assert isinstance(dialler.error, AuthenticationError)
    assert frames[-1] == b""
    assert not listener.is_done


def test_dialler_without_the_token_is_refused_by_the_listener() -> None:
    listener = ListenerHandshake(TOKEN)
    hello = DiallerHandshake(OTHER).start()
    challenge = listener.receive(hello)
    forged = challenge[:5] + bytes([handshake.Kind.PROOF.value]) + challenge[6:8] + bytes(64)
    assert listener.receive(forged) == b""
    assert isinstance(listener.error, AuthenticationError)
    assert not listener.is_done


def test_a_reflected_proof_is_refused() -> None:
    """An attacker sends the listener's own proof back to it: labels differ, so it does not fit."""
    listener = ListenerHandshake(TOKEN)
    challenge = listener.receive(DiallerHandshake(TOKEN).start())
    listener.receive(challenge[:5] + bytes([handshake.Kind.PROOF.value]) + challenge[6:])
    assert isinstance(listener.error, AuthenticationError)


def test_a_replayed_proof_is_refused() -> None:
    recorded = run(DiallerHandshake(TOKEN), ListenerHandshake(TOKEN))
    listener = ListenerHandshake(TOKEN)
    listener.receive(recorded[0])
    listener.receive(recorded[2])
    assert isinstance(listener.error, AuthenticationError)


def test_other_version_is_named_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    dialler, listener = DiallerHandshake(TOKEN), ListenerHandshake(TOKEN)
    hello = bytearray(dialler.start())
    other = PROTOCOL_VERSION + 1
    hello[6:8] = other.to_bytes(2, "big")
    reject = listener.receive(bytes(hello))
    assert f"version {other}, this is {PROTOCOL_VERSION}" in str(listener.error)
    monkeypatch.setattr(handshake, "PROTOCOL_VERSION", other)
    dialler.receive(reject)
    assert f"version {PROTOCOL_VERSION}, this is {other}" in str(dialler.error)


def test_short_token_is_refused() -> None:
    with pytest.raises(AuthenticationError, match="3 bytes"):
        DiallerHandshake(b"abc")


@given(st.binary(min_size=FRAME_BYTES, max_size=FRAME_BYTES) | st.binary(max_size=100))
def test_random_first_frames_never_authenticate(frame: bytes) -> None:
    for end in (ListenerHandshake(TOKEN), DiallerHandshake(TOKEN)):
        end.receive(frame)
        assert not end.is_done


@given(st.integers(0, 2), st.integers(0, FRAME_BYTES - 1), st.integers(1, 255))
def test_one_changed_byte_never_authenticates_both_ends(which: int, position: int, flip: int) -> None:
    """Any change in HELLO, CHALLENGE or PROOF, except in the bytes a kind does not use."""
    unused = {0: range(40, 72), 1: range(0), 2: range(8, 40)}[which]
    if position in unused:
        return
    dialler, listener = DiallerHandshake(TOKEN, b"d" * 32), ListenerHandshake(TOKEN, b"l" * 32)
    frame = dialler.start()
    for number, end in enumerate((listener, dialler, listener)):
        if number == which:
            changed = bytearray(frame)
            changed[position] ^= flip
            frame = bytes(changed)
        frame = end.receive(frame)
        if end.error is not None:
            assert isinstance(end.error, AuthenticationError | ProtocolError | WireError)
            return
    pytest.fail("the handshake went through")
