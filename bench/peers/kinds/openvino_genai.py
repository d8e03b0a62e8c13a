"""OpenVINO GenAI's continuous batching behind `shim_openvino`: 16- and 8-bit weights, and the GGUF."""

from __future__ import annotations

from pathlib import Path

from bench.peers.kinds.common import (
    BATCHED_TOKENS,
    CONTEXT,
    HOST,
    KV_GB,
    MAX_SEQUENCES,
    OFFLINE,
    SERVED_NAME,
    TORCH,
    model_step,
    shim_environment,
    venv_steps,
)
from bench.peers.peer import PORT, Peer, Places, Step

OPENVINO_VERSION = "2026.4.1.0"
EXPORT_PACKAGES = (TORCH, "optimum-intel[openvino]==2.2.0", "nncf")


def _export(places: Places, weight_format: str) -> Step:
    source, out = places.model_directory("bf16"), places.model_directory(f"openvino-{weight_format}")
    command = str(places.venv("export") / "bin" / "optimum-cli")
    return Step(
        f"export the model for OpenVINO, {weight_format} weights",
        (
            *(command, "export", "openvino", "--model", str(source)),
            *("--task", "text-generation-with-past", "--weight-format", weight_format, str(out)),
        ),
        out,
        environment=tuple(OFFLINE.items()),
    )


def openvino_peers(places: Places, num_threads: int) -> list[Peer]:
    install = venv_steps(places, "openvino", [f"openvino-genai=={OPENVINO_VERSION}"])
    export = [
        model_step(places),
        *venv_steps(places, "export", EXPORT_PACKAGES),
        # a torchvision that belongs to another torch breaks every import of transformers
        Step(
            "remove torchvision from the environment export",
            (
                places.venv_python("export"),
                "-m",
                "pip",
                "uninstall",
                "--quiet",
                "--yes",
                "torchvision",
                "torchaudio",
            ),
            places.venv("export"),
        ),
    ]
    settings = {
        "pipeline": "ContinuousBatchingPipeline behind bench/peers/shim_openvino.py",
        "max_num_batched_tokens": f"{BATCHED_TOKENS} (its default 256 costs prefill speed)",
        "max_num_seqs": str(MAX_SEQUENCES),
        "PERFORMANCE_HINT": "LATENCY: one stream that has all cores",
        "INFERENCE_NUM_THREADS": str(num_threads),
        "cache_size": f"{KV_GB} GB",
        "INFERENCE_PRECISION_HINT": "default: bf16 or f16 where the CPU multiplies them, else f32",
        "KV_CACHE_PRECISION": "default: u8",
        "prefix caching": "off, its default",
        "prompt lookup": "off, its default",
    }

    def peer(name: str, title: str, precision: str, model: Path, steps: list[Step], bits: float) -> Peer:
        return Peer(
            name=name,
            family="OpenVINO",
            title=title,
            precision=precision,
            weight_bits=bits,
            kv_bits=8,
            settings=settings,
            argv=(
                *(places.venv_python("openvino"), "-m", "bench.peers.shim_openvino"),
                *("--model", str(model), "--name", SERVED_NAME, "--host", HOST, "--port", PORT),
                *("--threads", str(num_threads), "--hint", "LATENCY"),
                *("--max-num-batched-tokens", str(BATCHED_TOKENS), "--max-num-seqs", str(MAX_SEQUENCES)),
                *("--max-model-len", str(CONTEXT), "--cache-gb", str(KV_GB)),
            ),
            model=SERVED_NAME,
            environment=shim_environment(places, num_threads),
            steps=(*install, *steps),
            needs_isa=frozenset({"avx2"}),
            python=places.venv_python("openvino"),
            distributions=("openvino", "openvino-genai"),
        )

    f16 = peer(
        "openvino-f16",
        "OpenVINO GenAI, 16-bit",
        "f16 weights, u8 KV; arithmetic as its hint says",
        places.model_directory("openvino-fp16"),
        [*export, _export(places, "fp16")],
        16,
    )
    int8 = peer(
        "openvino-int8",
        "OpenVINO GenAI, int8",
        "int8 weights per channel, u8 KV",
        places.model_directory("openvino-int8"),
        [*export, _export(places, "int8")],
        8,
    )
    if places.gguf is None:
        return [f16, int8]
    gguf = peer(
        "openvino-gguf", "OpenVINO GenAI, GGUF", "the GGUF's own Q4_1 weights, u8 KV", places.gguf, [], 5
    )
    return [f16, int8, gguf]
