"""Every peer, in the order of measuring and of the table.

All serve the same model on the same cores with as many compute threads as there are cores, hold 8192 tokens
of context, and may batch 64 sequences and 2048 prompt tokens. On random ids Baton makes no guesses at tokens,
and peers reuse no prefixes (there are none); on text (`is_text`) all guess and reuse as they do by default.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.load.figures.slo import Slo
from bench.peers.kinds.baton import baton_peers
from bench.peers.kinds.hf_transformers import transformers_peers
from bench.peers.kinds.llamacpp import llamacpp_peers
from bench.peers.kinds.openvino_genai import openvino_peers
from bench.peers.kinds.vllm_cpu import vllm_peers
from bench.peers.peer import Peer, Places

SPECULATION = (
    "as every server does by default: Baton checks guesses from a request's own prompt and answer; OpenVINO "
    "GenAI (`prompt_lookup`), vLLM (`--speculative-config`), llama.cpp (`--spec-type` of its server) and "
    "transformers (`prompt_lookup_num_tokens` of `generate`) can look prompts up, and do so only when told"
)


def all_peers(
    places: Places, cores: Sequence[int], *, is_text: bool = False, slos: Sequence[Slo] = ()
) -> list[Peer]:
    """Baton first. `slos`: what a search asks for; empty without one."""
    return [
        *baton_peers(places, cores, is_text=is_text, slos=slos),
        *openvino_peers(places, len(cores)),
        *vllm_peers(places, cores, is_text=is_text),
        *llamacpp_peers(places, len(cores)),
        *transformers_peers(places, len(cores)),
    ]
