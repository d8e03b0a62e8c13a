"""Grammars: what an answer has to match, and which tokens may come next. The one file that knows llguidance.

1. The gateway turns a JSON schema, a regular expression, a list of choices or a grammar into one string
   (`*_grammar`), and has it checked against the model's tokens (`Grammars.check`): what cannot be followed is
   refused before anything is queued.
2. The string travels with the request's sampling parameters.
3. A worker opens it (`Grammars.open`) and asks before each token what is allowed. The state is a function of
   the tokens generated so far and of nothing else: another worker that is given the same history goes on with
   the same masks.

Work is bounded by counts, not by clocks (`_LIMITS`, and `cluster.grammar_size` for what those do not see),
so that the same grammar gives up at the same place everywhere. What counts is what was found out about a
grammar so far: so answers share none of it, and a history is followed with the masks it was chosen by. A
state that gave up says so; it never lets everything pass.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark
from numpy.typing import NDArray

from cluster.errors import InvalidRequest, ModelError
from cluster.grammar_size import BOUNDS, GrammarBounds, check_lark, check_pattern, check_schema
from cluster.schema_parts import followable

_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=20_000,  # ordinary schemas take less than 5,000; some milliseconds for one token
    step_max_items=10_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
# Between two JSON tokens. Without a bound, a model may write spaces until its tokens are used up.
_WHITESPACE = r"[ \n\r\t]{0,20}"
_MAX_CACHED, _MAX_CACHED_BYTES = 256, 8 << 20
_SPECIAL = b"\xff"  # marks a token that is no text
_QUIET = 0


# ---- grammars as strings -------------------------------------------------------------------------
# They raise ValueError for what cannot be written as a grammar at all; the rest is for `Grammars.check`.


def json_grammar(
    schema: Mapping[str, Any] | bool, bounds: GrammarBounds = BOUNDS, *, lenient: bool = False
) -> str:
    """JSON that fits a schema. `lenient`: what cannot be enforced is left out instead of refused."""
    check_schema(schema, bounds)
    grammar: str = LLMatcher.grammar_from_json_schema(
        dumps(_as_object(schema, lenient)), overrides=_options(lenient)
    )
    return grammar


def regex_grammar(pattern: str, bounds: GrammarBounds = BOUNDS) -> str:
    check_pattern(pattern, bounds)
    grammar: str = LLMatcher.grammar_from_regex(pattern)
    return grammar


def lark_grammar(text: str, bounds: GrammarBounds = BOUNDS) -> str:
    """A grammar in Lark's notation with llguidance's additions, like `%json {…}`."""
    check_lark(text, bounds)
    grammar: str = LLMatcher.grammar_from_lark(text)
    return grammar


def foreign_grammar(text: str, bounds: GrammarBounds = BOUNDS) -> str:
    """A grammar as people write it: in Lark's notation, or in GBNF (`root ::= …`)."""
    try:
        lark = any_to_lark(text)
    except (GbnfToLarkError, RecursionError) as error:
        raise ValueError(str(error)) from error
    except Exception as error:  # of rules that are missing the converter says so with the plainest one
        if type(error) is not Exception:
            raise
        raise ValueError(str(error)) from error
    return lark_grammar(lark, bounds)


def choice_grammar(choices: Sequence[str]) -> str:
    """One of these texts."""
    return lark_grammar("start: " + choice_rule(choices))


def choice_rule(choices: Sequence[str]) -> str:
    return " | ".join(literal(choice) for choice in choices)


def json_rule(
    schema: Mapping[str, Any] | bool, bounds: GrammarBounds = BOUNDS, *, lenient: bool = False
) -> str:
    """`json_grammar` as part of a grammar in Lark's notation."""
    return f"%json {dumps(inline_schema(schema, bounds, lenient=lenient))}"


def regex_rule(pattern: str, bounds: GrammarBounds = BOUNDS) -> str:
    check_pattern(pattern, bounds)
    return f"/{regex_to_lark(pattern)}/"


def tag_grammar(
    tags: Sequence[tuple[str, str, Mapping[str, Any], str]], bounds: GrammarBounds = BOUNDS
) -> str:
    """Free text in which `trigger` must go on as (trigger, begin, schema of what follows, end).

    Raises:
        ValueError: a `begin` does not start with its trigger, or there is no tag.
    """
    for trigger, begin, _, _ in tags:
        if not trigger or not begin.startswith(trigger):
            raise ValueError(f"`{begin}` does not start with a trigger")
    if not tags:
        raise ValueError("there is no tag")
    return lark_grammar(
        StructTag.to_grammar(
            [
                StructTag(trigger=trigger, begin=begin, grammar=dict(inline_schema(schema, bounds)), end=end)
                for trigger, begin, schema, end in tags
            ],
            assume_special=False,
        ),
        bounds,
    )


def literal(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text)


def inline_schema(
    schema: Mapping[str, Any] | bool, bounds: GrammarBounds = BOUNDS, *, lenient: bool = False
) -> Mapping[str, Any]:
    """A schema as `%json` takes it within a grammar."""
    check_schema(schema, bounds)
    return {**_as_object(schema, lenient), "x-guidance": _options(lenient)}


