"""Which workers a router takes: a pure check of `Register` against what is known."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.ids import Epoch
from cluster.wire.messages import Register, Role


def refusal(
    register: Register, present: Iterable[Register], last_epoch: Epoch | None, block_size: int
) -> str | None:
    """Why this worker cannot be taken, one sentence; None if it can.

    `present` are the workers here now, `last_epoch` is the latest seen of this worker's name. Workers with
    unequal fingerprints would give different tokens for one request, ones with unequal blocks could not hand
    over KV, and an older epoch is a process that was already replaced. A newer one may have another role.
    """
    if last_epoch is not None and register.epoch < last_epoch:
        return f"epoch {register.epoch} of {register.worker} is stale: epoch {last_epoch} has been here"
    if register.geometry.block_size != block_size:
        return f"block size {register.geometry.block_size} differs from the cluster's: {block_size}"
    if register.role is Role.DECODE and not register.kv_address:
        return f"decode worker {register.worker} names no address for KV"
    if register.max_num_seqs < 1 or register.max_model_len < 1 or register.geometry.num_blocks < 1:
        return f"worker {register.worker} has no room for a single sequence"
    for other in present:
        kept, others = register.geometry.dtype, other.geometry.dtype
        if other.worker != register.worker and kept != others:
            return (
                f"{register.worker} keeps KV in {kept}, {other.worker} in {others}: their tokens would not "
                "be equal; start all workers with the same `--dtype` and `--kv-dtype`"
            )
        if other.worker == register.worker:
            if other.role is not register.role and register.epoch <= other.epoch:
                return f"{register.worker} is a {other.role.value} worker here, not {register.role.value}"
        elif other.fingerprint != register.fingerprint:
            return (
                f"fingerprint {register.fingerprint} differs from {other.fingerprint} of {other.worker}: "
                "their tokens would not be equal"
            )
    return None
