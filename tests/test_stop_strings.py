import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.stop_strings import StopMatcher


def feed(matcher, pieces):
    """(texts emitted per piece, finish's text, matched)."""
    emitted = []
    for piece in pieces:
        text, matched = matcher.push(piece)
        emitted.append(text)
        if matched:
            break
    return emitted, matcher.finish(), matcher.matched


def test_b005_a_stop_string_over_several_tokens_never_leaks_its_head():
    assert feed(StopMatcher(["DEFGHIJ"]), ["DEF", "G", "HI", "J", "K"]) == (["", "", "", ""], "", True)


def test_b005_what_was_held_is_released_when_it_no_longer_matches():
    assert feed(StopMatcher(["DEFGHIJ"]), ["DEF", "G", "X"]) == (["", "", "DEFGX"], "", False)
    assert feed(StopMatcher(["DEFGHIJ"]), ["DEF", "G"]) == (["", ""], "DEFG", False)


def test_held_characters_are_counted():
    matcher = StopMatcher(["<end>"])
    assert matcher.push("text <e") == ("text ", False)
    assert matcher.num_held == 2
    assert matcher.push("x") == ("<ex", False)
    assert matcher.num_held == 0


@pytest.mark.parametrize(
    ("stops", "text", "shown"),
    [
        (["b"], "abc", "a"),
        (["bc", "b"], "abcd", "a"),
        (["abcd", "bc"], "abcd", "a"),  # completes first
        (["bc", "abc"], "xabc", "x"),  # both complete at once: the one that starts first
        (["aab"], "aaab", "a"),  # the head of the text is not the head of the stop
        (["abab", "bac"], "ababac", ""),
        (["aabaaac"], "aabaaabaaac", "aaba"),  # the head overlaps itself twice
        (["漢字"], "x漢字y", "x"),
        (["\n\n"], "a\n\n\n", "a"),
    ],
)
def test_which_match_wins(stops, text, shown):
    for pieces in ([text], list(text)):
        emitted, tail, matched = feed(StopMatcher(stops), pieces)
        assert ("".join(emitted) + tail, matched) == (shown, True)


def test_include_stop_keeps_the_stop_string_and_drops_the_rest():
    assert feed(StopMatcher(["DEF"], include_stop=True), ["abcD", "E", "Fg"]) == (
        ["abc", "", "DEF"],
        "",
        True,
    )


def test_b007_no_stops_pass_through_and_the_empty_string_is_refused():
    assert feed(StopMatcher([]), ["a", "", "b"]) == (["a", "", "b"], "", False)
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_nothing_comes_after_a_match():
    matcher = StopMatcher(["b"])
    assert matcher.push("ab") == ("a", True)
    assert matcher.push("cb") == ("", True)
    assert matcher.finish() == ""


def oracle(stops, text, include_stop):
    """(shown, matched) by definition: the first prefix of the text that ends with a stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end if include_stop else end - max(map(len, ending))], True
    return text, False


letters = st.text("ab", max_size=5)


@given(
    stops=st.lists(letters.filter(bool), max_size=4),
    pieces=st.lists(letters, max_size=12),
    include_stop=st.booleans(),
)
def test_any_chunking_shows_the_same_and_holds_the_least(stops, pieces, include_stop):
    matcher = StopMatcher(stops, include_stop)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        text, matched = matcher.push(piece)
        shown += text
        expected, over = oracle(stops, seen, include_stop)
        assert matched == over
        if matched:
            assert shown == expected
            return
        possible = {len(stop[:n]) for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])}
        assert matcher.num_held == max(possible, default=0)
        assert shown == seen[: len(seen) - matcher.num_held]
    assert shown + matcher.finish() == seen
