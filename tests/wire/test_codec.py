"""Frames: every split gives the same messages, every fault names itself, memory stays bounded."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import ProtocolError
from cluster.ids import Attempt, Epoch, LeaseId, RequestId, WorkerId
from cluster.sampling import FinishReason, SamplingParams, TokenOutput
from cluster.step_model import StepModel
from cluster.wire import messages as m
from cluster.wire.codec import PREFIX_BYTES, FrameDecoder, encode

R, A, L = RequestId("r-1"), Attempt(2), LeaseId(7)
GEOMETRY = m.KVGeometry(
    first_layer=0,
    num_layers=30,
    first_head=0,
    num_heads=3,
    head_dim=64,
    block_size=32,
    num_blocks=9,
    dtype="bfloat16",
)
WORKER_TO_ROUTER: list[msgspec.Struct] = [
    m.Register(
        worker=WorkerId("decode-0"),
        role=m.Role.DECODE,
        epoch=Epoch(3),
        pid=4,
        model="demo",
        fingerprint="f",
        max_model_len=2048,
        max_num_seqs=64,
        geometry=GEOMETRY,
        kv_address="unix:/x",
    ),
    m.Heartbeat(state=m.WorkerState.READY, load=m.WorkerLoad(running=1)),
    m.Heartbeat(
        state=m.WorkerState.READY,
        load=m.WorkerLoad(
            step_model=StepModel(1e-3, 2e-3, 3e-5, 4e-8, 5e-9), step_error=0.03, late_prefill_s=2.5
        ),
    ),
    m.Grant(request=R, attempt=A, lease=L, ttl_s=1.5, cached_tokens=64),
    m.Nack(request=R, attempt=A, reason=m.NackReason.NO_BLOCKS, detail="pool", retry_after_s=0.5),
    m.FirstToken(
        request=R,
        attempt=A,
        output=TokenOutput(5, -0.25, ((5, -0.25), (6, -2.0))),
        finish_reason=FinishReason.STOP,
        cached_tokens=0,
        queue_s=0.0,
        prefill_s=0.1,
    ),
    m.Tokens(rows=[m.TokenRow(R, A, 1, [TokenOutput(9)], None)]),
    m.NextTokens(
        run=m.pack_run(m.TokenRun([R, RequestId("q")], [A, A], [3, 90])), num_on=2, token_ids=[7, 49_000]
    ),
    m.Drained(),
    m.Refused(reason="no"),
]
ROUTER_TO_WORKER: list[msgspec.Struct] = [
    m.Reserve(
        request=R,
        attempt=A,
        token_ids=list(range(300)),
        num_prompt_tokens=300,
        sampling=SamplingParams(max_tokens=5, logit_bias=((3, 1.0),)),
        cache_salt="é",
        lease_ttl_s=10.0,
        local=True,
        slo=m.SloTargets(
            ttft_deadline_in_s=-0.5, tpot_s=0.1, gap_s=0.2, priority_class=m.PriorityClass.BATCH
        ),
    ),
    m.Prefill(
        request=R,
        attempt=A,
        token_ids=[1, 2],
        num_prompt_tokens=2,
        sampling=SamplingParams(max_tokens=5),
        cache_salt="",
        decode_worker=WorkerId("decode-0"),
        decode_epoch=Epoch(1),
        kv_address="unix:/x",
        lease=L,
        skip_tokens=0,
        slo=m.SloTargets(ttft_deadline_in_s=1.75, tpot_s=0.05),
    ),
    m.RenewLeases(leases=[L]),
    m.Abort(request=R, attempt=A, reason="gone"),
    m.Drain(grace_s=3.0),
    m.Partners(
        begins=False,
        gone=[WorkerId("decode-1")],
        prefill=[WorkerId("prefill-0")],
        decode=[m.DecodePartner(WorkerId("decode-0"), Epoch(3), "tcp:10.0.0.9:4711")],
    ),
]


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(PREFIX_BYTES, "big") + body


def test_columns_are_rows_of_one_token_and_of_one_length() -> None:
    columns: list[list[Any]] = [[R, RequestId("q")], [A, A], [3, 90]]
    run = m.pack_run(m.TokenRun(*columns))
    for num_on in (0, 5):
        assert m.NextTokens(run=run, num_on=num_on, token_ids=[7, 8]).rows == [
            m.TokenRow(R, A, 3 + num_on, [TokenOutput(7)]),
            m.TokenRow(RequestId("q"), A, 90 + num_on, [TokenOutput(8)]),
        ]

    def refused(run: bytes, token_ids: list[int], why: str) -> None:
        body = msgspec.msgpack.encode({"t": "NextTokens", "run": run, "num_on": 0, "token_ids": token_ids})
        with pytest.raises(ProtocolError, match=why):
            decode_all(frame(body))

    refused(run, [7], "not a token for each")
    for column in range(3):
        short = [one[:1] if at == column else one for at, one in enumerate(columns)]
        refused(msgspec.msgpack.encode(short), [7, 8], "not of one length")
    refused(msgspec.msgpack.encode(columns[:2]), [7, 8], "length")
    refused(run[:-1], [7, 8], "truncated")
    refused(b"", [], "truncated")
    long = [RequestId("q" * m.LARGEST_RUN_BYTES)]
    refused(m.pack_run(m.TokenRun(long, [A], [3])), [7], "over the limit")


def decode_all(data: bytes, decode_type: Any = m.WorkerToRouter, limit: int = 1 << 20) -> list[Any]:
    decoder: FrameDecoder[Any] = FrameDecoder(decode_type, limit)
    out = list(decoder.feed(data))
    decoder.finish()
    return out


@pytest.mark.parametrize("message", WORKER_TO_ROUTER, ids=lambda message: type(message).__name__)
def test_round_trip_to_router(message: msgspec.Struct) -> None:
    assert decode_all(encode(message)) == [message]


@pytest.mark.parametrize("message", ROUTER_TO_WORKER, ids=lambda message: type(message).__name__)
def test_round_trip_to_worker(message: msgspec.Struct) -> None:
    assert decode_all(encode(message), m.RouterToWorker) == [message]


@given(st.lists(st.sampled_from(WORKER_TO_ROUTER), max_size=6), st.lists(st.integers(0, 2000), max_size=12))
def test_split_anywhere_gives_the_same_messages(sent: list[msgspec.Struct], cuts: list[int]) -> None:
    data = b"".join(map(encode, sent))
    decoder: FrameDecoder[Any] = FrameDecoder(m.WorkerToRouter)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    received = [msg for a, b in itertools.pairwise(edges) for msg in decoder.feed(data[a:b])]
    decoder.finish()
    assert received == sent
    assert decoder.num_buffered_bytes == 0


@pytest.mark.parametrize("message", WORKER_TO_ROUTER, ids=lambda message: type(message).__name__)
def test_every_truncation_is_an_error_at_eof_and_every_short_body_at_once(message: msgspec.Struct) -> None:
    data = encode(message)
    for length in range(1, len(data)):
        decoder: FrameDecoder[Any] = FrameDecoder(m.WorkerToRouter)
        assert list(decoder.feed(data[:length])) == []
        with pytest.raises(ProtocolError, match=f"inside a frame: {length} bytes"):
            decoder.finish()
    for length in range(len(data) - PREFIX_BYTES):
        with pytest.raises(ProtocolError):
            decode_all(frame(data[PREFIX_BYTES : PREFIX_BYTES + length]))


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"t": "Nope"}, "Nope"),
        ({"t": "Reserve"}, "Reserve"),  # known, but not in this direction
        ({"t": "Drained", "extra": 1}, "extra"),
        ({"t": "Refused"}, "reason"),
        ({"t": "Refused", "reason": 5}, r"\$.reason"),
        ({"t": "Refused", "reason": None}, r"\$.reason"),
        ({"t": "Heartbeat", "state": "asleep", "load": {}}, "asleep"),
        ({"t": "Heartbeat", "state": "ready", "load": {"runing": 1}}, "runing"),
        ({"reason": "x"}, "`t`"),
        ([1, 2], "array"),
        ("Drained", "str"),
    ],
)
def test_fault_is_named(body: Any, named: str) -> None:
    with pytest.raises(ProtocolError, match=named):
        decode_all(frame(msgspec.msgpack.encode(body)))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",  # the one unused MessagePack byte
        b"\x81\xa1t\xa2\xff\xfe",  # not UTF-8
        b"\x91" * 100_000,  # nesting without end
        b"\x82\xa1t\xa6Tokens\xa4rows\xdd\xff\xff\xff\xff",  # claims four billion rows
        encode(m.Drained())[PREFIX_BYTES:] + b"\x00",  # trailing byte
        pickle.dumps({"t": "Drained"}),
    ],
    ids=["empty", "unused", "utf8", "nesting", "huge-array", "trailing", "pickle"],
)
def test_b150_hostile_body_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_all(frame(body))


def test_oversized_length_is_refused_before_the_body() -> None:
    decoder: FrameDecoder[Any] = FrameDecoder(m.WorkerToRouter, max_frame_bytes=1000)
    with pytest.raises(ProtocolError, match="1001 bytes is over the limit of 1000"):
        list(decoder.feed((1001).to_bytes(4, "big")))


def test_messages_before_the_fault_arrive_and_the_decoder_stays_dead() -> None:
    decoder: FrameDecoder[Any] = FrameDecoder(m.WorkerToRouter)
    incoming = decoder.feed(encode(m.Drained()) + frame(b"\xc1") + encode(m.Drained()))
    assert next(incoming) == m.Drained()
    with pytest.raises(ProtocolError) as first:
        next(incoming)
    with pytest.raises(ProtocolError) as again:
        list(decoder.feed(encode(m.Drained())))
    assert again.value is first.value


def test_memory_is_bounded_by_one_frame() -> None:
    limit = 1000
    decoder: FrameDecoder[Any] = FrameDecoder(m.WorkerToRouter, max_frame_bytes=limit)
    for byte in (limit).to_bytes(4, "big") + bytes(limit - 1):
        assert list(decoder.feed(bytes([byte]))) == []
        assert decoder.num_buffered_bytes <= limit + PREFIX_BYTES
    with pytest.raises(ProtocolError):
        list(decoder.feed(b"\x00"))
    assert decoder.num_buffered_bytes == 0


@settings(max_examples=300)
@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=4))
def test_random_bytes_give_messages_or_protocol_error_whatever_the_split(
    data: bytes, cuts: list[int]
) -> None:
    def outcome(edges: list[int]) -> tuple[list[Any], str]:
        decoder: FrameDecoder[Any] = FrameDecoder(m.WorkerToRouter, max_frame_bytes=128)
        out: list[Any] = []
        try:
            for a, b in itertools.pairwise(edges):
                out.extend(decoder.feed(data[a:b]))
            decoder.finish()
        except ProtocolError as error:
            return out, str(error)
        return out, ""

    whole = outcome([0, len(data)])
    split = outcome([0, *sorted(min(cut, len(data)) for cut in cuts), len(data)])
    assert bool(whole[1]) == bool(split[1])
    if "inside a frame" not in whole[1]:
        assert whole[1] == split[1]


@settings(max_examples=300)
@given(st.sampled_from(WORKER_TO_ROUTER), st.data())
def test_mutated_frames_give_a_message_or_protocol_error(
    message: msgspec.Struct, data: st.DataObject
) -> None:
    body = bytearray(encode(message)[PREFIX_BYTES:])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        (decoded,) = decode_all(frame(bytes(body)))
    except ProtocolError:
        return
    assert type(decoded) in {type(known) for known in WORKER_TO_ROUTER} | {m.Committed, m.AttemptFailed}
