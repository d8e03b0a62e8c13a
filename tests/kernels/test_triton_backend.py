"""The backend: what it says where it cannot run, and that the reference computes what no kernel takes."""

from __future__ import annotations

import ast
import logging
from subprocess import CalledProcessError

import pytest
import torch

from kernels.reference import ReferenceBackend
from tests.kernels.attention_world import World
from tests.kernels.triton_support import DEVICE, random, require

backend_module = require("kernels.triton.backend")
fallback = require("kernels.triton.fallback")
launch = require("kernels.triton.launch")
CompilationError = require("triton.compiler.errors").CompilationError
TritonError = require("triton.errors").TritonError
tiles = require("kernels.triton.tiles")
TritonBackend, Mode = backend_module.TritonBackend, tiles.Mode
in_interpreter = pytest.mark.skipif(DEVICE != "cpu", reason="needs the interpreter: there is a GPU")


@in_interpreter
def test_bf16_in_the_interpreter_is_the_references(caplog):
    backend, reference = TritonBackend(), ReferenceBackend()
    x, weight = random(4, 32, dtype=torch.bfloat16), random(32, dtype=torch.bfloat16, seed=1)
    matrix = random(8, 32, dtype=torch.bfloat16, seed=2)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(backend.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert caplog.text.count("`rms_norm` runs in plain torch") == 1
    assert torch.equal(backend.linear(x, matrix), reference.linear(x, matrix))
    assert backend.fallbacks.num_calls == 4


@in_interpreter
@pytest.mark.parametrize(
    ("heads", "head_dim", "kv_int8", "reason"),
    [
        ((17, 1), 8, False, "17 query heads per KV head, of at most 16"),
        ((1, 1), 258, False, "head_dim 258, of at most 256"),
        ((3, 1), 16, True, "mixed dtypes"),
    ],
)
def test_attention_that_no_kernel_takes_is_the_references(heads, head_dim, kv_int8, reason, caplog):
    world = World([20], heads, head_dim, kv_int8=kv_int8)
    with caplog.at_level(logging.WARNING):
        [out] = world.attend(TritonBackend(), [(0, 10, 20)])
    assert torch.equal(out, world.attend(ReferenceBackend(), [(0, 10, 20)])[0])
    assert reason in caplog.text


def test_int8_keys_are_written_as_the_reference_writes_them():
    k = random(3, 2, 16)
    pools = [torch.zeros(2, 1, 2, 4, 2, 20, dtype=torch.int8, device=DEVICE) for _ in range(2)]
    slots = torch.tensor([5, 0, 2], device=DEVICE)
    TritonBackend().write_kv(k, k, pools[0], 0, slots)
    ReferenceBackend(DEVICE).write_kv(k, k, pools[1], 0, slots)
    assert torch.equal(pools[0], pools[1])


def test_a_kernel_that_does_not_compile_is_tried_once(caplog):
    calls = []

    def broken():
        calls.append("kernel")
        raise launch.KernelError("`f`: out of resource")

    fallbacks = fallback.Fallbacks()
    with caplog.at_level(logging.WARNING):
        assert [fallbacks.run("f", None, broken, lambda: 7) for _ in range(3)] == [7, 7, 7]
    assert calls == ["kernel"]
    assert caplog.text.count("out of resource") == 1


@pytest.mark.parametrize(
    ("error", "is_of_compiler"),
    [
        (TritonError("out of resource: shared memory"), True),
        (RuntimeError("PassManager::run failed"), True),
        (CalledProcessError(1, ["gcc", "main.c"]), True),
        (CompilationError("a = 1", ast.parse("a = 1").body[0], "shapes do not fit"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), False),
        (torch.OutOfMemoryError("CUDA out of memory."), False),
        (ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)"), False),
    ],
)
def test_what_the_compiler_refuses_is_told_from_what_the_device_does(error, is_of_compiler, monkeypatch):
    class Kernel:
        fn = test_bf16_in_the_interpreter_is_the_references

        def __getitem__(self, grid):
            def run(*_, **__):
                raise error

            return run

    monkeypatch.setattr(launch, "interpreting", lambda: False)
    with pytest.raises(launch.KernelError if is_of_compiler else type(error)) as raised:
        launch.launch(Kernel(), (1,))
    assert isinstance(raised.value, launch.KernelError) is is_of_compiler
    if isinstance(error, CompilationError):  # its first line says where, not what
        assert str(raised.value).endswith(": shapes do not fit")


def test_an_error_of_the_caller_is_not_swallowed():
    with pytest.raises(ValueError, match="`weight` must have shape"):
        TritonBackend().rms_norm(random(2, 8), random(9), 1e-5)
    with pytest.raises(ValueError, match="must be on"):
        TritonBackend().rms_norm(random(2, 8).to("meta"), random(8), 1e-5)


def test_fast_products_are_the_vendors():
    backend = TritonBackend(Mode.FAST)
    x, weight, bias = random(5, 32), random(8, 32, seed=1), random(8, seed=2)
    assert torch.equal(backend.linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
    torch.testing.assert_close(backend.linear_fp32(x, weight), x @ weight.t())


def test_whoever_gives_other_bits_has_another_layout():
    layouts = {TritonBackend(mode).packed_layout for mode in Mode}
    assert len(layouts) == 2
    assert all(layout.startswith("rows-triton3.") for layout in layouts)


def test_a_mode_is_asked_for_by_its_name():
    assert tiles.requested_mode({}) is tiles.requested_mode({"BATON_GPU_MODE": ""}) is Mode.EXACT
    assert tiles.requested_mode({"BATON_GPU_MODE": "fast"}) is Mode.FAST
    with pytest.raises(tiles.ModeError, match="BATON_GPU_MODE is `quick`; use exact or fast"):
        tiles.requested_mode({"BATON_GPU_MODE": "quick"})


def test_weights_stay_where_they_are():
    weight = random(8, 32)
    assert TritonBackend().pack_linear(weight).data_ptr() == weight.data_ptr()


@in_interpreter
def test_exact_tables_have_one_tile_for_prefill_and_decode():
    for table in (tiles.HOPPER, tiles.AMPERE, tiles.INTERPRETER):
        for head_dim in (64, 128, 256):
            for item_bytes in (2, 4):
                kinds = {
                    table.attention_for(head_dim, item_bytes, 4, Mode.EXACT, decode)
                    for decode in (True, False)
                }
                assert len(kinds) == 1
    assert tiles.tiles_for((9, 0)) is tiles.HOPPER
    assert tiles.tiles_for((8, 9)) is tiles.AMPERE


@in_interpreter
def test_what_is_compiled_ahead_runs_and_writes_nothing():
    """The calls that make a GPU compile every variant, made here."""
    ahead = require("kernels.triton.ahead")
    from kernels.ops import DecoderShape

    shape = DecoderShape(32, 40, num_heads=3, num_kv_heads=1, head_dim=16, rms_norm_eps=1e-5)
    pool = random(2, 1, 2, 4, 1, 16)
    before = pool.clone()
    for mode in Mode:
        ahead.compile_attention(shape, torch.float32, pool, tiles.INTERPRETER, mode)
    assert torch.equal(pool, before)
    ahead.compile_products([(random(8, 200), random(8), torch.float32)], tiles.INTERPRETER)
    ahead.compile_sampling(9, torch.device("cpu"))


@pytest.mark.parametrize(("asked", "index"), [(None, 1), ("cuda", 1), ("cuda:0", 0)])
def test_a_device_without_a_number_is_the_current_one(asked, index, monkeypatch):
    """torch refuses it as it is; what it says here needs no GPU."""
    with pytest.raises(ValueError, match="specified index"):
        torch.cuda.set_device(torch.device("cuda"))
    made_current = []
    monkeypatch.setattr(backend_module, "why_unavailable", lambda: None)
    monkeypatch.setattr(backend_module, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch._C, "_cuda_setDevice", made_current.append, raising=False)
    backend = TritonBackend(device=asked)
    assert backend.device == torch.device("cuda", index)
    assert backend.tiles.name == "sm90"
    assert made_current == [index]
