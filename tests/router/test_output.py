"""Text pieces as a property: whatever tokens, cuts and stop strings, the pieces add up to the right text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.sampling import FinishReason, TokenOutput
from cluster.tokenizer import Tokenizer
from router.output import ChoiceOutput, Piece, TextRules
from tests.support.byte_tokenizer import EOS, IM_END


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_dir)


def run(
    tokenizer: Tokenizer, rules: TextRules, ids: list[int], cuts: list[int], reason: FinishReason
) -> Piece:
    """All pieces of `ids` delivered in runs of `cuts` tokens; checks what must hold at every moment."""
    output = ChoiceOutput(tokenizer, rules, keep_entries=True)
    text, entries, num_delivered, turn = "", [], 0, 0
    while num_delivered < len(ids):
        size = cuts[turn % len(cuts)]
        turn += 1
        delivery = [TokenOutput(token_id) for token_id in ids[num_delivered : num_delivered + size]]
        num_delivered += len(delivery)
        piece = output.push(delivery, reason if num_delivered == len(ids) else None)
        text += piece.text
        entries += piece.entries
        # Never more entries than text to go with them (the end aside).
        if piece.finish_reason is not None:
            assert len(entries) == output.num_tokens
            return Piece(text, tuple(entries), piece.finish_reason)
        assert all(entry.text_offset <= len(text) for entry in entries)
    raise AssertionError("no finish reason came out")


BYTES = st.lists(st.sampled_from([*"ab é漢👩".encode(), IM_END]), min_size=1, max_size=30)
STOPS = st.lists(st.text("ab é漢", min_size=1, max_size=3), max_size=3).map(tuple)
CUTS = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(ids=BYTES, stops=STOPS, cuts=CUTS, include=st.booleans(), min_tokens=st.integers(0, 4))
def test_pieces_do_not_depend_on_the_cuts(
    tokenizer: Tokenizer,
    ids: list[int],
    stops: tuple[str, ...],
    cuts: list[int],
    include: bool,
    min_tokens: int,
) -> None:
    rules = TextRules(stops, include, min_tokens)
    one_by_one = run(tokenizer, rules, ids, [1], FinishReason.LENGTH)
    assert run(tokenizer, rules, ids, cuts, FinishReason.LENGTH) == one_by_one
    whole = tokenizer.decode(ids, at_start=False)
    assert one_by_one.text == whole[: len(one_by_one.text)]
    if one_by_one.finish_reason is FinishReason.LENGTH:
        assert one_by_one.text == whole
        assert [entry.output.token_id for entry in one_by_one.entries] == ids
    else:
        num_tokens = len(one_by_one.entries)
        seen = tokenizer.decode(ids[:num_tokens], at_start=False)
        assert any(stop in seen for stop in stops), "stopped without a stop string"
    if not include and min_tokens == 0:
        assert not any(stop in one_by_one.text for stop in stops)


def test_plain_pieces_equal_kept_ones(tokenizer: Tokenizer) -> None:
    ids = list("é漢👩!".encode())
    plain = ChoiceOutput(tokenizer, TextRules(), keep_entries=False)
    kept = ChoiceOutput(tokenizer, TextRules(), keep_entries=True)
    for token_id in ids:
        output = [TokenOutput(token_id)]
        assert plain.push(output, None).text == kept.push(output, None).text
    assert plain.num_tokens == kept.num_tokens == len(ids)


def test_the_token_that_ends_it_is_hidden(tokenizer: Tokenizer) -> None:
    for skip, include, text in ((True, False, "a"), (False, False, "a"), (False, True, "a<|eos|>")):
        rules = TextRules(include_stop=include, skip_special_tokens=skip)
        whole = run(tokenizer, rules, [ord("a"), EOS], [2], FinishReason.STOP)
        assert whole.text == text
        assert whole.finish_reason is FinishReason.STOP
