import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.prompts import ChatWriter, Draft, IdsWriter, TextWriter
from bench.load.tokenize_client import Messages
from bench.load.tokens import Part, Segment, TokenStream
from bench.load.words import CANDIDATES, find_words
from cluster.errors import ConfigError
from tests.bench.load.plan_support import WordTokenizer

STREAM = TokenStream(4, 0)


def request(number: int, num: int) -> Segment:
    return Segment(Part.REQUEST, number, num)


def test_candidates_are_distinct_words() -> None:
    assert len(set(CANDIDATES)) == len(CANDIDATES) > 250
    assert all(word.isascii() and word.isalpha() for word in CANDIDATES)


@given(st.sets(st.sampled_from(CANDIDATES), max_size=60))
def test_words_of_several_tokens_are_found(long_words: set[str]) -> None:
    tokenizer = WordTokenizer(frozenset(long_words))
    found = find_words(tokenizer.count_text)
    assert found.overhead == 1
    assert set(found.words) == set(CANDIDATES) - long_words


def test_a_tokenizer_without_words_is_an_error() -> None:
    with pytest.raises(ConfigError, match="Only 0 of"):
        find_words(len)


@given(st.integers(1, 300))
def test_ids_are_exact_and_in_range(num: int) -> None:
    written = IdsWriter(STREAM, 50, 60).write(Draft((request(1, num),), 5))
    ids = written.body["prompt"]
    assert written.input_tokens == len(ids) == num
    assert all(type(token_id) is int and 50 <= token_id < 60 for token_id in ids)


@given(st.integers(2, 200), st.integers(0, 1000))
def test_text_is_exact_by_the_servers_count(num: int, number: int) -> None:
    tokenizer = WordTokenizer()
    written = TextWriter(STREAM, tokenizer).write(Draft((request(number, num),), 5))
    assert written.input_tokens == num == tokenizer.count_text(written.body["prompt"])


class FirstWordSplits(WordTokenizer):
    """Without a blank before it, a word of more than three letters is two tokens."""

    def words(self, text: str) -> int:
        return super().words(text) + (len(text.split(" ")[0]) > 3)


@given(st.integers(4, 60), st.integers(0, 100))
def test_a_count_that_is_off_is_mended_at_the_end(num: int, number: int) -> None:
    tokenizer = FirstWordSplits()
    prefix = Segment(Part.PREFIX, number % 3, 20)
    writer = TextWriter(STREAM, tokenizer)
    texts = [
        str(writer.write(Draft((prefix, request(own, num)), 5)).body["prompt"])
        for own in (number, number + 1)
    ]
    assert [tokenizer.count_text(text) for text in texts] == [num + 20] * 2
    assert texts[0].split()[:18] == texts[1].split()[:18]
    assert texts[0] != texts[1]


def test_a_length_that_cannot_be_reached_is_an_error() -> None:
    class OddOnly(WordTokenizer):
        def count_text(self, text: str) -> int:
            num = super().words(text)
            return num if num >= len(CANDIDATES) - 2 else num | 1

    with pytest.raises(ConfigError, match="No text of 10 tokens"):
        TextWriter(STREAM, OddOnly(frozenset())).write(Draft((request(1, 10),), 5))


def test_a_prompt_shorter_than_the_template_gets_one_word() -> None:
    tokenizer = WordTokenizer()
    written = ChatWriter(STREAM, tokenizer).write(Draft((request(1, 3),), 5))
    assert written.input_tokens == 8
    assert len(written.body["messages"][0]["content"].split()) == 1


@given(st.integers(8, 100))
def test_one_chat_request_is_exact_with_its_template(num: int) -> None:
    tokenizer = WordTokenizer()
    written = ChatWriter(STREAM, tokenizer).write(Draft((request(1, num),), 5))
    messages: Messages = written.body["messages"]
    assert [message["role"] for message in messages] == ["user"]
    assert written.input_tokens == num == tokenizer.count_messages(messages)


def test_turns_of_a_chat_are_as_long_as_their_messages() -> None:
    tokenizer = WordTokenizer()
    writer = ChatWriter(STREAM, tokenizer)
    assert (writer.template_tokens, writer.turn_tokens, writer.system_overhead()) == (7, 8, 11)
    system = (Segment(Part.SYSTEM, 0, 30),)
    first = writer.write(Draft((request(1, 12),), 5, system=system, session=0))
    later = writer.write(Draft((request(2, 9),), 5, session=0, turn=1))
    assert [message["role"] for message in first.body["messages"]] == ["system", "user"]
    assert [tokenizer.words(message["content"]) for message in first.body["messages"]] == [30, 12]
    assert first.input_tokens == 11 + 30 + 12
    assert later.input_tokens is None
    assert [tokenizer.words(message["content"]) for message in later.body["messages"]] == [9]


def test_real_text_is_counted_as_it_is() -> None:
    tokenizer = WordTokenizer()
    assert TextWriter(STREAM, tokenizer).write(Draft("an island far away", 5)).input_tokens == 6
    written = ChatWriter(STREAM, tokenizer).write(Draft("an island", 5, system="be brief"))
    assert written.input_tokens == 3 + 4 + 2 + 4 + 3
