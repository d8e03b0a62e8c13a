"""llama.cpp's library behind `shim_llamacpp`: the GGUF as it is, and 16- and 8-bit weights."""

from __future__ import annotations

from bench.peers.kinds.common import (
    BATCHED_TOKENS,
    CONTEXT,
    HOST,
    MAX_SEQUENCES,
    SERVED_NAME,
    shim_environment,
    venv_steps,
)
from bench.peers.llamacpp_library import NPM_PACKAGE, NPM_VERSION, RELEASE
from bench.peers.peer import PORT, Peer, Places, Step

NUMPY = "numpy>=2,<3"


def llamacpp_peers(places: Places, num_threads: int) -> list[Peer]:
    """Only for a model that has a GGUF file; 16- and 8-bit files are written from it by llama.cpp itself."""
    if places.gguf is None:
        return []
    npm = places.cache / "npm" / "llamacpp"
    libraries = npm / "node_modules" / NPM_PACKAGE / "bins" / "linux-x64"
    shim = (places.venv_python("llamacpp"), "-m", "bench.peers.shim_llamacpp", "--libraries", str(libraries))
    imports = (("PYTHONPATH", str(places.imports)),)
    install = (
        *venv_steps(places, "llamacpp", [NUMPY]),
        Step(
            f"install {NPM_PACKAGE} {NPM_VERSION}",
            (
                *("npm", "install", "--prefix", str(npm), "--ignore-scripts", "--no-audit", "--no-fund"),
                f"{NPM_PACKAGE}@{NPM_VERSION}",
            ),
            npm,
        ),
    )

    def peer(kind: str, precision: str, bits: float) -> Peer:
        assert places.gguf is not None
        home = places.model_directory(f"llamacpp-{kind}")
        model, steps = places.gguf, install
        if kind != "gguf":
            model = home / "model.gguf"
            write = ("--model", str(places.gguf), "--write", kind, str(model))
            steps = (*install, Step(f"write the model as {kind} GGUF", (*shim, *write), home, imports))
        return Peer(
            name=f"llamacpp-{kind}",
            family="llama.cpp",
            title=f"llama.cpp, {kind if kind != 'gguf' else 'GGUF as it is'}",
            precision=precision,
            weight_bits=bits,
            settings={
                "library": f"llama.cpp {RELEASE} of npm's {NPM_PACKAGE} {NPM_VERSION}",
                "CPU backend": "the best one for this CPU, chosen by llama.cpp",
                "server": "bench/peers/shim_llamacpp.py: one context, one sequence per request",
                "n_batch": f"{BATCHED_TOKENS}, n_ubatch 512 (default)",
                "n_seq_max": f"{MAX_SEQUENCES}, unified KV of {MAX_SEQUENCES * 1024} tokens, f16 (default)",
                "flash attention": "default (auto)",
                "threads": str(num_threads),
                "speculation": "none, as its own server by default",
            },
            argv=(
                *(*shim, "--model", str(model), "--name", SERVED_NAME, "--host", HOST, "--port", PORT),
                *("--threads", str(num_threads), "--max-num-batched-tokens", str(BATCHED_TOKENS)),
                *("--max-num-seqs", str(MAX_SEQUENCES), "--cache-tokens", str(MAX_SEQUENCES * 1024)),
                *("--max-model-len", str(CONTEXT)),
            ),
            model=SERVED_NAME,
            environment=shim_environment(places, num_threads),
            steps=steps,
            python=places.venv_python("llamacpp"),
            distributions=("numpy",),
            why_unusual="only if named: its own 4-bit form is the faster one" if kind == "q8_0" else None,
        )

    return [
        peer("f16", "f16 weights, f16 KV", 16),
        peer("q8_0", "Q8_0 weights, f16 KV", 8.5),
        peer("gguf", "the GGUF's own Q4_1 weights, f16 KV", 5),
    ]
