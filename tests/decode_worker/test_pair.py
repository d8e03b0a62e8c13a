"""Both cores joined: the cases of the field, exact to the token and to the last block."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from cluster.ids import RequestId, WorkerId
from cluster.sampling import FinishReason, SamplingParams
from cluster.wire.messages import Drain
from decode_worker.core import DecodeConfig
from prefill_worker.core import PrefillConfig
from tests.support.simulated_pair import BLOCK_BYTES, SimulatedPair

P0, D0 = WorkerId("prefill-0"), WorkerId("decode-0")

both_edges = pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "staged"])


def long_output(num_tokens: int, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, seed=seed)


def complete(pair: SimulatedPair, rng: random.Random) -> None:
    pair.settle(rng.randrange)
    pair.check_quiet()


@both_edges
@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 6])
def test_b055_chunk_and_block_boundaries_with_a_shared_prefix(in_place: bool, chunk: int) -> None:
    rng = random.Random(chunk)
    pair = SimulatedPair(
        in_place=in_place,
        prefill_config=PrefillConfig(BLOCK_BYTES, max_step_tokens=chunk, max_piece_bytes=BLOCK_BYTES),
        decode_config=DecodeConfig(BLOCK_BYTES, max_chunk_tokens=chunk),
    )
    for length in (1, 3, 4, 5, 8, 11, 12, 13):
        pair.router.submit([9] * length, long_output(5))
        pair.settle(rng.randrange)
    pair.router.submit([9] * 6 + [1, 2, 3], long_output(5))  # shares a prefix that ends inside a chunk
    complete(pair, rng)
    assert all(t.outcome == "done" for t in pair.router.requests.values())


@both_edges
@pytest.mark.parametrize("length", [7, 8, 9])
@pytest.mark.parametrize("num_held", [0, 1, 2])
@pytest.mark.parametrize("local", [False, True])
def test_b054_b079_only_what_d_lacks_is_moved(
    in_place: bool, length: int, num_held: int, local: bool
) -> None:
    rng = random.Random(length)
    pair = SimulatedPair(in_place=in_place)
    prompt = list(range(10, 10 + length))
    if num_held:  # D prefilled this head itself for another request: P does not have it
        pair.router.submit([*prompt[: 4 * num_held], 3], long_output(2), local=True)
        pair.settle(rng.randrange)
    full_blocks = length // 4
    request = pair.router.submit(prompt, long_output(6), local=local)
    pair.settle(rng.randrange)
    tracked = pair.router.requests[request]
    assert tracked.outcome == "done"
    num_blocks = -(-length // 4)
    if local:
        assert tracked.cached_tokens == min(num_held, (length - 1) // 4) * 4
        assert pair.bytes_sent == 0
    else:
        assert pair.bytes_sent == (num_blocks - min(num_held, full_blocks)) * BLOCK_BYTES
    pair.check_quiet()


@both_edges
def test_b054_the_same_prompt_again_is_a_full_hit_on_both_sides(in_place: bool) -> None:
    rng = random.Random(5)
    pair = SimulatedPair(in_place=in_place)
    for _ in range(3):
        pair.router.submit(list(range(16)), long_output(3))
        pair.settle(rng.randrange)
    assert pair.bytes_sent == 4 * BLOCK_BYTES
    assert [t.cached_tokens for t in pair.router.requests.values()] == [0, 12, 12]
    pair.check_quiet()


@both_edges
@pytest.mark.parametrize("local", [False, True])
def test_b070_b072_token_0_ends_the_request(in_place: bool, local: bool) -> None:
    rng = random.Random(1)
    pair = SimulatedPair(in_place=in_place)
    probe = pair.router.submit([3, 1, 4], long_output(1))
    pair.settle(rng.randrange)
    token = pair.router.oracles[probe].outputs[0].token_id
    ends = {
        "eos": SamplingParams(max_tokens=9, eos_token_ids=(token,)),
        "stop": SamplingParams(max_tokens=9, stop_token_ids=(token,)),
        "min": SamplingParams(max_tokens=9, eos_token_ids=(token,), min_tokens=3),
        "length": SamplingParams(max_tokens=1),
    }
    requests = {name: pair.router.submit([3, 1, 4], params, local=local) for name, params in ends.items()}
    complete(pair, rng)
    tracked = {name: pair.router.requests[request] for name, request in requests.items()}
    assert tracked["eos"].finish_reason is tracked["stop"].finish_reason is FinishReason.STOP
    assert tracked["length"].finish_reason is FinishReason.LENGTH
    assert [len(tracked[name].delivered) for name in ("eos", "stop", "length")] == [1, 1, 1]
    assert len(tracked["min"].delivered) >= 3


@both_edges
def test_b050_b094_b095_a_pool_that_cannot_grow_what_it_admits(in_place: bool) -> None:
    rng = random.Random(2)
    preemptions = 0
    for seed in range(6):
        pair = SimulatedPair(
            in_place=in_place,
            decode_blocks=12,
            decode_config=DecodeConfig(BLOCK_BYTES, growth_blocks=0, max_chunk_tokens=3),
        )
        for index in range(8):
            pair.router.submit([index] * rng.randrange(1, 6), long_output(30, seed), local=index % 3 == 0)
        complete(pair, rng)
        assert all(t.outcome == "done" for t in pair.router.requests.values())
        preemptions += pair.nodes[D0].core.load().preemptions
    assert preemptions >= 12


@both_edges
@pytest.mark.parametrize("moment", range(8))
def test_b082_p_dies_at_some_moment(in_place: bool, moment: int) -> None:
    """Retried on another prefill worker, on the same decode worker; others do not notice."""
    rng = random.Random(moment)
    pair = SimulatedPair(in_place=in_place, num_prefill=2)
    for index in range(4):
        pair.router.submit([index] * 20, long_output(6))
    for _ in range(6 + 9 * moment):
        if ops := pair.pending():
            pair.do(ops[rng.randrange(len(ops))])
    pair.kill(P0)
    pair.check()
    pair.settle(rng.randrange)
    assert all(t.outcome == "done" for t in pair.router.requests.values())
    complete(pair, rng)


@both_edges
def test_b082_complete_pieces_are_not_sent_again_after_p_died(in_place: bool) -> None:
    rng = random.Random(3)
    pair = SimulatedPair(in_place=in_place, num_prefill=2)
    pair.router.submit(list(range(100, 140)), long_output(3))
    while pair.bytes_sent < 6 * BLOCK_BYTES:
        ops = pair.pending()
        pair.do(ops[rng.randrange(len(ops))])
    victim = next(
        w for w, node in pair.nodes.items() if w.startswith("prefill") and node.core.load().kv_bytes_sent
    )
    lease = next(iter(pair.nodes[D0].core._leases.values()))
    while lease.num_leading_tokens(4) < 16 and lease.live:  # let D book some of what was sent
        ops = pair.pending()
        pair.do(ops[rng.randrange(len(ops))])
    pair.kill(victim)
    while any(pair.unproven) or any(e.broken and e.is_up(e.decode) for e in pair.edges):
        for edge in pair.edges:
            if edge.broken and edge.is_up(edge.decode):
                pair._notice(edge, edge.decode)
        while pair.unproven:
            pair._prove(0)
    pair.settle(rng.randrange)
    [tracked] = pair.router.requests.values()
    assert tracked.outcome == "done"
    resent = pair.nodes[WorkerId("prefill-1") if victim == P0 else P0].core.load().kv_bytes_sent
    assert resent <= 7 * BLOCK_BYTES  # of 11 blocks: the second attempt's prompt has token 0
    pair.check_quiet()


@both_edges
@pytest.mark.parametrize("moment", range(6))
def test_d_dies_at_some_moment_and_the_stream_goes_on(in_place: bool, moment: int) -> None:
    rng = random.Random(moment)
    pair = SimulatedPair(in_place=in_place, num_decode=2)
    for index in range(4):
        pair.router.submit([index] * 15, long_output(12))
    for _ in range(10 + 12 * moment):
        if ops := pair.pending():
            pair.do(ops[rng.randrange(len(ops))])
    pair.kill(D0)
    pair.settle(rng.randrange)
    assert all(t.outcome == "done" for t in pair.router.requests.values())
    pair.restart(D0)
    complete(pair, rng)


@both_edges
@pytest.mark.parametrize("seed", range(4))
def test_d_dies_before_the_commit_and_p_ships_again_without_recompute(in_place: bool, seed: int) -> None:
    """P has the prompt's KV as cached prefix: the next attempt computes token 0's position and no more, and
    token 0 itself is not sampled again."""
    rng = random.Random(seed)
    pair = SimulatedPair(in_place=in_place, num_decode=2)
    request = pair.router.submit(list(range(100, 140)), long_output(6))
    tracked = pair.router.requests[request]
    while not tracked.delivered:
        ops = pair.pending()
        pair.do(ops[rng.randrange(len(ops))])
    assert not tracked.committed
    assert tracked.decode is not None
    pair.kill(tracked.decode)
    first = tracked.delivered[0]
    pair.settle(rng.randrange)
    assert tracked.outcome == "done"
    assert tracked.delivered[0] == first
    assert tracked.cached_tokens == 40
    for node in pair.nodes.values():
        if not node.alive:
            pair.restart(node.worker)
    complete(pair, rng)


@both_edges
def test_b084_b085_200_clients_that_leave_at_every_moment(in_place: bool) -> None:
    rng = random.Random(4)
    pair = SimulatedPair(in_place=in_place)
    for index in range(200):
        request = pair.router.submit([index % 50] * 18, long_output(5), local=index % 5 == 0)
        for _ in range(rng.randrange(25)):
            if ops := pair.pending():
                pair.do(ops[rng.randrange(len(ops))])
        pair.router.abort(request) if rng.random() < 0.7 else pair.router.finish(request)
    started = pair.now
    pair.run(rng.randrange)
    assert pair.now - started < 2.0  # no deadline was needed to get everything back
    complete(pair, rng)
    last = pair.router.submit([1, 2, 3], long_output(5))
    complete(pair, rng)
    assert pair.router.requests[last].outcome == "done"


@both_edges
def test_b085_a_late_end_of_the_transfer_after_the_lease_expired(in_place: bool) -> None:
    rng = random.Random(6)
    for _ in range(20):
        pair = SimulatedPair(in_place=in_place)
        pair.router.submit([5] * 20, long_output(4))
        for _ in range(rng.randrange(8, 30)):
            if ops := pair.pending():
                pair.do(ops[rng.randrange(len(ops))])
        pair.advance(10.0)  # the lease and every deadline pass, whatever is under way arrives late
        pair.check()
        complete(pair, rng)


@both_edges
def test_b087_messages_arrive_twice(in_place: bool) -> None:
    rng = random.Random(7)
    stale: Counter[str] = Counter()
    for _ in range(10):
        pair = SimulatedPair(in_place=in_place)
        for index in range(4):
            pair.router.submit([index] * 14, long_output(4), local=index == 0)
        while ops := pair.pending():
            if rng.random() < 0.3:
                pair.duplicate(rng.randrange(50))
            pair.do(ops[rng.randrange(len(ops))])
        complete(pair, rng)
        assert all(t.outcome == "done" for t in pair.router.requests.values())
        stale.update({w: node.core.load().stale_messages for w, node in pair.nodes.items()})
    assert stale[P0] > 0
    assert stale[D0] > 0


@both_edges
def test_the_router_dies_and_the_workers_keep_nothing(in_place: bool) -> None:
    for seed in range(15):
        rng = random.Random(seed)
        pair = SimulatedPair(in_place=in_place)
        for index in range(5):
            pair.router.submit([index] * 14, long_output(20), local=index == 0)
        for _ in range(rng.randrange(10, 120)):
            if ops := pair.pending():
                pair.do(ops[rng.randrange(len(ops))])
        pair.lose_router()
        complete(pair, rng)


def test_b060_never_fits_and_others_go_on() -> None:
    rng = random.Random(8)
    pair = SimulatedPair(in_place=True, prefill_blocks=8)
    prompt_too_long = pair.router.submit([1] * 40, long_output(4))  # for P's 32 tokens
    never = pair.router.submit([1] * 100, long_output(60))  # for D's 128 tokens
    small = pair.router.submit([2] * 8, long_output(4))
    complete(pair, rng)
    outcome = {r: pair.router.requests[r].outcome for r in (prompt_too_long, never, small)}
    assert list(outcome.values()) == ["too_large", "too_large", "done"]


@both_edges
def test_drain_of_both_roles_in_mid_flight(in_place: bool) -> None:
    rng = random.Random(9)
    pair = SimulatedPair(in_place=in_place, num_prefill=2, num_decode=2)
    for index in range(6):
        pair.router.submit([index] * 14, long_output(10))
    for _ in range(40):
        if ops := pair.pending():
            pair.do(ops[rng.randrange(len(ops))])
    for worker in (P0, D0):
        pair._send_to_worker(worker, Drain(grace_s=30.0))
    complete(pair, rng)
    assert all(t.outcome == "done" for t in pair.router.requests.values())
    assert sorted(pair.router.drained) == [D0, P0]


def test_tokens_do_not_depend_on_companions_place_or_order() -> None:
    """I8 by itself: the router compares every token with the undisturbed run; here many share prefixes."""
    rng = random.Random(10)
    pair = SimulatedPair(in_place=True, num_prefill=2, num_decode=2)
    requests: list[RequestId] = []
    for index in range(16):
        requests.append(pair.router.submit([7] * 9 + [index % 3], long_output(8), local=index % 4 == 0))
    complete(pair, rng)
    answers = {tuple(pair.router.requests[r].delivered) for r in requests}
    assert len(answers) == 3


def test_workers_count_the_pieces_that_others_cores_did_for_them() -> None:
    pair = SimulatedPair(in_place=True)
    pair.router.submit(list(range(9)), long_output(5))
    complete(pair, random.Random(1))
    for node in pair.nodes.values():
        load = node.core.load()
        assert load.borrowed_pieces == 2 * load.steps > 0  # `ScriptedRunner` says two for each


@both_edges
def test_steps_that_go_on_by_themselves_change_nothing(in_place: bool) -> None:
    """Whatever comes between their end and the core's hearing of it: new prompts, clients that leave."""
    rng = random.Random(3)
    pair = SimulatedPair(in_place=in_place, decode_blocks=64)
    for index in range(30):
        request = pair.router.submit([index % 7] * 5, long_output(14), local=index % 3 == 0)
        for _ in range(rng.randrange(60)):
            if ops := pair.pending():
                pair.do(ops[rng.randrange(len(ops))])
        if index % 4 == 0:
            pair.router.abort(request)
    complete(pair, rng)
    assert pair.num_went_on > 20
