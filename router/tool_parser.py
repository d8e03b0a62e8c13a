"""Tool calls out of an answer's text, as it comes.

1. `push` takes text and gives what can be told for certain now: content, a call's name, a piece of its
   arguments. `finish` gives the rest.
2. Text that may still become the mark of a call is held back, and so is white space before it.
3. A call is a JSON object. Once its name and the key of its arguments are there, the call begins, and its
   arguments are passed on as they were written, character by character.
4. What looks like a call and is none (no JSON, a name that is not offered) stays what it is: content. Nothing
   is ever dropped but two things: where the answer can be calls alone (`calls_only`) the head of one that was
   cut before its name was complete, which is no content, and no call without a name; and calls after the
   `most_calls` that the client wants.

How the text was cut into pushes does not matter: the deltas add up to the same calls and the same content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass

from router.tool_formats import ToolFormat

_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:')
_WHITE = " \t\r\n"
_BETWEEN = _WHITE + ";,"  # what may stand between two calls that have no marks


@dataclass(frozen=True, slots=True)
class CallDelta:
    """`name` is set on the first delta of a call."""

    index: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class ParsedText:
    """What a push brought: `content` first, then `calls`."""

    content: str
    calls: list[CallDelta]


class ToolParser:
    """One answer being read."""

    def __init__(
        self,
        style: ToolFormat,
        names: Collection[str],
        *,
        calls_only: bool = False,
        most_calls: int | None = None,
    ) -> None:
        self._mark, self._end_mark = style.mark, style.end_mark
        self._heads, self._between = style.heads, _BETWEEN + style.tail
        self._names = names
        self._calls_only = calls_only
        self._most_calls = most_calls
        self._held = ""  # not decided yet: outside of calls, or after the object of one
        self._object: _CallObject | None = None
        self._after_object = False  # the end mark is awaited
        self._is_plain = False  # without marks: the answer has turned out to be text
        self._is_cut = False  # the text ended within a call
        self.num_calls = 0

    @property
    def has_whole_calls(self) -> bool:
        """After `finish`: the answer calls tools, and no call was cut short."""
        return self.num_calls > 0 and not self._is_cut

    def push(self, text: str) -> ParsedText:
        """The next text of the answer."""
        parsed = ParsedText("", [])
        self._held += text
        while self._advance(parsed):
            pass
        return parsed

    def finish(self) -> ParsedText:
        """No more text comes."""
        parsed = ParsedText("", [])
        if self._object is not None:
            self._close_object(parsed, complete=False)
        elif not self._after_object and not (self.num_calls and self._held.strip(self._between) == ""):
            self._cut_head(parsed, self._held)
        self._held = ""
        return parsed

    # ---- one step of reading; whether another may follow

    def _advance(self, parsed: ParsedText) -> bool:
        if self._object is not None:
            return self._read_object(parsed)
        if self._after_object:
            return self._read_end()
        if self._mark:
            return self._read_text(parsed)
        return self._read_start(parsed)

    def _read_text(self, parsed: ParsedText) -> bool:
        """Until the mark of a call."""
        at = self._held.find(self._mark)
        if at >= 0:
            content = self._held[:at].rstrip()
            end = at + len(self._mark)
            parsed.content += content
            self._begin(self._held[len(content) : end], self._held[end:])
            return True
        keep = _held_back(self._held, self._mark)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        parsed.content += shown
        return False

    def _read_start(self, parsed: ParsedText) -> bool:
        """Without marks: a call begins with a brace, at the start of the answer or after another call."""
        if self._is_plain:
            parsed.content += self._held
            self._held = ""
            return False
        at = len(self._held) - len(self._held.lstrip(self._between)) if self.num_calls else self._past_heads()
        if at is None or at == len(self._held):
            return False
        if self._held[at] == "{":
            self._begin(self._held[:at], self._held[at:])
        else:
            self._is_plain = True
        return True

    def _past_heads(self) -> int | None:
        """Where the first call would begin, after what may come before it; None: that is still to come."""
        rest = self._held.lstrip(_WHITE)
        for head in self._heads:
            if rest.startswith(head):
                rest = rest[len(head) :].lstrip(_WHITE)
            elif head.startswith(rest):
                return None
        return len(self._held) - len(rest)

    def _begin(self, before: str, rest: str) -> None:
        self._object = _CallObject(before, self._names)
        self._held = rest

    def _read_object(self, parsed: ParsedText) -> bool:
        reader = self._object
        assert reader is not None
        used, begun, arguments = reader.read(self._held)
        self._held = self._held[used:]
        self._emit(parsed, begun, arguments)
        if not reader.is_over:
            return False
        self._close_object(parsed, complete=True)
        return True

    def _emit(self, parsed: ParsedText, begun: str | None, arguments: str) -> None:
        if begun is not None:
            self.num_calls += 1
        if self._most_calls is not None and self.num_calls > self._most_calls:
            return
        if begun is not None or arguments:
            parsed.calls.append(CallDelta(self.num_calls - 1, begun, arguments))

    def _close_object(self, parsed: ParsedText, *, complete: bool) -> None:
        """The object is over, or the text is."""
        reader, self._object = self._object, None
        assert reader is not None
        if reader.has_begun:
            self._after_object = bool(self._end_mark)
            self._is_cut = not complete
            return
        if not complete:
            self._cut_head(parsed, reader.raw)
        elif (call := reader.as_whole()) is not None:
            self._emit(parsed, *call)
            self._after_object = bool(self._end_mark)
        else:
            parsed.content += reader.raw
            self._is_plain = not self._mark

    def _cut_head(self, parsed: ParsedText, text: str) -> None:
        """The text ended with what may have become a call."""
        if self._calls_only:
            self._is_cut = True
        else:
            parsed.content += text

    def _read_end(self) -> bool:
        """What stands between a call's object and its end mark says nothing. The next call ends it too."""
        found = [(at, mark) for mark in (self._end_mark, self._mark) if (at := self._held.find(mark)) >= 0]
        if not found:
            self._held = self._held[1 - max(len(self._end_mark), len(self._mark)) :]
            return False
        at, mark = min(found)
        self._held = self._held[at + len(mark) :] if mark == self._end_mark else self._held[at:]
        self._after_object = False
        return True


