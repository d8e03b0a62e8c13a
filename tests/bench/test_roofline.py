import pytest

from bench.roofline import ModelShape, Roofline

SMOLLM2 = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
}


def roofline(**changes: float) -> Roofline:
    settings = {
        "weight_bytes_per_element": 2,
        "kv_bytes_per_element": 2,
        "bytes_per_s": 30e9,
        "flops_per_s": 4e12,
    }
    return Roofline(ModelShape.from_config(SMOLLM2), **(settings | changes))


def test_shape_of_smollm2_has_its_published_size() -> None:
    shape = ModelShape.from_config(SMOLLM2)
    assert shape.head_size == 64
    assert shape.num_layer_parameters == 106_168_320
    assert shape.num_head_parameters == 28_311_552
    assert shape.kv_elements_per_token == 11_520


def test_head_size_of_the_config_wins() -> None:
    assert ModelShape.from_config(SMOLLM2 | {"head_dim": 128}).head_size == 128


def test_decode_at_batch_one_is_the_time_to_read_the_weights() -> None:
    assert roofline().least_decode_s(1, 0) == pytest.approx(134_479_872 * 2 / 30e9)


def test_decode_reads_the_kv_of_every_sequence() -> None:
    more = roofline().decode_step(8, 1000).read_bytes - roofline().decode_step(8, 0).read_bytes
    assert more == 8 * 1000 * 23_040


def test_large_batches_are_bound_by_arithmetic() -> None:
    slow = roofline(flops_per_s=1e11)
    assert slow.least_decode_s(64, 0) == pytest.approx(64 * 2 * 134_479_872 / 1e11)


def test_prefill_counts_causal_pairs_and_one_row_of_logits() -> None:
    work = roofline().prefill(512)
    pairs = 512 * 513 / 2
    assert work.flops == 2 * 106_168_320 * 512 + 2 * 28_311_552 + 4 * 30 * 9 * 64 * pairs


def test_cached_prefix_costs_attention_only() -> None:
    line = roofline()
    assert line.prefill(512, 100).flops - line.prefill(512).flops == 4 * 30 * 9 * 64 * 512 * 100


def test_closed_loop_bound_falls_with_prompt_length_and_rises_with_concurrency() -> None:
    line = roofline(flops_per_s=1.5e11)
    assert line.most_output_tokens_per_s(1, 0, 128) > line.most_output_tokens_per_s(1, 2048, 128)
    assert line.most_output_tokens_per_s(8, 256, 128) > line.most_output_tokens_per_s(1, 256, 128)
