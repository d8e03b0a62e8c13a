"""Text whose token count is known: common English words that the server's tokenizer takes as one token each.

1. `find_words` counts all candidates joined by blanks, once and twice over: the difference is the words' own
   tokens, the rest is what the server adds (a BOS, a chat template).
2. If there are more tokens than words, it halves the list until the words of several tokens are found; they
   are left out.
3. A text of n tokens is then n words, and whoever writes one still has it counted (`prompts`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.errors import ConfigError

MIN_WORDS = 64

_TEXT = """
the and for that with this from have was were are not but you all can her his one our out day get has him
how man new now old see two way who boy did its let put say she too use about after again air also America
always animal another answer any around ask away back because been before began being below between big
book both boys build call came carry change children city close come could country cut different does done
door down draw each earth eat end enough even ever every eye face fact family far farm father feel feet
few field find fire first fish five food foot form found four friend give girl going good great ground
group grow had half hand hard head hear help here high home horse hot house idea important inch into
island just keep kind king know land large last late learn leave left letter life light like line list
little live long look made make many mark may mean men might mile money moon more morning most mother
mountain move much music must name near need never next night north nothing notice number often once only
open order other over own page paper part pass people piece place plan plane plant play point port power
press problem public pull question quick rain ran read real rest right river road rock room round rule run
said same saw school sea second seem sentence set several ship short should show side simple since small
snow some song soon sound south space spell stand star start state still stop story street strong study
such sun sure table take talk teach tell than their them then there these they thing think those thought
three through time told took town tree true turn under until upon very voice walk want war warm watch
water week well went what wheel when where which while white whole why will wind wood word work world
would write year young your
"""
CANDIDATES = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Words:
    words: tuple[str, ...]  # one token each after a blank
    overhead: int  # tokens that the server adds to every text


def find_words(count: Callable[[str], int]) -> Words:
    """The candidates of one token each, by `count`, the server's own count of a text.

    Raises:
        ConfigError: fewer than `MIN_WORDS` are.
    """
    once, twice = count(" ".join(CANDIDATES)), count(" ".join(CANDIDATES * 2))
    overhead = 2 * once - twice
    words = _single(CANDIDATES, once - overhead, lambda some: count(" ".join(some)) - overhead)
    if len(words) < MIN_WORDS:
        raise ConfigError(
            f"Only {len(words)} of {len(CANDIDATES)} common English words are one token to this server, so a "
            "text of exact length cannot be written; offer token ids on the completions endpoint instead."
        )
    return Words(words, overhead)


def _single(words: tuple[str, ...], num: int, count: Callable[[tuple[str, ...]], int]) -> tuple[str, ...]:
    if num <= len(words):
        return words
    if len(words) == 1:
        return ()
    middle = len(words) // 2
    return tuple(
        word for half in (words[:middle], words[middle:]) for word in _single(half, count(half), count)
    )
