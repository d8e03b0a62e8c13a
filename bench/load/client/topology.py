"""What a Baton server is made of: its workers by role, as `/cluster` lists them; and a hash of what it says.

`/cluster` is for operators: where it is not public, or not there, nothing is known, and nothing is wrong.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b

import orjson

from bench.load.client.target import PROBE_TIMEOUT_S, ServerInfo, Target, call
from cluster.errors import BatonError

Topology = dict[str, int]  # role |-> workers


def read_topology(target: Target, timeout_s: float = PROBE_TIMEOUT_S) -> Topology | None:
    """None: the server does not say."""
    try:
        status, body = call(target, "GET", "/cluster", timeout_s=timeout_s)
    except BatonError:
        return None
    return parse_topology(body) if status == 200 else None


def parse_topology(body: bytes) -> Topology | None:
    """Of a reply of `/cluster`; None if it is not one."""
    try:
        roles = Counter(str(worker["role"]) for worker in orjson.loads(body)["workers"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return dict(sorted(roles.items()))


def config_hash(server: ServerInfo, topology: Topology | None) -> str:
    """Equal for servers that say the same about themselves: model, length, version, workers."""
    told = [server.model, server.max_model_len, server.version, server.owned_by, topology]
    return blake2b(orjson.dumps(told, option=orjson.OPT_SORT_KEYS), digest_size=8).hexdigest()
