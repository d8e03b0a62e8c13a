import random
import time
from itertools import accumulate, pairwise

import pytest

from cluster.detokenizer import Detokenizer
from cluster.tokenizer import Tokenizer
from tests.support import byte_tokenizer, sentencepiece_tokenizer
from tests.support.byte_tokenizer import EOS, IM_END, THINK, write_byte_tokenizer
from tests.support.sentencepiece_tokenizer import (
    FIRST_BYTE,
    FIRST_PIECE,
    PIECES,
    write_sentencepiece_tokenizer,
)

HARD_TEXT = "ď 漢字 한 👩‍👩‍👧 🇨🇭 e\u0301"


@pytest.fixture(scope="module")
def byte_tok(tmp_path_factory):
    return Tokenizer.load(write_byte_tokenizer(tmp_path_factory.mktemp("byte")))


@pytest.fixture(scope="module")
def piece_tok(tmp_path_factory):
    return Tokenizer.load(write_sentencepiece_tokenizer(tmp_path_factory.mktemp("piece")))


@pytest.fixture
def both_tokenizers(byte_tok, piece_tok):
    return byte_tok, piece_tok


def stream(tokenizer, chunks, **flags):
    """Single tokens by the way that streams take, which must say the same."""
    detokenizer = Detokenizer(tokenizer, **flags)
    one = (detokenizer.push_one(*chunk) if len(chunk) == 1 else detokenizer.push(chunk) for chunk in chunks)
    return [*one, detokenizer.finish()]


def random_chunks(rng, ids):
    cuts = list(accumulate(rng.choice([0, 1, 1, 1, 2, 3, 8]) for _ in ids))
    cuts = [0, *(cut for cut in cuts if cut < len(ids)), len(ids)]
    return [ids[start:end] for start, end in pairwise(cuts)]


def test_b001_no_delta_splits_a_code_point(byte_tok):
    deltas = stream(byte_tok, [[byte] for byte in HARD_TEXT.encode()])
    assert "".join(deltas) == HARD_TEXT
    assert [delta for delta in deltas if delta] == list(HARD_TEXT)  # each as soon as it is complete


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_b002_an_unfinished_character_at_the_end_is_one_replacement_character(byte_tok, num_bytes):
    ids = list(b"ok" + "😀".encode()[:num_bytes])
    *deltas, tail = stream(byte_tok, [[token_id] for token_id in ids])
    assert "".join(deltas) == "ok"
    assert tail == "\ufffd"
    assert byte_tok.decode(ids) == "ok\ufffd"


@pytest.mark.parametrize("skip", [False, True])
def test_one_token_at_a_time_is_the_same_by_both_ways(both_tokenizers, skip):
    rng = random.Random(5)
    for tokenizer in both_tokenizers:
        for at_start in (False, True):
            one = Detokenizer(tokenizer, skip_special_tokens=skip, at_start=at_start)
            many = Detokenizer(tokenizer, skip_special_tokens=skip, at_start=at_start)
            for _ in range(3_000):
                token_id = rng.randrange(tokenizer.vocab_size + 3)  # models pad their vocabulary
                assert one.push_one(token_id) == many.push((token_id,))
            assert one.finish() == many.finish()


def test_finish_is_empty_when_nothing_is_held_and_only_speaks_once(byte_tok):
    detokenizer = Detokenizer(byte_tok)
    detokenizer.push([0xE6])
    assert (detokenizer.finish(), detokenizer.finish()) == ("\ufffd", "")


def test_special_tokens_are_skipped_or_shown_and_added_ones_stay(byte_tok):
    ids = [*b"a", THINK, IM_END, *b"b", EOS, EOS]
    assert byte_tok.decode(ids) == "a<think>b"
    assert byte_tok.decode(ids, skip_special_tokens=False) == "a<think><|im_end|>b<|eos|><|eos|>"


def random_ids(rng, tokenizer, module):
    """Any ids, with runs of specials, of bytes that make characters, and ids beyond the vocabulary."""
    first_byte = 0 if module is byte_tokenizer else FIRST_BYTE
    ids = []
    for _ in range(rng.randrange(12)):
        match rng.randrange(5):
            case 0:
                ids += [first_byte + byte for byte in rng.choice(HARD_TEXT).encode()]
            case 1:
                ids += [
                    token_id for token_id in range(tokenizer.vocab_size) if tokenizer.is_special(token_id)
                ]
            case 2:
                ids.append(rng.randrange(tokenizer.vocab_size + 50))
            case 3:
                ids += [rng.randrange(tokenizer.vocab_size) for _ in range(4)]
            case 4:
                ids.append(tokenizer.vocab_size - 1 - rng.randrange(13))
    return ids


@pytest.mark.parametrize("module", [byte_tokenizer, sentencepiece_tokenizer], ids=["bytes", "pieces"])
def test_b045_a_stream_is_the_whole_text_for_5000_random_sequences(module, byte_tok, piece_tok):
    tokenizer = byte_tok if module is byte_tokenizer else piece_tok
    rng = random.Random(45)
    for _ in range(5000):
        ids = random_ids(rng, tokenizer, module)
        flags = {"skip_special_tokens": rng.random() < 0.5, "at_start": rng.random() < 0.5}
        deltas = stream(tokenizer, random_chunks(rng, ids), **flags)
        assert "".join(deltas) == tokenizer.decode(ids, **flags)


def test_b045_byte_level_decoding_is_that_of_tokenizers_for_any_ids(byte_tok):
    rng = random.Random(46)
    for _ in range(5000):
        ids = random_ids(rng, byte_tok, byte_tokenizer)
        for skip in (True, False):
            assert byte_tok.decode(ids, skip) == byte_tok._backend.decode(ids, skip_special_tokens=skip)


def test_b045_sentencepiece_decoding_is_that_of_tokenizers_where_bytes_make_characters(piece_tok):
    """Where a run of byte tokens is not UTF-8, `tokenizers` replaces every byte of the run, even those of
    whole characters before the fault: no stream could know that in time."""
    rng = random.Random(47)
    for _ in range(5000):
        ids = []
        for _ in range(rng.randrange(12)):
            character = [FIRST_BYTE + byte for byte in rng.choice(HARD_TEXT).encode()]
            ids += rng.choice(
                [character, [rng.randrange(3)], [rng.randrange(FIRST_PIECE, piece_tok.vocab_size + 9)]]
            )
        for skip in (True, False):
            assert piece_tok.decode(ids, skip) == piece_tok._backend.decode(ids, skip_special_tokens=skip)


def test_a_text_that_continues_a_prompt_keeps_its_leading_space(piece_tok):
    hello = FIRST_PIECE + PIECES.index("▁Hello")
    space = FIRST_PIECE + PIECES.index("▁")
    assert piece_tok.decode([hello, hello]) == "Hello Hello"
    assert piece_tok.decode([hello, hello], at_start=False) == " Hello Hello"
    assert stream(piece_tok, [[space], [space], [hello]]) == ["", " ", " Hello", ""]


def test_b045_work_is_linear(byte_tok):
    def seconds(num_tokens):
        ids = list((HARD_TEXT * 3000).encode()[:num_tokens])
        detokenizer = Detokenizer(byte_tok)
        start = time.perf_counter()
        for token_id in ids:
            detokenizer.push([token_id])
        return time.perf_counter() - start

    seconds(1000)
    assert seconds(10_000) < 1.0
    assert seconds(100_000) < 10.0
