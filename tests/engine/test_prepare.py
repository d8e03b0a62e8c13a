"""The weight cache: converted once, mapped afterwards, keyed by everything that decides its bytes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.engine import prepare as prepare_module
from cluster.engine.backends import QUANTIZATIONS, make_backend
from cluster.engine.file_lock import file_lock
from cluster.engine.load import load_decoder
from cluster.engine.model_spec import Dtype
from cluster.engine.prepare import default_cache_dir, prepare_model
from cluster.engine.weights_file import DATA, map_weights
from cluster.errors import ConfigError, ModelError
from kernels.quantization import Quantization
from kernels.reference import ReferenceBackend
from tests.engine.tiny_models import Engine, prompts


class OtherLayout(ReferenceBackend):
    """Same numbers, another packed layout."""

    packed_layout = "rows-reversed"

    def pack_linear(self, weight: torch.Tensor) -> torch.Tensor:
        return super().pack_linear(weight).flip(0)

    def linear(self, x: Any, packed: Any, bias: Any = None) -> torch.Tensor:
        return super().linear(x, packed.flip(0), bias)

    def linear_fp32(self, x: Any, packed: Any) -> torch.Tensor:
        return super().linear_fp32(x, packed.flip(0))


class OpaqueLayout(ReferenceBackend):
    """Packs into something that is not a tensor, as a library's own format."""

    packed_layout = "opaque"

    def pack_linear(self, weight: torch.Tensor) -> Any:
        return (super().pack_linear(weight),)

    def linear(self, x: Any, packed: Any, bias: Any = None) -> torch.Tensor:
        return super().linear(x, packed[0], bias)

    def linear_fp32(self, x: Any, packed: Any) -> torch.Tensor:
        return super().linear_fp32(x, packed[0])


def test_second_time_nothing_is_converted(checkpoint: Any, prepare: Any) -> None:
    directory = checkpoint("llama").directory
    reports: list[tuple[str, int, int]] = []
    first = prepare(directory, progress=lambda *report: reports.append(report))
    phases = list(dict.fromkeys(phase for phase, _, _ in reports))
    assert phases == ["reading", "converting"]
    done = [d for phase, d, _ in reports if phase == "converting"]
    assert done == sorted(done)
    assert (
        reports[-1][1]
        == reports[-1][2]
        == sum(f.stat().st_size for f in directory.glob("*.safetensors")) - (header_bytes(directory))
    )
    reports.clear()
    assert prepare(directory, progress=lambda *report: reports.append(report)) == first
    assert reports == []
    assert not list(first.directory.parent.glob(".*.tmp"))


def header_bytes(directory: Path) -> int:
    (file,) = directory.glob("*.safetensors")
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


