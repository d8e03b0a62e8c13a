"""What a decode step's graph would record asks nothing of the host and copies nothing from it.

Here the work meets tensors without memory: whatever looks at a number fails, and every operation is seen with
the devices of what it takes and gives. The kernels themselves are not run.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.gpu_check.worlds import TINY, spec_of
from cluster.engine.decode_graphs import DecodeGraphs
from cluster.engine.decode_inputs import DecodeInputs
from cluster.engine.decoder import Decoder
from cluster.engine.graph_capture import Work
from cluster.ids import BlockId
from kernels.draw_kind import DrawKind
from kernels.ops import DecoderWeights, LayerWeights
from tests.kernels.triton_support import require

backend_module = require("kernels.triton.backend")
tiles = require("kernels.triton.tiles")
META = torch.device("meta")
USERS = ("attention", "gemm", "rowwise", "sampling_edits", "selection")  # modules that launch
BLOCK_SIZE, MAX_LEN, SIZES = 16, 512, (1, 4)
MOST_OF_A_GRID = (2**31 - 1, 65535, 65535)


class Watch(TorchDispatchMode):
    """Fails at the first operation that meets another device."""

    num_seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.num_seen += 1
        for leaf in tree_leaves((args, kwargs, out)):
            assert not isinstance(leaf, torch.Tensor) or leaf.device == META, f"{func} of {leaf.device}"
        return out


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    assert all(0 < size <= most for size, most in zip(grid, MOST_OF_A_GRID, strict=False))
    for argument in arguments:
        assert not isinstance(argument, torch.Tensor) or argument.device == META


def weights_of(spec: Any) -> DecoderWeights:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=META)

    hidden, inner, head_dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    qkv = spec.query_size + 2 * spec.kv_size
    layer = LayerWeights(
        input_norm=empty(hidden),
        qkv=empty(qkv, hidden),
        qkv_bias=empty(qkv),
        q_norm=empty(head_dim) if spec.qk_norm else None,
        k_norm=empty(head_dim) if spec.qk_norm else None,
        output=empty(hidden, spec.query_size),
        output_bias=None,
        mlp_norm=empty(hidden),
        gate_up=empty(2 * inner, hidden),
        gate_up_bias=None,
        down=empty(hidden, inner),
        down_bias=None,
    )
    embedding = empty(spec.vocab_size, hidden)
    return DecoderWeights(embedding=embedding, layers=(layer,), final_norm=empty(hidden), lm_head=embedding)


@pytest.mark.parametrize("mode", list(tiles.Mode))
@pytest.mark.parametrize("model", list(TINY))
def test_a_captured_step_stays_on_the_device(model: str, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for user in USERS:
        monkeypatch.setattr(require(f"kernels.triton.{user}"), "launch", launch)
    monkeypatch.setattr(
        require("kernels.triton.checks"), "interpreting", lambda: False
    )  # bf16 is right there
    backend = backend_module.TritonBackend(mode, META, tiles.HOPPER)
    spec, watch = spec_of(model), Watch()
    pool = torch.empty(
        9, 1, 2, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim, dtype=torch.bfloat16, device=META
    )

    def capture(work: Work) -> Work:
        with watch:
            work()
        return work

    with torch.inference_mode():
        decoder = Decoder(spec, weights_of(spec), backend, MAX_LEN)
        decoder.fused._is_compiled = True  # type: ignore[union-attr]  # on a GPU that comes before a capture
        sampler = backend.make_device_sampler(SIZES[-1], spec.vocab_size)
        inputs = DecodeInputs(SIZES[-1], MAX_LEN, BLOCK_SIZE, BlockId(8), META)
        graphs = DecodeGraphs(decoder, pool, sampler, inputs, SIZES)
        assert graphs.capture(capture) == len(SIZES) * len(DrawKind)
    assert watch.num_seen > 0
    assert backend.fallbacks.num_calls == 0
