"""The wire under hostile bytes: any message survives the trip, anything else is a `ProtocolError`, memory
stays small whatever a header claims, and before the token is proven nothing is parsed at all."""

from __future__ import annotations

import asyncio
import itertools
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from cluster.errors import ProtocolError
from cluster.wire import kv_events
from cluster.wire import kv_messages as kv
from cluster.wire import messages as m
from cluster.wire.codec import PREFIX_BYTES, FrameDecoder, encode
from cluster.wire.handshake import FRAME_BYTES, DiallerHandshake
from cluster.wire.messages import PROTOCOL_VERSION
from cluster.wire.stream import listen

DIRECTIONS: dict[str, Any] = {
    "router-to-worker": kv_events.RouterSays,
    "worker-to-router": kv_events.DiallerSays,
    "prefill-to-decode": kv.PrefillToDecode,
    "decode-to-prefill": kv.DecodeToPrefill,
}
every_direction = pytest.mark.parametrize("union", DIRECTIONS.values(), ids=DIRECTIONS)
NUM_MUTANTS = 4000  # per direction
SMALL_BYTES = 2 << 20  # what reading any hostile frame may take


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Values of a declared type; a type that is new here must be added."""
    match kind:
        case inspect.StructType() if kind.cls is m.NextTokens:
            number = st.integers(-(2**63), 2**64 - 1)
            rows = st.lists(st.tuples(st.text(max_size=20), number, number, number), max_size=4)
            return rows.map(next_tokens)
        case inspect.StructType():
            fields = {field.name: values(field.type) for field in kind.fields}
            return st.builds(lambda cls=kind.cls, **given: cls(**given), **fields)  # type: ignore[arg-type]
        case inspect.UnionType():
            return st.one_of([values(one) for one in kind.types])
        case inspect.EnumType():
            return st.sampled_from(list(kind.cls))
        case inspect.IntType():
            return st.integers(-(2**63), 2**64 - 1)
        case inspect.FloatType():
            return st.floats(allow_nan=False)
        case inspect.StrType():
            return st.text(max_size=20)
        case inspect.BytesType():
            return st.binary(max_size=20)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.VarTupleType():
            return st.lists(values(kind.item_type), max_size=4).map(tuple)
        case inspect.ListType():
            return st.lists(values(kind.item_type), max_size=4)
        case inspect.TupleType():
            return st.tuples(*map(values, kind.item_types))
        case inspect.DictType():
            return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=3)
    raise NotImplementedError(f"no strategy for {kind}")


def next_tokens(rows: list[tuple[Any, ...]]) -> m.NextTokens:
    """Its columns are of one length, or it is none."""
    *columns, token_ids = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
    return m.NextTokens(run=m.pack_run(m.TokenRun(*columns)), num_on=len(rows), token_ids=token_ids)


MESSAGES = {name: values(inspect.type_info(union)) for name, union in DIRECTIONS.items()}


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(PREFIX_BYTES, "big") + body


def read(data: bytes, union: Any, limit: int = 1 << 20) -> list[Any]:
    decoder: FrameDecoder[Any] = FrameDecoder(union, limit)
    out = list(decoder.feed(data))
    decoder.finish()
    return out


@pytest.mark.parametrize("name", DIRECTIONS)
@settings(max_examples=60)
@given(data=st.data())
def test_any_message_survives_the_trip_and_only_in_its_direction(name: str, data: st.DataObject) -> None:
    message = data.draw(MESSAGES[name])
    assert read(encode(message), DIRECTIONS[name]) == [message]
    for other, union in DIRECTIONS.items():
        if type(message) not in union.__args__:
            with pytest.raises(ProtocolError):
                read(encode(message), union)
            assert other != name


WRONG: tuple[Any, ...] = (None, True, -1, 2**64 - 1, 1e300, "x", b"\xff\x00", [], [[]], {}, {"a": {"b": []}})


@pytest.mark.parametrize("name", DIRECTIONS)
@settings(max_examples=150)
@given(data=st.data())
def test_a_message_with_one_thing_wrong_is_a_message_or_a_protocol_error(
    name: str, data: st.DataObject
) -> None:
    """Well-formed MessagePack of the wrong shape: a field missing, added, or of another type, anywhere."""
    body = msgspec.msgpack.decode(encode(data.draw(MESSAGES[name]))[PREFIX_BYTES:])
    target = body
    while data.draw(st.booleans()):  # go deeper
        inner = [value for value in _children(target) if isinstance(value, dict | list) and value]
        if not inner:
            break
        target = data.draw(st.sampled_from(inner))
    change = data.draw(st.sampled_from(["drop", "add", "replace"]))
    key = data.draw(st.sampled_from(sorted(target) if isinstance(target, dict) else range(len(target))))
    if change == "drop":
        del target[key]
    elif change == "replace":
        target[key] = data.draw(st.sampled_from(WRONG))
    elif isinstance(target, dict):
        target["unheard_of"] = 1
    else:
        target.append(data.draw(st.sampled_from(WRONG)))
    try:
        [message] = read(frame(msgspec.msgpack.encode(body)), DIRECTIONS[name])
    except ProtocolError:
        return
    assert type(message) in DIRECTIONS[name].__args__


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else list(value)


def samples(union: Any) -> list[bytes]:
    """One frame of each message, the same every time."""
    return [encode(_smallest(inspect.type_info(kind))) for kind in union.__args__]


def _smallest(kind: inspect.Type) -> Any:
    match kind:
        case inspect.StructType() if kind.cls is m.NextTokens:
            return next_tokens([("x", 1, 1, 1)])
        case inspect.StructType():
            return kind.cls(**{field.name: _smallest(field.type) for field in kind.fields})
        case inspect.UnionType():
            return _smallest(kind.types[0])
        case inspect.EnumType():
            return next(iter(kind.cls))  # type: ignore[call-overload]
        case inspect.VarTupleType():
            return (_smallest(kind.item_type),) * 2
        case inspect.ListType():
            return [_smallest(kind.item_type)] * 2
        case inspect.TupleType():
            return tuple(map(_smallest, kind.item_types))
        case inspect.DictType():
            return {"k": _smallest(kind.value_type)}
        case inspect.IntType():
            return 1
        case inspect.FloatType():
            return 0.5
        case inspect.StrType():
            return "text"
        case inspect.BytesType():
            return b"bytes"
        case inspect.BoolType():
            return True
    return None


def mutate(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """What transmission faults and hostile hands do to bytes."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(7):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at % len(out)] = rng.choice(
                    [0x00, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC4, 0xDB, 0xDD, 0xDF, 0xFF]
                )
            case 2:
                out[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
            case 3:
                del out[at : at + rng.randrange(1, 9)]
            case 4:
                other = rng.choice(others)
                out[at:] = other[rng.randrange(len(other)) :]
            case 5:
                out[at:at] = out[max(0, at - 12) : at]
            case 6:
                out[at:at] = rng.choice(b"\xdd\xdf\xdb\xc6\xc9".hex(" ").split()).encode() + b"\xff" * 4
    return bytes(out)


@every_direction
@pytest.mark.parametrize("seed", range(3))
def test_mutated_bytes_give_messages_or_a_protocol_error(union: Any, seed: int) -> None:
    """A byte fuzzer with fixed seeds: bodies behind a right length, and whole streams, split anywhere."""
    rng = random.Random(seed)
    frames = samples(union)
    refused = 0
    tracemalloc.start()
    try:
        for index in range(NUM_MUTANTS // 3):
            one = rng.choice(frames)
            if index % 2:
                data = frame(mutate(rng, one[PREFIX_BYTES:], frames))
            else:
                data = mutate(rng, one + rng.choice(frames), frames)
            decoder: FrameDecoder[Any] = FrameDecoder(union, 4096)
            edges = sorted({0, len(data), *(rng.randrange(len(data) + 1) for _ in range(3))})
            try:
                for start, end in itertools.pairwise(edges):
                    for message in decoder.feed(data[start:end]):
                        assert type(message) in union.__args__
                    assert decoder.num_buffered_bytes <= 4096 + PREFIX_BYTES
                decoder.finish()
            except ProtocolError:
                refused += 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refused > NUM_MUTANTS // 10  # the fuzzer does break things
    assert peak < SMALL_BYTES


def claims(num: int) -> dict[str, bytes]:
    """Bodies whose headers claim `num` elements or bytes that are not there."""
    count = struct.pack(">I", num)
    tokens = b"\x82\xa1t\xa6Tokens\xa4rows"
    return {
        "array": tokens + b"\xdd" + count,
        "array of rows": tokens + b"\x91\x95\xa1r\x01\x01\xdd" + count,
        "map": b"\xdf" + count + b"\xa1t\xa6Tokens",
        "string": b"\x82\xa1t\xa7Refused\xa6reason\xdb" + count,
        "binary": b"\x82\xa1t\xa7Refused\xa6reason\xc6" + count,
        "extension": b"\x82\xa1t\xa7Refused\xa6reason\xc9" + count + b"\x01",
    }


@pytest.mark.parametrize("num", [1 << 20, 1 << 28, (1 << 32) - 1])
@pytest.mark.parametrize("kind", claims(0))
def test_what_a_header_claims_is_not_allocated(kind: str, num: int) -> None:
    assert _peak_bytes(lambda: _refused(frame(claims(num)[kind]))) < SMALL_BYTES


@pytest.mark.parametrize("num", [(16 << 20) + 1, (1 << 32) - 1])
def test_a_length_prefix_of_4_gib_allocates_nothing(num: int) -> None:
    assert _peak_bytes(lambda: _refused(num.to_bytes(4, "big") + b"x")) < 64 << 10


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 50_000,
        b"\x81\xa1t" * 20_000,
        b"\x82\xa1t\xa7Refused\xa6reason" + b"\x81\xa1k" * 20_000 + b"\x01",
        b"\x82\xa1t\xa7Refused\xa6reason" + b"\x91" * 50_000,
        b"\x82\xa1t\xa6Tokens\xa4rows" + b"\x91" * 50_000,
    ],
    ids=["arrays", "maps", "maps in a field", "arrays in a field", "rows"],
)
def test_deep_nesting_is_refused(body: bytes) -> None:
    _refused(frame(body))


