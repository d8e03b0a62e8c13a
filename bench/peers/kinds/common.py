"""What several kinds of peers share: limits, names and steps."""

from __future__ import annotations

from collections.abc import Sequence

from bench.peers.peer import Places, Step

HOST = "127.0.0.1"
CONTEXT = 8192
MAX_SEQUENCES = 64
BATCHED_TOKENS = 2048
KV_GB = 4
SERVED_NAME = "peer-model"
TORCH = "torch>=2.11,<2.14"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def venv_steps(places: Places, name: str, requirements: Sequence[str]) -> list[Step]:
    """Make an environment and install into it."""
    directory = places.venv(name)
    return [
        Step(f"make the environment {name}", (places.python, "-m", "venv", str(directory)), directory),
        Step(
            f"install {', '.join(requirements)}",
            (
                places.venv_python(name),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                *requirements,
            ),
            directory,
        ),
    ]


def model_step(places: Places) -> Step:
    """The bf16 directory that peers read, written by Baton's own reader."""
    out = places.model_directory("bf16")
    return Step(
        "write the model as bf16 safetensors",
        (places.python, "-m", "bench.peers.hf_model", "--model", places.model, "--out", str(out)),
        out,
        environment=(("PYTHONPATH", str(places.repository)),),
    )


def shim_environment(places: Places, num_threads: int) -> dict[str, str]:
    return {"PYTHONPATH": str(places.imports), "OMP_NUM_THREADS": str(num_threads)} | OFFLINE
