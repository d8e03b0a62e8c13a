"""Grammars over tokens: what they let through is right, whoever asks, and however often it is asked anew."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import InvalidRequest, ModelError
from cluster.grammar import (
    Grammars,
    GrammarState,
    choice_grammar,
    foreign_grammar,
    json_grammar,
    json_rule,
    lark_grammar,
    literal,
    regex_grammar,
    tag_grammar,
)
from cluster.grammar_size import pattern_size
from cluster.tokenizer import Tokenizer
from tests.support.byte_tokenizer import EOS, IM_END, THINK, VOCAB_SIZE, write_byte_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["a", "é"]}, "maxItems": 2},
        "size": {"type": "integer", "minimum": -5, "maximum": 500},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


def allowed(state: GrammarState) -> list[int]:
    mask = state.allowed(VOCAB_SIZE)
    assert mask is not None
    return [int(token) for token in np.flatnonzero(mask)]


def write(state: GrammarState, seed: int, most: int = 400) -> list[int]:
    """A random answer, token by token, as the grammar lets it; without its end."""
    rng = Random(seed)
    ids: list[int] = []
    while len(ids) < most:
        token = rng.choice(allowed(state))
        if token == EOS:
            return ids
        ids.append(token)
        state.follow(ids)
    raise AssertionError("it does not come to an end")


def is_valid(text: str) -> bool:
    value = json.loads(text)
    size = value["size"]
    return (
        set(value) <= {"name", "tags", "size"}
        and len(value["name"]) <= 6
        and set(value.get("tags", ())) <= {"a", "é"}
        and isinstance(size, int)
        and -5 <= size <= 500
    )


def is_choice(text: str) -> bool:
    return text in ("yes", 'n"o', "é\n漢")


CASES: dict[str, tuple[str, Callable[[str], object]]] = {
    "schema": (json_grammar(SCHEMA), is_valid),
    "choice": (choice_grammar(["yes", 'n"o', "é\n漢"]), is_choice),
    "regex": (regex_grammar(r"[a-f]{2,4}-\d{1,3}"), re.compile(r"[a-f]{2,4}-\d{1,3}").fullmatch),
    "lark": (lark_grammar('start: "a" b? "c"\nb: "b" b?'), re.compile("ab*c").fullmatch),
    "gbnf": (foreign_grammar('root ::= "a" [0-9] | "b" root'), re.compile("b*a[0-9]").fullmatch),
    "rule": (
        lark_grammar(
            f'start: {literal("<f>")} {json_rule({"type": "integer", "minimum": 0, "maximum": 9})} "</f>"'
        ),
        re.compile(r"<f>\s*[0-9]\s*</f>").fullmatch,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_everything_it_lets_through_fits(grammars: Grammars, tokenizer: Tokenizer, name: str) -> None:
    grammar, fits = CASES[name]
    grammars.check(grammar, "x")
    for seed in range(12):
        ids = write(grammars.open(grammar), seed)
        text = tokenizer.decode(ids)
        assert fits(text) not in (None, False), text


@pytest.mark.parametrize("name", CASES)
def test_what_comes_next_is_a_function_of_the_history(
    grammars: Grammars, tokenizer: Tokenizer, name: str
) -> None:
    """B075: another worker that is handed the tokens so far goes on with the same masks, though it compiled
    the grammar itself, and took the tokens in other portions."""
    grammar, _ = CASES[name]
    ids = write(grammars.open(grammar), 3)
    elsewhere = Grammars(tokenizer)
    going_on = grammars.open(grammar)
    for length in range(len(ids) + 1):
        going_on.follow(ids[:length])
        anew = elsewhere.open(grammar)
        anew.follow(ids[:length])
        assert allowed(anew) == allowed(going_on)
        assert allowed(going_on) == allowed(going_on)  # asking changes nothing
    going_on.follow([*ids, EOS])
    assert allowed(going_on) == [EOS]  # it is over, and stays so


def test_only_text_and_the_end_are_ever_allowed(grammars: Grammars) -> None:
    state = grammars.open(regex_grammar("(.|\n)*"))
    tokens = set(allowed(state))
    assert EOS in tokens
    assert not tokens & {256, 258, IM_END}
    assert ord("<") in tokens
    assert THINK in tokens  # an added token that is text
    mask = state.allowed(VOCAB_SIZE + 100)  # a model pads its vocabulary
    assert mask is not None
    assert mask.shape == (VOCAB_SIZE + 100,)
    assert not mask[VOCAB_SIZE:].any()


def test_the_end_comes_when_the_answer_is_complete(grammars: Grammars) -> None:
    state = grammars.open(choice_grammar(["ab", "abc"]))
    assert EOS not in allowed(state)
    state.follow(list(b"ab"))
    assert set(allowed(state)) == {EOS, ord("c")}
    state.follow(list(b"abc"))
    assert allowed(state) == [EOS]


def test_a_token_that_was_not_allowed_ends_it(grammars: Grammars) -> None:
    state = grammars.open(choice_grammar(["ab"]))
    state.follow(list(b"x"))
    assert state.allowed(VOCAB_SIZE) is None
    state.follow(list(b"xa"))
    assert state.allowed(VOCAB_SIZE) is None


@pytest.mark.parametrize(
    "grammar",
    [
        json_grammar({"type": "strin"}),
        json_grammar({"properties": {"foo": "bar"}}),
        json_grammar({"$ref": "#/nowhere"}),
        json_grammar({"type": "string", "pattern": "(["}),
        json_grammar({"enum": []}),
        json_grammar(False),
        json_grammar({"type": "array", "uniqueItems": True}),
        regex_grammar("(["),
        lark_grammar("start: nothing"),
        lark_grammar("no grammar at all"),
        "",
        "{",
    ],
)
def test_b030_what_cannot_be_followed_is_refused(grammars: Grammars, grammar: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammars.check(grammar, "where")
    assert refused.value.param == "where"
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 340
    state = grammars.open(grammar)  # if one came along all the same, nothing is let through
    assert state.allowed(VOCAB_SIZE) is None


def test_lenient_leaves_out_what_it_cannot_enforce(grammars: Grammars) -> None:
    schema = {
        "type": "array",
        "items": {"oneOf": [{"const": 1}, {"const": "x"}]},
        "uniqueItems": True,
        "maxItems": 2,
    }
    grammars.check(json_grammar(schema, lenient=True), "x")
    with pytest.raises(InvalidRequest):
        grammars.check(json_grammar(schema), "x")
    with pytest.raises(InvalidRequest):
        grammars.check(json_grammar({"type": "strin"}, lenient=True), "x")


def test_what_is_no_grammar_at_all(grammars: Grammars) -> None:
    with pytest.raises(ValueError, match="line 1"):
        foreign_grammar("root ::= (((")
    with pytest.raises(ValueError, match="nested"):
        json_grammar(_nested(5000))
    for bad in ([], [("<b>", "<a>", {}, "")], [("", "<a>", {}, "")]):
        with pytest.raises(ValueError, match="t"):
            tag_grammar(bad)


def _nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"not": value}
    return value


def test_tags_constrain_what_follows_them(grammars: Grammars) -> None:
    grammar = tag_grammar([("<f", "<f>", {"type": "integer"}, "</f>")])
    grammars.check(grammar, "x")
    state = grammars.open(grammar)
    state.follow(list(b"any text, and then <f"))
    assert allowed(state) == [ord(">")]
    state.follow(list(b"any text, and then <f>12"))
    assert ord("x") not in allowed(state)


def test_it_gives_up_by_counts_and_says_so(grammars: Grammars) -> None:
    """B159: an expression that becomes too complex on the way gives up at the same place for all,
    from the start or from the middle, alone or after others."""
    grammar = regex_grammar("((a|b)*a(a|b){40}){100}")
    rng = Random(3)
    ids: list[int] = []
    running = grammars.open(grammar)
    while running.allowed(VOCAB_SIZE) is not None:
        ids.append(rng.choice(b"ab"))
        running.follow(ids)
        assert len(ids) < 600, "it follows this; the test needs one that it does not"
    assert ids
    for num_tokens in (len(ids) - 1, len(ids)):
        resumed = grammars.open(grammar)
        resumed.follow(ids[:num_tokens])
        assert (resumed.allowed(VOCAB_SIZE) is None) == (num_tokens == len(ids))


def test_who_resumes_has_the_same_masks(grammars: Grammars) -> None:
    grammar = json_grammar(SCHEMA)
    rng = Random(4)
    ids: list[int] = []
    running = grammars.open(grammar)
    for _ in range(60):
        mask = running.allowed(VOCAB_SIZE)
        resumed = grammars.open(grammar)
        resumed.follow(ids)
        again = resumed.allowed(VOCAB_SIZE)
        assert mask is not None
        assert again is not None
        assert (mask == again).all()
        choices = [token for token in np.flatnonzero(mask).tolist() if token != EOS]
        if not choices:
            break
        ids.append(rng.choice(choices))
        running.follow(ids)


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", 0),
        ("abc", 3),
        ("a{3}", 3),
        ("a{2,5}b", 6),
        ("a{2,}", 2),
        ("(ab|c){4}", 12),
        ("((a{10}){10}){10}", 1000),
        ("(x[^]{9}]{7}){2}", 16),
        (r"\{5}", 3),  # an escaped brace
        (r"\p{Lu}{30}", 30),
        ("[[a-z]&&[^x]]{20}", 20),
        ("a*b+c?", 3),
        (")){3", 4),
    ],
)
def test_the_size_of_a_pattern(pattern: str, size: int) -> None:
    assert pattern_size(pattern) == size


@pytest.mark.parametrize(
    "make",
    [
        lambda: regex_grammar("(a{1000}){1000}"),
        lambda: regex_grammar("a{100000}"),
        lambda: json_grammar({"type": "string", "pattern": "^(a{1000}){1000}$"}),
        lambda: json_grammar({"items": [{"patternProperties": {"a{20000}": {}}}]}),
        lambda: json_grammar({"$defs": {"x": {"properties": {f"p{i}": {} for i in range(1001)}}}}),
        lambda: json_rule({"pattern": "(a{1000}){1000}"}),
        lambda: lark_grammar('start: "/" X "/"\nX: /(a{1000}){1000}/'),
        lambda: foreign_grammar("start: /a{99999}/"),
        lambda: tag_grammar([("<", "<", {"pattern": "a{99999}"}, ">")]),
    ],
)
def test_what_repeats_too_much_is_refused_before_it_is_compiled(make: Callable[[], str]) -> None:
    with pytest.raises(ValueError, match="at most"):
        make()


@pytest.mark.parametrize("text", ['x ::= "a"', "root ::= undefined"])
def test_a_grammar_without_its_rules_is_a_client_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"root|undefined"):
        foreign_grammar(text)


@pytest.mark.parametrize("grammar", [regex_grammar(r"[^\s\S]"), json_grammar(False)])
def test_what_nothing_matches_is_refused(grammars: Grammars, grammar: str) -> None:
    with pytest.raises(InvalidRequest):
        grammars.check(grammar, "x")


def test_compiled_grammars_are_bounded(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer)
    for number in range(300):
        grammars.check(choice_grammar([f"choice {number}"]), "x")
    assert grammars.num_cached == 256
    large = ["x" * 100_000 + str(number) for number in range(10)]
    for text in large:
        grammars.open(lark_grammar(f"start: {literal(text)}"))
    grammars.check(choice_grammar(["choice 299"]), "x")
    assert grammars.num_cached <= 256


def test_a_model_without_an_end_has_no_grammars(tmp_path: Path) -> None:
    class Endless:
        vocab_size = 1
        eos_token_ids = ()

        def token_bytes(self, token_id: int) -> bytes:
            return b"a"

        def is_special(self, token_id: int) -> bool:
            return False

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [0]

    with pytest.raises(ModelError, match="end-of-text"):
        Grammars(Endless())


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4))
def test_any_texts_can_be_choices(grammars: Grammars, tokenizer: Tokenizer, texts: list[str]) -> None:
    grammar = choice_grammar(texts)
    grammars.check(grammar, "x")
    for text in texts:
        state = grammars.open(grammar)
        state.follow(list(text.encode()))
        assert EOS in allowed(state), text
