"""llama.cpp's C library through ctypes: the few functions and structs the shim needs, of one pinned release.

The libraries come from the npm package `@node-llama-cpp/linux-x64`, which holds one CPU backend per
instruction set and picks the best at run time. Structs are those of llama.cpp's release v0.5.0;
`open_library` checks that the defaults land where they should: another release is an error, not a crash.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int8,
    c_int32,
    c_size_t,
    c_uint32,
    c_void_p,
)
from pathlib import Path
from typing import Any

NPM_PACKAGE = "@node-llama-cpp/linux-x64"
NPM_VERSION = "3.22.1"
RELEASE = "v0.5.0"

Token = c_int32


class ModelParams(Structure):
    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int32),
        ("load_mode", c_int32),
        ("lazy_mode", c_int32),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )


class ContextParams(Structure):
    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int32),
        ("rope_scaling_type", c_int32),
        ("pooling_type", c_int32),
        ("attention_type", c_int32),
        ("flash_attn_type", c_int32),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


class QuantizeParams(Structure):
    _fields_ = (
        ("nthread", c_int32),
        ("ftype", c_int32),
        ("output_tensor_type", c_int32),
        ("token_embedding_type", c_int32),
        ("allow_requantize", c_bool),
        ("quantize_output_tensor", c_bool),
        ("only_copy", c_bool),
        ("pure", c_bool),
        ("keep_split", c_bool),
        ("dry_run", c_bool),
        ("imatrix", c_void_p),
        ("kv_overrides", c_void_p),
        ("tt_overrides", c_void_p),
        ("prune_layers", c_void_p),
        ("max_buf_size", c_size_t),
    )


class Batch(Structure):
    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(Token)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_model_default_params": (ModelParams, ()),
    "llama_context_default_params": (ContextParams, ()),
    "llama_model_quantize_default_params": (QuantizeParams, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelParams)),
    "llama_init_from_model": (c_void_p, (c_void_p, ContextParams)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_vocab_is_eog": (c_bool, (c_void_p, Token)),
    "llama_tokenize": (c_int32, (c_void_p, c_char_p, c_int32, POINTER(Token), c_int32, c_bool, c_bool)),
    "llama_token_to_piece": (c_int32, (c_void_p, Token, c_char_p, c_int32, c_int32, c_bool)),
    "llama_batch_init": (Batch, (c_int32, c_int32, c_int32)),
    "llama_decode": (c_int32, (c_void_p, Batch)),
    "llama_get_logits_ith": (POINTER(c_float), (c_void_p, c_int32)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_print_system_info": (c_char_p, ()),
    "llama_model_quantize": (c_uint32, (c_char_p, c_char_p, POINTER(QuantizeParams))),
}


def open_library(directory: Path) -> Any:
    """The library with its functions declared and its CPU backend loaded.

    Raises:
        RuntimeError: not the libraries of this release, or none of the CPU backends loads.
    """
    base = ctypes.CDLL(str(directory / f"libggml.{RELEASE}.so"), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(directory / f"libllama.{RELEASE}.so"))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    base.ggml_backend_load_all_from_path.restype = None
    base.ggml_backend_load_all_from_path.argtypes = (c_char_p,)
    base.ggml_backend_load_all_from_path(str(directory).encode())
    context = library.llama_context_default_params()
    model = library.llama_model_default_params()
    f16 = 1
    if (context.n_batch, context.n_ubatch, context.type_k, context.type_v) != (2048, 512, f16, f16) or not (
        context.offload_kqv and context.no_perf and model.use_extra_bufts and context.ctx_other is None
    ):
        raise RuntimeError(f"the libraries in {directory} are not those of llama.cpp {RELEASE}")
    return library
