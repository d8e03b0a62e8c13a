"""Prompts of text: what a chat is, who gets which, and what a plan makes of them. No model is read."""

from __future__ import annotations

import math
import re
import zlib
from itertools import pairwise
from pathlib import Path

import pytest

from bench.load.plans import arrivals
from bench.load.plans.build import build_plan
from bench.load.plans.lengths import parse_lengths
from bench.load.plans.settings import PlanSettings, Synthetic
from bench.peers import chats as module
from bench.peers.catalogue import SPECULATION
from bench.peers.chats import NUM_WARM_UP, STRIDE, TASKS, Chats, ChatTemplate, numbers_of
from bench.peers.closed_loop import with_prompts
from bench.peers.facts import chats_facts
from cluster.errors import ConfigError

HEAD = list(range(20))  # what a template puts before
LENGTH = 256
LOOPS = ((1, 4), (8, 24), (32, 96))


def template(message: str) -> list[int]:
    """An id for each word and mark, and one more at the end."""
    return [*HEAD, *(zlib.crc32(word.encode()) for word in re.findall(r"\w+|\S", message)), 7]


@pytest.fixture(scope="module")
def chats() -> Chats:
    return Chats(template, LENGTH)


def test_a_chat_is_a_number_a_passage_and_a_task(chats: Chats) -> None:
    texts = [chats.text(number) for number in range(len(TASKS))]
    prose = module.PROSE.read_text(encoding="utf-8").strip()
    for number, text in enumerate(texts):
        first, passage, task = text.partition(":\n\n")[0], text.partition(":\n\n")[2], TASKS[number]
        assert first == f"Text {number + 1}"
        assert passage.endswith(f" [...]\n\n{task}")
        passage = passage.removesuffix(f" [...]\n\n{task}")
        assert passage in f"{prose}\n\n{prose}"
        assert passage[0].isupper() or passage[0] == '"'


def test_the_same_every_time_and_as_long_as_meant(chats: Chats) -> None:
    again = Chats(template, LENGTH)
    ids = [chats.ids(number) for number in range(60)]
    assert ids == [again.ids(number) for number in range(60)]
    assert all(LENGTH - 3 <= len(one) <= LENGTH for one in ids)


def test_no_two_begin_alike_beyond_the_template(chats: Chats) -> None:
    """Passages return after some time; the number before them does not."""
    begins = sorted(tuple(chats.ids(number)) for number in range(300))
    most = max(
        next(place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        for one, other in pairwise(begins)
    )
    assert most == len(HEAD) + 1  # and `Text`


def test_every_sentence_begins_a_passage_before_one_returns() -> None:
    starts = module._starts()
    assert math.gcd(STRIDE, len(starts)) == 1
    assert len(starts) > 50


def test_without_room_for_a_passage_it_says_so() -> None:
    with pytest.raises(ConfigError, match="no chat fits into 30 tokens"):
        Chats(template, 30).ids(0)


def test_a_model_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer; add a server that reads the model"):
        ChatTemplate(tmp_path)("hello")


def test_no_loop_has_a_chat_of_another_one() -> None:
    seen = list(range(NUM_WARM_UP))
    for number in range(3):
        for concurrency, num_requests in LOOPS:
            numbers = numbers_of(LOOPS, number, concurrency)
            assert len(numbers) == num_requests
            seen += numbers
    assert sorted(seen) == list(range(NUM_WARM_UP + 3 * 124))


def test_a_plan_takes_the_prompts_given_and_keeps_the_rest() -> None:
    settings = PlanSettings(
        model="m",
        arrival=arrivals.closed_loop(2),
        workload=Synthetic(input=parse_lengths("256"), output=parse_lengths("128")),
        num_requests=3,
    )
    prompts = [[1, 2, 3], [4, 5], [6]]
    built = build_plan(settings, None)
    plan = with_prompts(built, prompts)
    assert [one.body["prompt"] for one in plan.requests] == prompts
    assert [one.input_tokens for one in plan.requests] == [3, 2, 1]
    assert {one.body["max_tokens"] for one in plan.requests} == {128}
    assert plan.shared_body == built.shared_body
    assert plan.shared_body["ignore_eos"] is True
    assert plan.workload["input"] == {"min": 1, "max": 3}
    with pytest.raises(ValueError, match="shorter"):
        with_prompts(built, prompts[:2])


def test_the_table_tells_what_was_asked(chats: Chats) -> None:
    facts = chats_facts(chats, ((1, 4), (8, 24)), 2)
    assert facts["prompts"].startswith(f"56 chats, one of {len(TASKS)} tasks on a passage of prose each")
    shortest, mean, longest = chats.lengths(range(NUM_WARM_UP, NUM_WARM_UP + 56))
    assert f"{shortest} to {longest} tokens, {mean:.1f} on average" in facts["prompts"]
    assert facts["speculation"] == SPECULATION
