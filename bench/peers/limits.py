"""What a peer's own bytes and this machine would allow at most: the yardstick beside each throughput. Pure.

Weights and KV count at the peer's own precision. The arithmetic limit is the best matrix-product rate
measured in the run, in floating point; integer arithmetic may exceed it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bench.machine import Machine
from bench.peers.peer import Peer
from bench.roofline import ModelShape, Roofline


def best_rates(machine: Machine, others: Sequence[Mapping[str, Any]]) -> Machine:
    """The machine with the best rate that any of the runs measured: whatever disturbs only lowers one."""
    rates = [name for name in (field.name for field in dataclasses.fields(machine)) if "_per_s" in name]
    best = {name: max([getattr(machine, name), *(other[name] for other in others)]) for name in rates}
    return dataclasses.replace(machine, **best)


def most_tokens_per_s(
    shape: ModelShape,
    peer: Peer,
    machine: Machine,
    concurrencies: Sequence[int],
    input_tokens: int,
    output_tokens: int,
) -> dict[int, float]:
    """Output tokens per second of the closed loop on all cores, by concurrency."""
    line = Roofline(
        shape=shape,
        weight_bytes_per_element=peer.weight_bits / 8,
        kv_bytes_per_element=peer.kv_bits / 8,
        bytes_per_s=machine.read_gb_per_s_all_threads * 1e9,
        flops_per_s=machine.gemm_gflop_per_s_all_threads * 1e9,
    )
    return {
        concurrency: line.most_output_tokens_per_s(concurrency, input_tokens, output_tokens)
        for concurrency in concurrencies
    }
