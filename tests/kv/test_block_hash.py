"""Block hashes: chained, keyed by namespace, salted, and free of concatenation collisions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.block_hash import DIGEST_BYTES, hash_blocks

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_only_full_blocks_have_a_hash() -> None:
    for num_tokens in range(14):
        assert len(hash_blocks(range(num_tokens), 4, "m", "")) == num_tokens // 4


@given(TOKENS, TOKENS, st.integers(1, 6))
def test_equal_hashes_mean_equal_prefixes(left: list[int], right: list[int], block_size: int) -> None:
    pairs = zip(hash_blocks(left, block_size, "m", ""), hash_blocks(right, block_size, "m", ""), strict=False)
    for index, (one, other) in enumerate(pairs):
        end = (index + 1) * block_size
        assert len(one) == DIGEST_BYTES
        assert (one == other) == (left[:end] == right[:end])


def test_b057_fields_never_run_into_one_another() -> None:
    tokens = list(range(8))
    variants = {
        ("m", ""): hash_blocks(tokens, 4, "m", ""),
        ("", "m"): hash_blocks(tokens, 4, "", "m"),
        ("x", "x"): hash_blocks(tokens, 4, "x", "x"),
        ("xx", ""): hash_blocks(tokens, 4, "xx", ""),
        ("", "xx"): hash_blocks(tokens, 4, "", "xx"),
        ("x", ""): hash_blocks(tokens, 4, "x", ""),
        ("", "x"): hash_blocks(tokens, 4, "", "x"),
        ("k" * 200, ""): hash_blocks(tokens, 4, "k" * 200, ""),  # longer than a BLAKE2b key may be
        ("k" * 201, ""): hash_blocks(tokens, 4, "k" * 201, ""),
    }
    digests = [digest for hashes in variants.values() for digest in hashes]
    assert len(set(digests)) == len(digests)


def test_b057_digits_of_token_ids_never_run_into_one_another() -> None:
    assert hash_blocks([12, 3], 2, "m", "") != hash_blocks([1, 23], 2, "m", "")
    assert hash_blocks([1, 256], 2, "m", "") != hash_blocks([257, 0], 2, "m", "")


def test_b057_a_salt_that_looks_like_a_block_is_another_root() -> None:
    # The bytes of a salt can spell those of tokens; position and length fields keep them apart.
    salt = b"\x01\x00\x00\x00".decode()
    assert not set(hash_blocks([1, 1], 1, "m", "")) & set(hash_blocks([1, 1], 1, "m", salt))


def test_block_size_is_part_of_the_chain() -> None:
    assert hash_blocks([1, 2, 3, 4], 2, "m", "")[0] != hash_blocks([1, 2, 3, 4], 4, "m", "")[0]


def test_hashes_do_not_change_between_versions() -> None:
    # Routers and workers of different releases compare these: a change must be deliberate.
    assert [digest.hex() for digest in hash_blocks([1, 2, 3, 4], 2, "model", "salt")] == GOLDEN


@pytest.mark.parametrize("tokens", [[-1], [2**32]])
def test_ids_that_do_not_fit_are_refused(tokens: list[int]) -> None:
    with pytest.raises(OverflowError):
        hash_blocks(tokens, 1, "m", "")


def test_block_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="block_size"):
        hash_blocks([1], 0, "m", "")


GOLDEN = ["dc7216c11022ad3128988632fc7b4aba", "ca411c7c979504c05e5546e4f1857049"]