class _CallObject:
    """The JSON object of one call. `raw` is all of it, with what stood before it."""

    def __init__(self, before: str, names: Collection[str]) -> None:
        self.raw = before
        self._names = names
        self._body = ""
        self._depth = 0
        self._in_string = self._escaped = False
        self._arguments_at: int | None = None  # where in the body they begin
        self._num_passed_on = 0  # characters of the body
        self._arguments_end: int | None = None
        self._is_foreign = False  # the name is not one of the tools'
        self.is_over = False

    @property
    def has_begun(self) -> bool:
        """The call was told of."""
        return self._arguments_at is not None

    def read(self, text: str) -> tuple[int, str | None, str]:
        """(characters used, the name if the call begins now, what is new of its arguments)."""
        used = self._scan(text)
        self._body += text[:used]
        self.raw += text[:used]
        begun = None
        if self._arguments_at is None and not self._is_foreign:
            begun = self._try_begin()
        return used, begun, self._new_arguments()

    def as_whole(self) -> tuple[str, str] | None:
        """(name, arguments) of a complete object with its keys in another order; None if it is no call."""
        try:
            value = json.loads(self._body)
        except (ValueError, RecursionError):
            return None
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        key = "arguments" if "arguments" in value else "parameters"
        arguments = value.get(key, {})
        if isinstance(arguments, str):
            return name, _without_halves(arguments)
        if not isinstance(arguments, dict):
            return None
        return name, _text_of(key, self._body) if key in value else "{}"

    def _try_begin(self) -> str | None:
        match = _HEAD.match(self._body.lstrip())
        if match is None:
            return None
        try:
            name = json.loads(match[1])
        except ValueError:  # an escape that JSON does not have
            name = None
        start = len(self._body) - len(self._body.lstrip()) + match.end()
        rest = self._body[start:].lstrip()
        if name not in self._names or (rest and rest[0] != "{"):
            self._is_foreign = True  # to be looked at as a whole
            return None
        if not rest:
            return None
        self._arguments_at = self._num_passed_on = len(self._body) - len(rest)
        self._find_end()
        return str(name)

    def _find_end(self) -> None:
        """Of arguments that were read before the call was known to begin."""
        depth, in_string, escaped = 0, False, False
        assert self._arguments_at is not None
        for index in range(self._arguments_at, len(self._body)):
            depth, in_string, escaped = _step(self._body[index], depth, in_string, escaped)
            if depth == 0:
                self._arguments_end = index + 1
                return

    def _new_arguments(self) -> str:
        if self._arguments_at is None:
            return ""
        end = len(self._body) if self._arguments_end is None else self._arguments_end
        new = self._body[self._num_passed_on : end]
        self._num_passed_on = max(end, self._num_passed_on)
        return new

    def _scan(self, text: str) -> int:
        """How much of `text` belongs to the object."""
        for index, char in enumerate(text):
            before = self._depth
            self._depth, self._in_string, self._escaped = _step(
                char, self._depth, self._in_string, self._escaped
            )
            if before == 2 and self._depth == 1 and self.has_begun and self._arguments_end is None:
                self._arguments_end = len(self._body) + index + 1
            # The brace that closes it; or something else where its first one should be.
            if self._depth <= 0 and (before > 0 or not char.isspace()):
                self.is_over = True
                return index + 1
        return len(text)


def _step(char: str, depth: int, in_string: bool, escaped: bool) -> tuple[int, bool, bool]:
    """How deep in JSON the next character is."""
    if in_string:
        if escaped:
            return depth, True, False
        return depth, char != '"', char == "\\"
    if char == '"':
        return depth, True, False
    if char in "{[":
        return depth + 1, False, False
    if char in "}]":
        return depth - 1, False, False
    return depth, False, False


def _text_of(key: str, body: str) -> str:
    """A value of a JSON object as it was written; the last one counts, as it does for who reads the whole."""
    read = json.JSONDecoder().raw_decode
    at, found = _past_space(body, body.index("{") + 1), ""
    while body[at] != "}":
        name, at = read(body, at)
        start = _past_space(body, body.index(":", at) + 1)
        _, end = read(body, start)
        found = body[start:end] if name == key else found
        at = _past_space(body, end)
        at = _past_space(body, at + 1) if body[at] == "," else at
    return found


def _past_space(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


def _without_halves(text: str) -> str:
    """JSON can spell half a character (`\\ud83d`), which no text can hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _held_back(text: str, mark: str) -> int:
    """Characters at the end of `text` that may be white space before a mark, or the head of one."""
    head = next(
        (size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0
    )
    before = text[: len(text) - head]
    return head + len(before) - len(before.rstrip())
