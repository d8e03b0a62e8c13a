"""What a peer's own bytes and this machine would allow at most: the yardstick beside each throughput. Pure.

Weights and KV count at the peer's own precision. So does arithmetic, at the best rate measured in the run: of
fp32 for weights of 32 bits, of the best floating point for those of 16, and for fewer of int8, which their
products may be made in (the better of the two, where it was measured).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bench.machine import Machine
from bench.peers.outcome import FLOAT, FP32, INT8, MEMORY
from bench.peers.peer import Peer
from bench.roofline import ModelShape, Roofline

ALL, ONE = "_all_threads", "_one_thread"  # ends of the names of a machine's rates


def best_rates(machine: Machine, others: Sequence[Mapping[str, Any]]) -> Machine:
    """The machine with the best rate that any of the runs measured: whatever disturbs only lowers one. All
    cores together do at least what one does.
    """
    rates = [name for name in (field.name for field in dataclasses.fields(machine)) if "_per_s" in name]
    best = {
        name: max([getattr(machine, name), *(other.get(name, 0.0) for other in others)]) for name in rates
    }
    for name in rates:
        if name.endswith(ALL):
            best[name] = max(best[name], best[name.removesuffix(ALL) + ONE])
    return dataclasses.replace(machine, **best)


def limits(
    shape: ModelShape,
    peer: Peer,
    machine: Machine,
    concurrencies: Sequence[int],
    input_tokens: int,
    output_tokens: int,
) -> tuple[dict[int, float], dict[int, str]]:
    """Output tokens per second of the closed loop on all cores, and what binds them, by concurrency. Where
    memory binds a server that makes guesses there is no limit: one reading of the weights may give it several
    tokens.
    """
    arithmetic, flops_per_s = _arithmetic(peer, machine)
    line = Roofline(
        shape=shape,
        weight_bytes_per_element=peer.weight_bits / 8,
        kv_bytes_per_element=peer.kv_bits / 8,
        bytes_per_s=machine.read_gb_per_s_all_threads * 1e9,
        flops_per_s=flops_per_s,
    )
    most, bound_by = {}, {}
    for concurrency in concurrencies:
        work = line.closed_loop(concurrency, input_tokens, output_tokens)
        if peer.makes_guesses and line.is_memory_bound(work):
            continue
        most[concurrency] = line.most_output_tokens_per_s(concurrency, input_tokens, output_tokens)
        bound_by[concurrency] = MEMORY if line.is_memory_bound(work) else arithmetic
    return most, bound_by


def _arithmetic(peer: Peer, machine: Machine) -> tuple[str, float]:
    """Its name, and operations per second."""
    best = machine.gemm_gflop_per_s_all_threads
    bits = peer.weight_bits if peer.arithmetic_bits is None else peer.arithmetic_bits
    if bits >= 32 and machine.fp32_gflop_per_s_all_threads:
        return FP32, machine.fp32_gflop_per_s_all_threads * 1e9
    if bits < 16 and machine.int8_gop_per_s_all_threads:
        return INT8, max(best, machine.int8_gop_per_s_all_threads) * 1e9
    return FLOAT, best * 1e9
