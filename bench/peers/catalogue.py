"""Every peer, in the order of measuring and of the table.

All serve the same model on the same cores with as many compute threads as there are cores, hold 8192 tokens
of context, may batch 64 sequences and 2048 prompt tokens, and reuse no prefixes (prompts are random anyway).
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.peers.kinds.baton import baton_peers
from bench.peers.kinds.hf_transformers import transformers_peers
from bench.peers.kinds.llamacpp import llamacpp_peers
from bench.peers.kinds.openvino_genai import openvino_peers
from bench.peers.kinds.vllm_cpu import vllm_peers
from bench.peers.peer import Peer, Places


def all_peers(places: Places, cores: Sequence[int]) -> list[Peer]:
    """Baton first."""
    return [
        *baton_peers(places, cores),
        *openvino_peers(places, len(cores)),
        *vllm_peers(places, cores),
        *llamacpp_peers(places, len(cores)),
        *transformers_peers(places, len(cores)),
    ]
