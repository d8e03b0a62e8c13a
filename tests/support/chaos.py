"""Random runs of a simulated pair: requests and faults from one generator, then all must get quiet."""

from __future__ import annotations

import random

from cluster.ids import WorkerId
from cluster.sampling import SamplingParams
from decode_worker.core import DecodeConfig
from prefill_worker.core import PrefillConfig
from tests.support.simulated_pair import BLOCK_BYTES, SimulatedPair

FAULTS = ("abort", "finish", "edge", "kill_prefill", "kill_decode", "step", "duplicate", "expire", "renew")


def build(rng: random.Random, *, in_place: bool) -> SimulatedPair:
    """Small pools, small budgets, one to two workers a role."""
    block_size = rng.choice([1, 4, 5])
    return SimulatedPair(
        in_place=in_place,
        num_prefill=rng.choice([1, 1, 2]),
        num_decode=rng.choice([1, 1, 2]),
        block_size=block_size,
        prefill_blocks=rng.choice([60, 90]) // block_size,
        decode_blocks=rng.choice([64, 80, 160]) // block_size,
        prefill_config=PrefillConfig(
            BLOCK_BYTES,
            max_step_tokens=rng.choice([3, 16]),
            max_piece_bytes=rng.choice([1, 3]) * BLOCK_BYTES,
            max_pieces_in_flight=rng.choice([1, 4]),
        ),
        decode_config=DecodeConfig(
            BLOCK_BYTES,
            max_num_seqs=rng.choice([2, 8]),
            growth_blocks=rng.choice([0, 1]),
            max_chunk_tokens=rng.choice([1, 4, 16]),
        ),
    )


def submit(pair: SimulatedPair, rng: random.Random) -> None:
    """A prompt that often shares its head with others."""
    head = [7, 7, 7, 8, 8, 8, 9, 9, 9, 1, 2, 3, 4, 5, 6][: rng.choice([0, 4, 5, 8, 15])]
    prompt = head + [rng.randrange(50) for _ in range(rng.randrange(1, 24))]
    params = SamplingParams(
        max_tokens=rng.randrange(1, 20),
        seed=rng.randrange(3),
        eos_token_ids=(0,),
        stop_token_ids=(1, 2),
        min_tokens=rng.choice([0, 0, 5]),
    )
    pair.router.submit(prompt, params, local=rng.random() < 0.25, salt=rng.choice(["", "", "s"]))


def disturb(pair: SimulatedPair, rng: random.Random, faults: tuple[str, ...] = FAULTS) -> str:
    """One fault."""
    fault = rng.choice(faults)
    alive = [node.worker for node in pair.nodes.values() if node.alive]
    running = [t.request for t in pair.router.requests.values() if t.outcome is None]
    match fault:
        case "abort" if running:
            pair.router.abort(rng.choice(running))
        case "finish" if running:
            pair.router.finish(rng.choice(running))
        case "edge" if pair.edges:
            pair.break_edge(rng.choice(pair.edges))
        case "kill_prefill" | "kill_decode":
            role = fault.removeprefix("kill_")
            victims = [worker for worker in pair.nodes if worker.startswith(role)]
            _toggle(pair, rng.choice(victims))
        case "step":
            pair.fail_next_step(rng.choice(alive)) if alive else None
        case "duplicate":
            pair.duplicate(rng.randrange(100))
        case "expire":
            pair.advance(rng.choice([0.3, 3.0, 10.5]))
        case "renew":
            pair.router.renew()
    return fault


def _toggle(pair: SimulatedPair, worker: WorkerId) -> None:
    if pair.nodes[worker].alive:
        pair.kill(worker)
    else:
        pair.restart(worker)


def calm(pair: SimulatedPair, rng: random.Random) -> None:
    """No more faults: everyone is up again, everything ends, nothing is left."""
    for worker, node in list(pair.nodes.items()):
        if not node.alive:
            pair.restart(worker)
    pair.failing.clear()
    pair.settle(rng.randrange)
    for worker in pair.silent_writers():  # nobody needs their lost edges any more: only their ends are proof
        pair.kill(worker)
        pair.restart(worker)
    pair.settle(rng.randrange)
    pair.check_quiet()


def run(seed: int, *, in_place: bool, num_ops: int = 250, faults: tuple[str, ...] = FAULTS) -> SimulatedPair:
    rng = random.Random(seed)
    pair = build(rng, in_place=in_place)
    rate = rng.choice([0.01, 0.04, 0.15])
    for _ in range(num_ops):
        draw = rng.random()
        if draw < 0.05:
            submit(pair, rng)
        elif draw < 0.05 + rate:
            disturb(pair, rng, faults)
            pair.check()
        elif ops := pair.pending():
            pair.do(rng.choice(ops))
            pair.advance(0.0005)
    calm(pair, rng)
    return pair
