"""Chat messages of several kinds, from what repeats nothing to what copies its prompt; prompts of random ids.

A small model's greedy answers repeat themselves sooner than a large one's, and after random ids nearly
always: those are no example of a user's text, and stand here because other benchmarks use them.
"""

from __future__ import annotations

import random
from typing import Any

from bench.quality.texts import PROSE

_CODE = """def total(items):
    result = 0
    for item in items:
        if item.price > 0:
            result = result + item.price * item.count
    return result


def average(items):
    if len(items) == 0:
        return 0
    return total(items) / len(items)


class Basket:
    def __init__(self, owner):
        self.owner = owner
        self.items = []

    def add(self, item):
        self.items.append(item)

    def total(self):
        return total(self.items)
"""
_QUESTIONS = (
    "What is the capital of France, and what is it famous for?",
    "Explain how photosynthesis works to a ten year old.",
    "Give me five tips for sleeping better.",
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Write a polite email to my landlord asking to fix the heating.",
    "List the planets of the solar system with one fact each.",
    "Write a Python function that checks whether a string is a palindrome, with a docstring and three tests.",
    "Write a C function that reverses a linked list.",
    "Write a poem about autumn leaves.",
    "Give me a recipe for banana bread.",
)


def chat_messages() -> list[str]:
    """Sixteen: eleven questions, three tasks on prose, two on code."""
    prose = PROSE.read_text(encoding="utf-8")
    return [
        *_QUESTIONS,
        f"Summarise the following text in three sentences:\n\n{prose[:1500]}",
        f"Summarise the following text in three sentences:\n\n{prose[1500:3000]}",
        f"Copy the first paragraph of the following text and fix its punctuation:\n\n{prose[:1200]}",
        f"Add type hints to this code and return the whole code:\n\n{_CODE}",
        f"Rename the function total to sum_prices in this code and return the whole code:\n\n{_CODE}",
    ]


def chat_body(index: int) -> dict[str, Any]:
    """A request of its own for every index."""
    messages = chat_messages()
    turn, which = divmod(index, len(messages))
    text = messages[which] + (f"\n\n(Question {turn + 1})" if turn else "")
    return {"messages": [{"role": "user", "content": text}]}


def ids_body(index: int) -> dict[str, Any]:
    rng = random.Random(index)
    return {"prompt": [rng.randrange(5, 40_000) for _ in range(256)], "ignore_eos": True}
