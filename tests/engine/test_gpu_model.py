"""From a worker's settings to a runner on a device, in Triton's interpreter; what cannot work is one line."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.engine import backends, gpu_model
from cluster.engine.backends import make_backend, resolve_backend
from cluster.engine.batch import Runner, StepPlan
from cluster.engine.decoder import Decoder
from cluster.engine.gpu_memory import NUM_SCRATCH_BLOCKS
from cluster.engine.gpu_runner import GpuRunner
from cluster.engine.runner import ModelRunner
from cluster.engine.worker_engine import WorkerEngine, open_engine
from cluster.errors import ConfigError
from cluster.ids import Epoch, WorkerId
from cluster.role_config import WorkerConfig
from cluster.sampling import SamplingParams
from cluster.wire.messages import Role
from tests.engine.test_runner import make_row
from tests.kernels.triton_support import require

require("kernels.triton.backend")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be measured")
SMALL = {
    "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 96,
}  # fmt: skip
BLOCK_BYTES = 1 * 2 * 16 * 1 * 16 * 4  # layers, K and V, tokens, heads, head_dim, fp32


@pytest.fixture
def opened(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    directory = checkpoint("qwen3", **SMALL).directory
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))

    def run(**settings: Any) -> WorkerEngine:
        given: dict[str, Any] = {
            "role": Role.DECODE,
            "backend": "triton",
            "dtype": "fp32",
            "kv_edge": "gloo",
            "kv_bytes": 8 * BLOCK_BYTES,
            "max_model_len": 64,
            "max_num_seqs": 1,
            "max_chunk_tokens": 16,
        }
        config = WorkerConfig(
            cluster_token="secret",
            served_model_name="tiny",
            block_size=16,
            worker=WorkerId("worker-0"),
            epoch=Epoch(1),
            router_addresses=(),
            model=str(directory),
            kv_address=None,
            runtime_dir="",
            **given | settings,
        )
        return open_engine(config)

    return run


def answer(runner: Runner) -> list[int]:
    """A prompt and one step more."""
    prompt, blocks = [3, 9, 27, 81, 50], [5, 2]
    params = SamplingParams(max_tokens=9, temperature=0.9, seed=3)
    ids: list[int] = []
    for _ in range(2):
        tokens, start = (ids[-1:], len(prompt) + len(ids) - 1) if ids else (prompt, 0)
        row = make_row("r", tokens, start, blocks, history=(prompt, ids), params=params)
        (output,) = runner.run(StepPlan((row,))).outputs
        assert output is not None
        ids.append(output.token_id)
    return ids


@pytest.mark.parametrize("role", list(Role))
def test_a_worker_serves_from_its_device(opened: Any, role: Role, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = opened(role=role)
    assert engine.layout.num_blocks == 8
    pool = engine.make_pool(shared=False)
    assert pool.tensor.shape[0] == 8
    assert pool.whole.shape[0] == 8 + NUM_SCRATCH_BLOCKS
    runner = engine.make_runner(pool.whole)()
    assert isinstance(runner, GpuRunner)
    assert ("captured 3 decode steps of up to 1 rows" in caplog.text) == (role is Role.DECODE)
    plain = ModelRunner(engine.prepared, torch.zeros_like(pool.tensor), engine.backend, engine.max_model_len)
    assert answer(runner) == answer(plain)


def test_what_no_kernel_takes_goes_to_the_reference_with_one_line(
    opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    int8 = {"role": Role.PREFILL, "kv_dtype": "int8", "kv_bytes": 8 * 1 * 2 * 16 * 1 * 20}
    engine, reference = opened(**int8), opened(**int8, backend="reference")
    pool = engine.make_pool(shared=False)
    assert pool.whole.dtype is torch.int8
    runner = engine.make_runner(pool.whole)()
    told = [record.getMessage() for record in caplog.records if "paged_attention" in record.getMessage()]
    plain = ModelRunner(reference.prepared, torch.zeros_like(pool.whole), reference.backend, 64)
    assert answer(runner) == answer(plain)
    assert len(told) == 1
    assert "runs in plain torch, slower; its kernel does not take mixed dtypes" in told[0]


def test_the_largest_steps_are_measured_and_those_of_graphs_count_twice(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows that are spread may take more than three; beside a chunk both numbers are tried."""
    engine = opened()
    bytes_of = {1: 200, 2: 500, 3: 300}  # decode steps, by rows
    done: list[int] = []

    def peak(work: Any, device: torch.device) -> int:
        done.append(len(work().outputs))
        is_alone = len(done) <= len(bytes_of)
        return bytes_of[done[-1]] if is_alone else 1000 + done[-1]

    monkeypatch.setattr(gpu_model, "_peak_bytes", peak)
    assert engine.gpu is not None

    def measured(role: Role) -> int:
        config = WorkerConfig(
            cluster_token="secret", served_model_name="tiny", block_size=16, worker=WorkerId("w"), role=role,
            epoch=Epoch(1), router_addresses=(), model="", kv_address=None, runtime_dir="", max_num_seqs=3,
            max_chunk_tokens=4,
        )  # fmt: skip
        return gpu_model._measure_steps(
            config, engine.prepared, engine.backend, engine.layout, engine.gpu.decoder
        )

    assert measured(Role.DECODE) == 1003 + 500 + 3 * 4 * (96 + 4)  # logits and block tables of 3 rows
    assert done[:3] == [1, 2, 3]
    assert sorted(done[3:]) == [2, 3]
    done.clear()
    assert measured(Role.PREFILL) == 1003


