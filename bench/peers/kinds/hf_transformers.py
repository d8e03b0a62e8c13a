"""transformers behind `shim_transformers`: continuous batching, and one `generate` after another."""

from __future__ import annotations

from bench.peers.kinds.common import (
    BATCHED_TOKENS,
    CONTEXT,
    HOST,
    MAX_SEQUENCES,
    SERVED_NAME,
    TORCH,
    model_step,
    shim_environment,
    venv_steps,
)
from bench.peers.peer import PORT, Peer, Places

TRANSFORMERS = "transformers==5.24.0"
HAS_BF16 = frozenset({"avx512_bf16"})  # elsewhere it is emulated
ONE_BY_ONE = "only if named: it serves one request after another, which takes most of an hour on two cores"


def transformers_peers(places: Places, num_threads: int) -> list[Peer]:
    steps = (model_step(places), *venv_steps(places, "transformers", [TORCH, TRANSFORMERS]))

    def peer(
        mode: str, title: str, dtype: str, bits: int, extra: dict[str, str], isa: frozenset[str] = frozenset()
    ) -> Peer:
        return Peer(
            name=f"transformers-{mode}-{dtype}",
            family="transformers",
            title=f"{title}, {dtype}",
            precision=f"{dtype} weights and arithmetic",
            weight_bits=bits,
            kv_bits=bits,
            settings={
                "torch threads": str(num_threads),
                "attention": "sdpa",
                "prompt lookup": "off, its default",
            }
            | extra,
            argv=(
                *(places.venv_python("transformers"), "-m", "bench.peers.shim_transformers", "--mode", mode),
                *("--model", str(places.model_directory("bf16")), "--name", SERVED_NAME),
                *("--host", HOST, "--port", PORT, "--threads", str(num_threads), "--dtype", dtype),
                *("--max-num-batched-tokens", str(BATCHED_TOKENS), "--max-num-seqs", str(MAX_SEQUENCES)),
                *(
                    "--max-model-len",
                    str(CONTEXT),
                ),
            ),
            model=SERVED_NAME,
            environment=shim_environment(places, num_threads),
            steps=steps,
            needs_isa=isa,
            python=places.venv_python("transformers"),
            distributions=("transformers", "torch"),
            why_unusual=None if mode == "continuous" else ONE_BY_ONE,
        )

    batching = {
        "server": "ContinuousBatchingManager behind bench/peers/shim_transformers.py",
        "max_batch_tokens": str(BATCHED_TOKENS),
        "block sharing": "off",
    }
    alone = {"server": "model.generate behind bench/peers/shim_transformers.py, one request at a time"}
    return [
        peer("continuous", "transformers, continuous batching", "float32", 32, batching),
        peer("continuous", "transformers, continuous batching", "bfloat16", 16, batching, HAS_BF16),
        peer("generate", "transformers, generate", "float32", 32, alone),
        peer("generate", "transformers, generate", "bfloat16", 16, alone),
    ]
