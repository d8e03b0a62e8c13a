"""What a search's dict says against its own answers. Pure; the dict may be a file's, of an older version too.

1. `unanswered`: targets that have a lower bound or nothing.
2. `invalid_ends`: answers that rest on probes which the client could not offer.
3. `out_of_reach`: targets that no rate reached, which is an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.load.goodput.values import NOTHING, End

_NOTHING = frozenset(end.value for end in NOTHING | {End.NOT_SEARCHED})


def unanswered(found: Mapping[str, Any]) -> list[float]:
    """Targets whose search did not converge."""
    return [target for target, answer in _answers(found) if answer.get("is_converged") is False]


def out_of_reach(found: Mapping[str, Any]) -> list[float]:
    """Targets for which every seed that was searched ended with nothing passed."""
    return [
        target
        for target, answer in _answers(found)
        if answer.get("is_converged") is True
        and all(one.get("end") in _NOTHING for one in _objects(answer, "seeds"))
    ]


def invalid_ends(found: Mapping[str, Any]) -> list[str]:
    """The failing rates that end a seed's search and whose last probe was invalid, as `5 req/s, seed 0`."""
    last = {(str(probe.get("rate")), str(probe.get("seed"))): probe for probe in _objects(found, "probes")}
    told = []
    for _, answer in _answers(found):
        for one in _objects(answer, "seeds"):
            rate, seed = one.get("failing_rate"), one.get("seed")
            is_rate = isinstance(rate, int | float)
            if is_rate and last.get((str(rate), str(seed)), {}).get("valid") is False:
                told.append(f"{rate:.4g} req/s, seed {seed}")
    return list(dict.fromkeys(told))


def _answers(found: Mapping[str, Any]) -> list[tuple[float, Mapping[str, Any]]]:
    answers = [(answer.get("target"), answer) for answer in _objects(found, "answers")]
    return [(target, answer) for target, answer in answers if isinstance(target, int | float)]


def _objects(found: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    values = found.get(key)
    return [one for one in values if isinstance(one, Mapping)] if isinstance(values, list | tuple) else []
