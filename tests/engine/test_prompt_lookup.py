"""Drafts by looking back: against a scan of the whole history, and what a passage or a loop goes on with."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.prompt_lookup import MOST_INDEXED, MOST_MATCHED, Match, PromptLookup

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def scan(history: list[int]) -> Match | None:
    """The definition: where the latest three tokens, else two, last stood before something."""
    for length in (3, 2):
        if len(history) <= length:
            continue
        latest = history[-length:]
        for source in range(len(history) - 1, length - 1, -1):
            if history[source - length : source] == latest:
                while (
                    2 < length < min(MOST_MATCHED, source)
                    and history[source - length - 1] == history[-length - 1]
                ):
                    length += 1
                return Match(source, length)
    return None


def caught_up(history: list[int], most: int = 10_000) -> PromptLookup:
    lookup = PromptLookup(history)
    while not lookup.catch_up(most):
        pass
    return lookup


@given(prompt=TOKENS, answer=TOKENS, most=st.integers(1, 50), late=st.integers(0, 20))
def test_the_latest_repetition_is_found_as_a_scan_finds_it(
    prompt: list[int], answer: list[int], most: int, late: int
) -> None:
    """However much was there at first, in what parts it was taken in, and however much came meanwhile."""
    lookup = PromptLookup(prompt)
    is_there = False
    for count in range(len(answer) + 1):
        if count:
            lookup.append(answer[count - 1])
        if count >= min(late, len(answer)):
            while not is_there:
                is_there = lookup.catch_up(most)
            assert lookup._look_up() == scan([*prompt, *answer[:count]])
    assert lookup.tokens == prompt + answer


def test_a_long_history_is_taken_in_part_by_part_and_the_oldest_part_is_not() -> None:
    history = [*range(100, 110), *range(200, 200 + MOST_INDEXED), 100, 101, 102]
    lookup = PromptLookup(history)
    calls = 1
    while not lookup.catch_up(2048):
        assert lookup.find() is None
        calls += 1
    assert calls == MOST_INDEXED // 2048
    assert lookup.find() is None  # what stood before is too long ago
    for token in (300, 301, 302):
        lookup.append(token)
    assert lookup.find() == Match(10 + 103, 3)


@given(history=st.lists(st.integers(0, 3), min_size=3, max_size=40), count=st.integers(1, 9))
def test_a_draft_is_what_the_history_says_and_a_loop_goes_on(history: list[int], count: int) -> None:
    lookup = caught_up(history)
    match = lookup.find()
    if match is None:
        assert scan(history) is None
        return
    assert history[match.source - 2 : match.source] == history[-2:]
    expected = list(history)
    for index in range(count):
        expected.append(expected[match.source + index])
    assert lookup.draft(match, count) == expected[len(history) :]


def test_a_passage_that_is_copied_is_followed_past_what_stood_elsewhere_later() -> None:
    passage = list(range(10, 40))
    lookup = caught_up([*passage, 1, 22, 23, 24, 99, 2, *passage[:4]])
    for token in passage[4:15]:
        match = lookup.find()
        assert match is not None
        assert lookup.draft(match, 2)[0] == token
        lookup.append(token)
    assert lookup.find() == Match(15, MOST_MATCHED)  # not after 22, 23, 24
    lookup.append(7)  # it is left
    assert lookup.find() is None


def test_short_histories_repeat_nothing() -> None:
    for history in ([], [1], [1, 2], [1, 1]):
        assert caught_up(history).find() is None
    assert caught_up([1, 1, 1]).find() == Match(2, 2)