def dumps(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _as_object(schema: Mapping[str, Any] | bool, lenient: bool) -> Mapping[str, Any]:
    """True is any JSON, False none."""
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    if not lenient:
        return schema
    parts: Mapping[str, Any] = followable(schema)
    return parts


def _options(lenient: bool) -> Any:
    options: dict[str, Any] = {"whitespace_pattern": _WHITESPACE}
    return options | {"lenient": True, "coerce_one_of": True} if lenient else options


# ---- grammars at work ----------------------------------------------------------------------------


class Vocabulary(Protocol):
    """The part of a tokenizer that grammars need."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def token_bytes(self, token_id: int) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


class Grammars:
    """Compiles grammars for one model's tokens. Safe to use from several threads; making it reads the whole
    vocabulary, which takes a fraction of a second. What `check` found is kept for a while.

    Raises:
        ModelError: the model has no end-of-text token.
    """

    def __init__(self, tokenizer: Vocabulary) -> None:
        if not tokenizer.eos_token_ids:
            raise ModelError("this model has no end-of-text token, which grammars need")
        source = _TokenTable(tokenizer)
        self._tokens = LLTokenizer(TokenizerWrapper(source), eos_token=list(source.eos_token_ids))
        self._checked: OrderedDict[str, str] = OrderedDict()  # what is wrong with it; empty: nothing
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_cached(self) -> int:
        return len(self._checked)

    def check(self, grammar: str, param: str) -> None:
        """Raises:
        InvalidRequest: it is not a grammar, cannot be satisfied, or takes too much work.
        """
        problem = self._known_problem(grammar)
        if problem is None:
            problem = self._problem(grammar)
            self._keep(grammar, problem)
        if problem:
            raise InvalidRequest(f"`{param}`: {problem}.", param=param)

    def open(self, grammar: str) -> GrammarState:
        """The state before the first token; one that has given up if the grammar cannot be compiled."""
        return GrammarState(self._compile(grammar))

    def _problem(self, grammar: str) -> str:
        matcher = self._compile(grammar)
        if matcher.is_error():
            return _first_line(matcher.get_error())
        bits = matcher.compute_bitmask()
        if matcher.is_error():
            return "it is too complex to follow, or nothing matches it"
        return "" if any(bits) else "nothing matches it"

    def _known_problem(self, grammar: str) -> str | None:
        with self._lock:
            problem = self._checked.get(grammar)
            if problem is not None:
                self._checked.move_to_end(grammar)
            return problem

    def _keep(self, grammar: str, problem: str) -> None:
        with self._lock:
            if grammar not in self._checked:
                self._checked[grammar] = problem
                self._num_bytes += len(grammar)
            while len(self._checked) > _MAX_CACHED or self._num_bytes > _MAX_CACHED_BYTES:
                oldest, _ = self._checked.popitem(last=False)
                self._num_bytes -= len(oldest)

    def _compile(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._tokens, grammar, log_level=_QUIET, limits=_LIMITS)


class GrammarState:
    """Where one answer stands in its grammar. One thread at a time."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._num_followed = 0
        self._has_mask = False  # of what was followed

    def follow(self, output_ids: Sequence[int]) -> None:
        """Take what was generated since; `output_ids` only grows at its end."""
        for token_id in output_ids[self._num_followed :]:  # one by one: the end of text is no mistake then
            if not self._has_mask:
                self._matcher.compute_bitmask()  # as where it was chosen: the same is found out, so counted
            self._has_mask = False
            self._num_followed += 1
            if not self._matcher.consume_token(token_id):
                self._num_followed = len(output_ids)
                return

    def allowed(self, vocab_size: int) -> NDArray[np.bool_] | None:
        """Which tokens may come next, EOS once the answer may end; None if the grammar has given up."""
        bits = self._matcher.compute_bitmask()
        self._has_mask = True
        if self._matcher.is_error():
            return None
        known = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[:vocab_size]
        allowed = np.zeros(vocab_size, np.bool_)
        allowed[: len(known)] = known
        return allowed


class _TokenTable:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Vocabulary) -> None:
        self._tokenizer = tokenizer
        size = tokenizer.vocab_size
        special = [token_id for token_id in range(size) if tokenizer.is_special(token_id)]
        self.special_token_ids = special
        self.tokens = _texts(tokenizer, size, frozenset(special))
        self.eos_token_ids = tokenizer.eos_token_ids
        self.eos_token_id = self.eos_token_ids[0]
        self.bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._tokenizer.encode(plain, add_special_tokens=False)


def _texts(tokenizer: Vocabulary, size: int, special: Iterable[int]) -> list[bytes]:
    marked = set(special)
    return [
        (_SPECIAL if token_id in marked else b"") + tokenizer.token_bytes(token_id)
        for token_id in range(size)
    ]


def _first_line(message: str) -> str:
    """Of llguidance's explanation, without its picture of the source."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return "the grammar cannot be used"
    shown = lines[0]
    reason = next((line for line in lines[1:] if line.startswith("error: ")), "")
    shown = f"{shown.rstrip(':')}: {reason.removeprefix('error: ')}" if reason else shown
    return shown[:300].rstrip(".")
