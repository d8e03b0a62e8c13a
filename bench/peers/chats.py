"""Prompts of real text (`--prompts text`): chats that ask for something to be done with a passage.

1. A chat is a number, a passage of the project's own prose (`bench.quality.texts`) and a task. Its number
   decides all of it and comes first, so no two chats have more in common than what the template puts before.
2. The passage begins at a sentence and breaks off at a word, where the whole prompt, rendered by the model's
   own template and counted by its own tokenizer, has as many tokens as will fit into the length meant.
3. Every server gets these ids, the same at the same place of the same round, and each of them once: nothing
   of an answer is found in a cache.

Tasks want answers longer than the load takes, and only one of them copies its passage: guesses from the
prompt (speculation) gain what they gain with such text, and no more.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

from bench.quality.texts import PROSE
from cluster.errors import ConfigError
from cluster.tokenizer import Tokenizer

TASKS = (
    "Retell this in your own words for a child of ten years.",
    "Write a long story that begins where this text breaks off.",
    "Summarise this text in three paragraphs.",
    "Write a letter to a friend who has asked what this text is about.",
    "Write a newspaper article about what this text tells.",
    "Which ideas of this text could be wrong? Argue against them at length.",
    "Tell as a story what happened in the year before this text.",
    "Explain what a reader should know about the subject of this text before reading it.",
    "Correct the punctuation of this text, and return all of it.",
    "Give ten pieces of advice that follow from this text, each with its reason.",
    "List everything that is said in this text, one sentence per line, and why it matters.",
    "Write a review of this text: what is good about it, what is not, and what is missing.",
)
STRIDE = 37  # from one chat's first sentence to the next one's: neighbours speak of different things
NUM_WARM_UP = 8  # chats that are never measured

_SENTENCE_START = re.compile(r"(?:\A|(?<=[.!?\"]\s)|(?<=\n\n))(?=[A-Z\"])")
_WORD_END = re.compile(r"(?<=\S)(?=\s)")


class ChatTemplate:
    """A user's message to the ids of a whole prompt, by the model's own template and tokenizer."""

    def __init__(self, model_directory: Path) -> None:
        """Nothing is read before the first message."""
        self._directory = model_directory

    def __call__(self, message: str) -> list[int]:
        """
        Raises:
            BatonError: the model is not there, or has no chat template.
        """
        return self._tokenizer.render_chat([{"role": "user", "content": message}])

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if not (self._directory / "tokenizer.json").is_file():
            raise ConfigError(
                f"--prompts text: {self._directory} has no tokenizer; add a server that reads the model from "
                "there to --peers, such as baton-colocated"
            )
        tokenizer = Tokenizer.load(self._directory)
        if tokenizer.chat_template is None:
            raise ConfigError("--prompts text: this model has no chat template; give --prompts random")
        return tokenizer


class Chats:
    """The chats of one model. Chat k is a function of k, the length, the texts and the template."""

    def __init__(self, template: Callable[[str], list[int]], num_tokens: int) -> None:
        """`num_tokens`: of a whole prompt, at most."""
        self._template, self._num_tokens = template, num_tokens
        self._made: dict[int, list[int]] = {}

    def ids(self, number: int) -> list[int]:
        """
        Raises:
            BatonError: the model cannot be asked so, or there is no room for a passage.
        """
        if number not in self._made:
            self._made[number] = self._template(self.text(number))
        return self._made[number]

    def text(self, number: int) -> str:
        """The user's message.

        Raises:
            BatonError: as `ids`.
        """
        prose, starts = _prose(), _starts()
        start = starts[number * STRIDE % len(starts)]
        ends = [found.start() for found in _WORD_END.finditer(prose, start + 1, start + len(prose) // 2)]

        def message(end: int) -> str:
            task = TASKS[number % len(TASKS)]
            return f"Text {number + 1}:\n\n{prose[start:end]} [...]\n\n{task}"

        num_fitting = bisect_right(ends, self._num_tokens, key=lambda end: len(self._template(message(end))))
        if not num_fitting:
            raise ConfigError(f"--prompts text: no chat fits into {self._num_tokens} tokens of this model")
        return message(ends[num_fitting - 1])

    def lengths(self, numbers: Sequence[int]) -> tuple[int, float, int]:
        """Tokens of the shortest, their mean, and of the longest."""
        counts = [len(self.ids(number)) for number in numbers]
        return min(counts), sum(counts) / len(counts), max(counts)


def numbers_of(loops: Sequence[tuple[int, int]], num_round: int, concurrency: int) -> range:
    """The chats of one closed loop of a round (from 0): no loop has any of another one's."""
    sizes = [num_requests for _, num_requests in loops]
    position = [at for at, _ in loops].index(concurrency)
    first = NUM_WARM_UP + num_round * sum(sizes) + sum(sizes[:position])
    return range(first, first + sizes[position])


def _prose() -> str:
    """Twice, so that what begins near the end can go on."""
    text = PROSE.read_text(encoding="utf-8").strip()
    return f"{text}\n\n{text}\n"


def _starts() -> list[int]:
    prose = _prose()
    return [found.start() for found in _SENTENCE_START.finditer(prose, 0, len(prose) // 2)]