def test_cache_directory_has_what_other_parts_read(checkpoint: Any, prepare: Any) -> None:
    source = checkpoint("qwen2").directory
    (source / "tokenizer.json").write_text("{}")
    (source / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 9], "temperature": 0.7}')
    prepared = prepare(source)
    assert prepared.eos_token_ids == (2, 9)
    assert prepared.name == "qwen2"
    generation = json.loads((prepared.directory / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [2, 9], "temperature": 0.7}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (prepared.directory / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((prepared.directory / "config.json").read_text())["model_type"] == "qwen2"


def test_fingerprint_follows_content_not_place(checkpoint: Any, prepare: Any, tmp_path: Path) -> None:
    source = checkpoint("llama").directory
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in source.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    original, copied = prepare(source), prepare(copy)
    assert original.directory != copied.directory
    assert original.fingerprint == copied.fingerprint
    others = [
        prepare(source, Dtype.BF16),
        prepare(source, Dtype.FP32, OtherLayout()),
        prepare(checkpoint("llama", tie_word_embeddings=True).directory),
    ]
    assert len({p.fingerprint for p in [original, *others]}) == 4


def test_fingerprint_follows_the_arithmetic(checkpoint: Any, prepare: Any, monkeypatch: Any) -> None:
    source = checkpoint("llama").directory
    before = prepare(source)
    monkeypatch.setattr("cluster.engine.prepare.NUMERICS", 0)
    after = prepare(source)
    assert after.directory == before.directory, "nothing is converted anew"
    assert after.fingerprint != before.fingerprint


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_quantizations_of_one_model_live_side_by_side(
    backend: str, checkpoint: Any, prepare: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two fingerprints no two workers pair; converting one leaves the others in place."""
    source = checkpoint("llama").directory
    caplog.set_level("INFO", logger="cluster.engine.prepare")
    made = {
        kind.value: prepare(source, Dtype.BF16, make_backend(backend, 1, kind.value)) for kind in Quantization
    }
    assert len({prepared.fingerprint for prepared in made.values()}) == 3
    assert len({prepared.directory for prepared in made.values()}) == 3
    assert {name: prepared.quantization for name, prepared in made.items()} == {name: name for name in made}
    lines = [record.getMessage() for record in caplog.records if record.name == "cluster.engine.prepare"]
    assert [line.partition(":")[2].split(",")[0] for line in lines] == [
        " matrices quantized to int8",
        " matrices quantized to int8-weights",
    ]
    caplog.clear()
    for kind in Quantization:
        again = prepare(source, Dtype.BF16, make_backend(backend, 1, kind.value))
        assert again == made[kind.value]
    assert not caplog.records


def test_int8_matrices_take_a_quarter_of_fp32(checkpoint: Any, prepare: Any) -> None:
    source = checkpoint("llama").directory
    plain = map_weights(prepare(source).directory).tensors
    quantized = map_weights(
        prepare(source, Dtype.FP32, ReferenceBackend("cpu", Quantization.INT8)).directory
    ).tensors
    matrix = "layers.0.gate_up"
    rows, columns = plain[matrix].shape
    assert quantized[matrix].nbytes == rows * (columns + 4)  # a scale for each row
    # rows of the embedding stay in the model's type; turned, they are as long as before
    assert quantized["embedding"].dtype is torch.float32
    torch.testing.assert_close(quantized["embedding"].norm(dim=1), plain["embedding"].norm(dim=1))


@pytest.mark.parametrize(("name", "tied"), [("cpu", False), ("reference", True), ("cpu", True)])
def test_int8_answers_are_near_and_stored_ones_are_the_same(
    name: str, tied: bool, checkpoint: Any, prepare: Any
) -> None:
    """In fp32 the two backends quantize alike; sums that are not integers differ in the last bits."""
    source = checkpoint("llama", tie_word_embeddings=tied).directory
    prompt = prompts(lengths=(40,))[0]

    def logits(backend: Any) -> torch.Tensor:
        engine = Engine(prepare(source, Dtype.FP32, backend), backend)
        return engine.logits(engine.prefill(0, prompt))

    plain = logits(make_backend(name, 1))
    for kind, bound in (("int8", 0.16), ("int8-weights", 0.08)):
        first, second = logits(make_backend(name, 1, kind)), logits(make_backend(name, 1, kind))
        assert torch.equal(first, second)
        assert 0 < (first - plain).norm() / plain.norm() < bound


def test_quantizations_that_do_not_exist_are_named() -> None:
    with pytest.raises(ConfigError, match="unknown quantization `int4`; use none or int8 or int8-weights"):
        make_backend("cpu", 1, "int4")
    with pytest.raises(ConfigError, match="unknown backend `gpu`; use cpu or triton or auto or reference"):
        make_backend("gpu", 1, "int8")


def test_a_backend_without_a_quantization_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(QUANTIZATIONS, "cpu", (Quantization.NONE,))
    with pytest.raises(
        ConfigError, match="the cpu backend does not compute with quantization `int8`; use none"
    ):
        make_backend("cpu", 1, "int8")
    assert make_backend("cpu", 1).quantization is Quantization.NONE


def test_a_matrix_too_wide_for_int8_is_named(checkpoint: Any, prepare: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("kernels.quantization.MAX_IN_FEATURES", 95)
    with pytest.raises(ModelError, match=r"layers\.0\.qkv cannot be packed: int8 takes at most 95 input"):
        prepare(checkpoint("llama").directory, Dtype.FP32, ReferenceBackend("cpu", Quantization.INT8))


def test_changed_source_is_converted_again(checkpoint: Any, prepare: Any) -> None:
    made = checkpoint("llama")
    before = prepare(made.directory)
    with torch.no_grad():
        made.model.model.norm.weight.mul_(2)
    made.model.save_pretrained(made.directory)
    after = prepare(made.directory)
    assert after.fingerprint != before.fingerprint
    assert after.directory != before.directory


@pytest.mark.parametrize("layout", [OtherLayout, OpaqueLayout])
@pytest.mark.parametrize("tied", [True, False])
def test_packed_layout_is_stored_and_mapped(layout: Any, tied: bool, checkpoint: Any, prepare: Any) -> None:
    source = checkpoint("llama", tie_word_embeddings=tied).directory
    plain = Engine(prepare(source), ReferenceBackend()).greedy(prompts(), 8)
    assert Engine(prepare(source, Dtype.FP32, layout()), layout()).greedy(prompts(), 8) == plain


def test_weights_are_one_shared_read_only_mapping(checkpoint: Any, prepare: Any) -> None:
    prepared = prepare(checkpoint("llama", tie_word_embeddings=True).directory)
    file = str(prepared.directory / DATA)
    decoder = load_decoder(prepared, ReferenceBackend())
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if file in line]
    assert [entry[1] for entry in maps] == ["r--s"]
    low, high = (int(part, 16) for part in maps[0][0].split("-"))
    weights = decoder._weights
    layer = weights.layers[-1]
    for tensor in (
        weights.embedding,
        weights.lm_head,
        weights.final_norm,
        layer.qkv,
        layer.gate_up,
        layer.down,
    ):
        assert low <= tensor.data_ptr() < high
        assert tensor.data_ptr() % 64 == 0
    assert weights.lm_head.data_ptr() == weights.embedding.data_ptr()  # tied: stored once


def test_two_at_once_convert_once(checkpoint: Any, prepare: Any) -> None:
    """Each waits for the file's lock as two processes would: flock belongs to the open file."""
    directory = checkpoint("llama").directory
    conversions: list[str] = []
    results: list[Any] = []

    def work() -> None:
        results.append(prepare(directory, progress=lambda phase, *_: conversions.append(phase)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 4
    assert len(set(results)) == 1
    assert conversions.count("reading") == 1


def test_lock_has_a_deadline_and_is_let_go(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with file_lock(path, 1), pytest.raises(TimeoutError), file_lock(path, 0.05):
        raise AssertionError("the lock was given twice")
    with file_lock(path, 5):  # the waiter that gave up does not keep it
        pass


def test_lock_timeout_says_who_is_waited_for(checkpoint: Any, tmp_path: Path) -> None:
    directory = checkpoint("llama").directory
    cache = tmp_path / "cache"
    reached, release = threading.Event(), threading.Event()

    def hold(phase: str, *_: int) -> None:
        reached.set()
        assert release.wait(30)

    def convert() -> None:
        prepare_model(directory, Dtype.FP32, ReferenceBackend(), hold, cache_dir=cache)

    holder = threading.Thread(target=convert)
    holder.start()
    try:
        assert reached.wait(30)
        with pytest.raises(ModelError, match="another process has been converting"):
            prepare_model(directory, Dtype.FP32, ReferenceBackend(), cache_dir=cache, lock_timeout_s=0.05)
    finally:
        release.set()
        holder.join(30)


def test_interrupted_conversion_leaves_nothing_and_is_repeated(
    checkpoint: Any, prepare: Any, tmp_path: Path
) -> None:
    directory = checkpoint("llama").directory

    def interrupt(phase: str, done_bytes: int, total_bytes: int) -> None:
        if done_bytes > total_bytes / 2 > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(directory, progress=interrupt)
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.is_dir()] == []
    left_behind = tmp_path / "cache" / f".{prepare(directory).directory.name}.tmp"
    left_behind.mkdir()  # of a process that was killed
    assert prepare(directory, Dtype.FP32).directory.is_dir()


def test_cache_that_cannot_be_written(checkpoint: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot write the weight cache"):
        prepare_model(
            checkpoint("llama").directory,
            Dtype.FP32,
            ReferenceBackend(),
            cache_dir=tmp_path / "file" / "cache",
        )


def test_cache_directory_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(prepare_module.CACHE_VARIABLE, str(tmp_path))
    assert default_cache_dir() == tmp_path / "models"
    monkeypatch.delenv(prepare_module.CACHE_VARIABLE)
    assert default_cache_dir() == Path.home() / ".cache" / "baton" / "models"


def test_max_model_len_beyond_the_model_is_refused(checkpoint: Any, prepare: Any) -> None:
    windowed = prepare(checkpoint("mistral", sliding_window=100).directory)
    assert load_decoder(windowed, ReferenceBackend()).max_model_len == 100
    with pytest.raises(ModelError, match="101 is more than 100: its sliding window of 100 tokens"):
        load_decoder(windowed, ReferenceBackend(), 101)
    plain = prepare(checkpoint("llama").directory)
    with pytest.raises(ModelError, match="513 is more than 512: it was not trained for more"):
        load_decoder(plain, ReferenceBackend(), 513)