def test_workers_compute_in_the_mode_asked_for_and_pair_in_it_alone(
    opened: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engines = []
    for mode in ("", "exact", "fast"):
        monkeypatch.setenv("BATON_GPU_MODE", mode)
        engines.append(opened(role=Role.PREFILL))
    assert [engine.backend.mode for engine in engines] == ["exact", "exact", "fast"]
    default, exact, fast = (engine.fingerprint for engine in engines)
    assert default == exact != fast
    assert caplog.text.count("GPU mode `fast`: the bits of a result may depend on") == 1
    monkeypatch.setenv("BATON_GPU_MODE", "quick")
    with pytest.raises(ConfigError, match="BATON_GPU_MODE is `quick`; use exact or fast"):
        opened()


def test_what_cannot_work_is_one_line(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="the KV edge `shm` needs KV in memory of the host"):
        opened(kv_edge="shm")
    with pytest.raises(ConfigError, match="use a smaller block size or `--kv-dtype int8`"):
        opened(kv_bytes=BLOCK_BYTES)
    with pytest.raises(ConfigError, match="triton backend does not compute with quantization `int8`"):
        opened(quantization="int8")
    engine = opened()

    def broken(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("out of resource: shared memory\nRequired: 300000, limit: 232448")

    monkeypatch.setattr(Decoder, "forward", broken)
    with pytest.raises(ConfigError) as error:
        engine.make_runner(engine.make_pool(shared=False).whole)()
    assert str(error.value) == "no step can be computed on this GPU: out of resource: shared memory"
    assert not torch.is_inference_mode_enabled(), "the mode must not live on in an error's traceback"


def test_auto_takes_a_gpu_where_one_can_be_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert resolve_backend("triton") == "triton"
    assert resolve_backend("auto") == "cpu"  # an interpreter is no GPU
    monkeypatch.setattr(backends, "interpreting", lambda: False)
    monkeypatch.setattr(backends, "why_unavailable", lambda: "torch sees no CUDA device")
    assert resolve_backend("auto") == "cpu"
    assert "backend `cpu`: torch sees no CUDA device" in caplog.text
    with pytest.raises(ConfigError, match=r"^torch sees no CUDA device$"):
        make_backend("triton", 1)
    monkeypatch.setattr(backends, "why_unavailable", lambda: None)
    assert resolve_backend("auto") == "triton"
