"""From a prepared model to a decoder: map the weight cache, copy nothing on a CPU."""

from __future__ import annotations

import torch

from cluster.engine.decoder import Decoder
from cluster.engine.parallel import SINGLE_RANK, ParallelConfig
from cluster.engine.prepared_model import PreparedModel, damaged
from cluster.engine.weights_file import map_weights
from cluster.engine.weights_pack import assemble
from cluster.errors import ModelError
from kernels.ops import Backend


def load_decoder(
    prepared: PreparedModel,
    backend: Backend,
    max_model_len: int | None = None,
    parallel: ParallelConfig = SINGLE_RANK,
    fuse: bool = True,
) -> Decoder:
    """Map the prepared weights; `max_model_len` None means all the model can do; `fuse` as in `Decoder`.

    Raises:
        ModelError: the cache is damaged, or `max_model_len` is more than the model computes correctly.
    """
    spec = prepared.spec
    if max_model_len is not None and max_model_len > spec.max_context_len:
        why = (
            f"its sliding window of {spec.sliding_window} tokens is not supported beyond that"
            if spec.max_context_len < spec.max_position
            else "it was not trained for more"
        )
        raise ModelError(
            f"{prepared.name}: max_model_len {max_model_len} is more than {spec.max_context_len}: {why}"
        )
    mapped = map_weights(prepared.directory)
    with torch.inference_mode():
        try:
            weights = assemble(spec, mapped.tensors, mapped.unpacked, backend)
            return Decoder(spec, weights, backend, max_model_len or spec.max_context_len, parallel, fuse)
        except (KeyError, TypeError, ValueError) as error:  # a tensor is missing or not what the spec says
            raise damaged(prepared.directory, error) from error
