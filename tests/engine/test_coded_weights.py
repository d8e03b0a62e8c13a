"""A GGUF file's codes on their way to the kernels: taken apart exactly, and whether a model keeps them or
not, its results have the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from cluster.engine import backends, weights_pack
from cluster.engine.gguf_codes import kept_bits, take_apart
from cluster.engine.gguf_source import GgufSource
from cluster.engine.model_spec import Dtype, ModelSpec
from cluster.engine.packed_batch import pack
from cluster.engine.weights_file import DATA, map_weights
from cluster.errors import ConfigError
from kernels.coded import CodedMatrix
from kernels.cpu import backend as cpu_backend
from kernels.cpu.backend import CpuBackend
from kernels.cpu.native import bind
from kernels.cpu.weight_kind import WeightKind
from tests.engine.test_fused import make_batches
from tests.engine.test_gguf import write_gguf
from tests.engine.tiny_models import BLOCK_SIZE, Engine, same_bits
from tests.support.isa_emulation import emulated_library

pytestmark = pytest.mark.timeout(600)  # the first test compiles the emulated library

KEPT = (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q8_0)


@pytest.mark.parametrize("kind", KEPT, ids=str)
def test_values_are_those_of_the_gguf_package(kind: Type) -> None:
    random = np.random.default_rng(0)
    values = random.standard_normal((12, 96)).astype(np.float32)
    data = gguf.quantize(values, kind)
    size = data.shape[1] // 3  # of a block
    halves = 2 if kind is Type.Q4_1 else 1
    for block in range(3):  # any codes, not only those that quantizing gives
        codes = data[:, block * size + 2 * halves : (block + 1) * size]
        codes[...] = random.integers(0, 256, codes.shape, dtype=np.uint8)
    coded = take_apart(data, kind)
    assert coded is not None
    expected = torch.from_numpy(gguf.dequantize(data, kind))
    assert coded.decode().equal(expected)
    if kind is not Type.Q4_0:  # which has no -0 as codes
        assert coded.decode().view(torch.int32).equal(expected.view(torch.int32))


@pytest.mark.parametrize("kind", KEPT, ids=str)
def test_a_source_gives_codes_and_values_of_the_same_bits(
    kind: Type, checkpoint: Any, tmp_path: Path
) -> None:
    source = GgufSource(write_gguf(tmp_path / "tiny.gguf", checkpoint("llama"), "llama", kind))
    name = "model.layers.0.mlp.down_proj.weight"
    coded = source.load_coded(name)
    assert coded is not None
    assert coded.decode().view(torch.int32).equal(source.load(name).view(torch.int32))


def test_other_types_have_no_codes() -> None:
    values = np.ones((4, 256), dtype=np.float32)
    for kind in (Type.F32, Type.F16, Type.BF16, Type.Q5_1):
        assert take_apart(gguf.quantize(values, kind), kind) is None
    assert take_apart(np.zeros((4, 144), dtype=np.uint8), Type.Q4_K) is None


def test_bits_that_a_file_keeps(checkpoint: Any, tmp_path: Path) -> None:
    for kind, bits in ((Type.Q4_0, 5.0), (Type.Q8_0, 8.5), (Type.F16, None)):
        assert kept_bits(write_gguf(tmp_path / "tiny.gguf", checkpoint("llama"), "llama", kind)) == bits


def test_rows_of_heads_are_put_in_the_order_of_values(checkpoint: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", checkpoint("llama"), "llama", Type.Q4_1)
    source = GgufSource(path)
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"):
        name = f"model.layers.1.{part}.weight"
        coded = source.load_coded(name)
        assert coded is not None
        assert coded.decode().equal(source.load(name))


@pytest.fixture(params=["avx512-bf16", "amx"])
def isa(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def make_backend(isa: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(form: str) -> CpuBackend:
        monkeypatch.setenv("BATON_CPU_ISA", isa)
        monkeypatch.setenv("BATON_GGUF_WEIGHTS", form)
        monkeypatch.setattr(cpu_backend, "load_library", emulated_library)
        return CpuBackend(2)

    return make


@pytest.mark.parametrize(
    ("isa", "kind", "tied"),  # every pair of them
    [
        ("avx512-bf16", Type.Q4_1, True),
        ("avx512-bf16", Type.Q8_0, False),
        ("amx", Type.Q4_1, False),
        ("amx", Type.Q8_0, True),
    ],
    indirect=["isa"],
)
def test_a_model_gives_the_same_bits_in_every_form(
    kind: Type, tied: bool, checkpoint: Any, prepare: Any, make_backend: Any, tmp_path: Path
) -> None:
    made = checkpoint("llama", tie_word_embeddings=tied, attention_bias=True)
    path = write_gguf(tmp_path / "tiny.gguf", made, "llama", kind)
    results: dict[tuple[str, bool], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for form in ("expand", "small", "auto"):
        backend = make_backend(form)
        prepared = prepare(path, Dtype.BF16, backend)
        for fuse in (True, False):
            engine = Engine(prepared, backend, fuse=fuse)
            results[form, fuse] = []
            for rows in make_batches(engine, prepared.spec.vocab_size):
                batch = pack(rows, BLOCK_SIZE, 512, engine.device)
                with torch.inference_mode():
                    one = engine.decoder.forward(batch, engine.pool)
                results[form, fuse].append((one.hidden.clone(), one.logits.clone()))
    expected = results["expand", False]
    for found in results.values():
        for (hidden, logits), (expected_hidden, expected_logits) in zip(found, expected, strict=True):
            assert hidden.equal(expected_hidden)
            assert logits.equal(expected_logits)


@pytest.mark.parametrize("num_seqs", [3, 4, 8])
def test_keys_that_few_rows_ask_for_ahead_change_no_bit(
    num_seqs: int, checkpoint: Any, prepare: Any, make_backend: Any, tmp_path: Path
) -> None:
    """Decoding leaves memory idle from 4 rows on (`kCodedRideRows`), fewer do not ask (`kv_ahead.h`)."""
    length = 72
    path = write_gguf(tmp_path / "tiny.gguf", checkpoint("llama"), "llama", Type.Q4_1)
    backend = make_backend("small")
    prepared = prepare(path, Dtype.BF16, backend)
    num_blocks = num_seqs * -(-(length + 1) // BLOCK_SIZE)
    results = []
    for fuse in (True, False):
        engine = Engine(prepared, backend, fuse=fuse, num_blocks=num_blocks, block_seed=1)
        for tokens, start in (([7] * length, 0), ([9], length)):
            rows = [engine.row(i, [token + i for token in tokens], start) for i in range(num_seqs)]
            with torch.inference_mode():
                result = engine.decoder.forward(pack(rows, BLOCK_SIZE, 512, engine.device), engine.pool)
        results.append((result.hidden.clone(), result.logits.clone(), engine.pool))
    for ours, theirs in zip(*results, strict=True):
        assert same_bits(ours, theirs)


def kinds_of(prepared: Any) -> dict[str, WeightKind]:
    """Of the matrices in the weight cache."""
    library = bind(emulated_library())
    tensors = map_weights(prepared.directory).tensors
    parts = ("qkv", "output", "gate_up", "down", "lm_head")
    names = [name for name in tensors if name.rpartition(".")[2] in parts]
    return {name: WeightKind(library.baton_weight_kind(tensors[name].data_ptr())) for name in names}


def test_what_the_cache_holds(
    checkpoint: Any,
    prepare: Any,
    make_backend: Any,
    isa: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_gguf(
        tmp_path / "tiny.gguf", checkpoint("llama", tie_word_embeddings=True), "llama", Type.Q4_0
    )
    sizes = {}
    for form in ("expand", "small", "auto"):
        prepared = prepare(path, Dtype.BF16, make_backend(form))
        kinds = (WeightKind.AMX_BF16, WeightKind.AMX_NIBBLES)
        if isa != "amx":
            kinds = (WeightKind.DOT_BF16, WeightKind.NIBBLES)
        assert set(kinds_of(prepared).values()) == {kinds[form != "expand"]}
        sizes[form] = (prepared.directory / DATA).stat().st_size
    assert sizes["small"] < sizes["expand"] < sizes["auto"]
    monkeypatch.setattr(weights_pack, "MOST_EXPANDED_BYTES", 1000)  # a large model
    shutil.rmtree(prepared.directory)
    large = prepare(path, Dtype.BF16, make_backend("auto"))
    expected = sizes["expand" if isa == "amx" else "small"]
    assert (large.directory / DATA).stat().st_size == expected


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", ["expand", "auto"])
def test_progress_counts_every_tensor_once(
    form: str, tied: bool, checkpoint: Any, make_backend: Any, tmp_path: Path
) -> None:
    made = checkpoint("llama", tie_word_embeddings=tied)
    source = GgufSource(write_gguf(tmp_path / "tiny.gguf", made, "llama", Type.Q4_0))
    spec = ModelSpec.from_hf_config(source.config, source.path)
    read: list[int] = []
    names = [
        stored.name
        for stored in weights_pack.packed_tensors(source, spec, Dtype.BF16, make_backend(form), read.append)
    ]
    assert len(names) == len(set(names))
    assert sum(read) == source.total_bytes


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_a_form_that_there_is_not_is_refused_in_a_sentence(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_GGUF_WEIGHTS", "tiny")
    with pytest.raises(ConfigError, match="`tiny`; use auto, small, expand"):
        backends.make_backend(name, 1)


def test_a_matrix_of_unlike_parts_is_decoded(
    checkpoint: Any, prepare: Any, make_backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in files that keep some projections at more bits."""
    path = write_gguf(tmp_path / "tiny.gguf", checkpoint("llama"), "llama", Type.Q8_0)
    load_coded = GgufSource.load_coded

    def some(source: GgufSource, name: str) -> CodedMatrix | None:
        return None if "v_proj" in name else load_coded(source, name)

    monkeypatch.setattr(GgufSource, "load_coded", some)
    kinds = kinds_of(prepare(path, Dtype.BF16, make_backend("auto")))
    assert not kinds["layers.0.qkv"].is_coded
    assert kinds["layers.0.down"].is_coded
