"""What quality is measured on: prose of several kinds, written for this project, and prompts to go on."""

from __future__ import annotations

from pathlib import Path

PROSE = Path(__file__).parent / "prose.txt"

PROMPTS = (
    "Once upon a time, in a village by the sea,",
    "The three most important things to know about bees are",
    "To change the tyre of a bicycle, first",
    "The capital of Portugal is",
    "def is_prime(n):\n",
    "Dear neighbours,\nI am writing to tell you that",
    "Photosynthesis is the process by which",
    "She opened the letter slowly. It said:",
    "The difference between weather and climate is",
    "A recipe for tomato soup:\n1.",
    "In the year 2150, most people live",
    "Question: What is 12 times 12?\nAnswer:",
    "The history of the printing press begins",
    "Yesterday the mayor announced that",
    "My favourite season is autumn, because",
    "An electric motor works by",
    "The old man and the dog walked",
    "SELECT name, age FROM people WHERE",
    "There are several reasons why the sky is blue.",
    "How to make friends in a new city:",
)