def test_duplicate_keys_keep_one_typed_value_or_are_refused() -> None:
    twice = b"\x83\xa1t\xa7Refused\xa6reason\xa1a\xa6reason"
    assert read(frame(twice + b"\xa1b"), m.WorkerToRouter)[0].reason in ("a", "b")
    _refused(frame(twice + b"\x05"))  # the second one counts as much as the first
    _refused(frame(b"\x83\xa1t\xa7Refused\xa6reason\xa1a\xa1t\xa7Drained"))  # two tags


@pytest.mark.parametrize("bad", [b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"])
def test_text_that_is_not_utf8_is_refused(bad: bytes) -> None:
    _refused(frame(b"\x82\xa1t\xa7Refused\xa6reason" + bytes([0xA0 + len(bad)]) + bad))


def _refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        read(data, m.WorkerToRouter, limit=16 << 20)


def _peak_bytes(work: Callable[[], None]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# ---- before the token is proven


class Watched:
    """A listener whose decoder tells whether it was ever asked to read a byte."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_fed = 0
        self.num_streams = 0
        original = FrameDecoder.feed

        def feed(decoder: FrameDecoder[Any], data: Any) -> Any:
            self.num_fed += 1
            return original(decoder, data)

        monkeypatch.setattr(FrameDecoder, "feed", feed)

    async def on_stream(self, stream: Any) -> None:
        self.num_streams += 1
        async for _ in stream:
            pass


async def _say(address: str, data: bytes) -> bytes:
    """Send and read to the end of the stream."""
    reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
    try:
        writer.write(data)
        writer.write_eof()
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def _hello(version: int) -> bytes:
    hello = bytearray(DiallerHandshake(b"k" * 32).start())
    hello[6:8] = version.to_bytes(2, "big")
    return bytes(hello)


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, 65535])
async def test_another_version_is_refused_before_anything_is_parsed(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    listener = await listen(f"unix:{tmp_path}/s", b"k" * 32, m.WorkerToRouter, watched.on_stream)
    answer = await _say(listener.address, _hello(version) + encode(m.Drained()) * 100)
    assert len(answer) <= FRAME_BYTES
    assert (watched.num_fed, watched.num_streams) == (0, 0)
    await listener.close()


@pytest.mark.parametrize("seed", range(30))
async def test_without_the_token_nothing_is_parsed(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Valid messages, mutants and noise, after no handshake, half of one, or a forged proof."""
    rng = random.Random(seed)
    watched = Watched(monkeypatch)
    listener = await listen(f"unix:{tmp_path}/s", b"k" * 32, m.WorkerToRouter, watched.on_stream)
    frames = samples(m.WorkerToRouter)
    forged = b"BATON\x03" + PROTOCOL_VERSION.to_bytes(2, "big") + bytes(rng.randrange(256) for _ in range(64))
    starts = [b"", _hello(PROTOCOL_VERSION), _hello(PROTOCOL_VERSION)[:40], _hello(PROTOCOL_VERSION) + forged]
    noise = b"".join(mutate(rng, rng.choice(frames), frames) for _ in range(20))
    answer = await _say(listener.address, rng.choice(starts) + noise)
    assert len(answer) <= 2 * FRAME_BYTES
    assert (watched.num_fed, watched.num_streams) == (0, 0)
    await listener.close()
