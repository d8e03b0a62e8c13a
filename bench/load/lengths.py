"""How long prompts and answers are: a distribution as a value, parsed from a short string.

1. The command line gives a string: `256`, `uniform:100-500`, `lognormal:mean=1155,sigma=1.0,max=4096`.
2. `parse_lengths` makes it a value that the result file can hold.
3. `draw` gives the lengths of a whole run at once, in tokens.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from cluster.errors import ConfigError

MAX_TOKENS = 100_000_000  # above any context; keeps a mistyped length from filling memory
_FORMS = (
    "`256`, `uniform:100-500`, `lognormal:mean=1155,sigma=1.0,min=1,max=4096` or `lognormal:median=…,sigma=…`"
)


class Fixed(msgspec.Struct, frozen=True, tag="fixed", tag_field="distribution"):
    """Always `tokens`."""

    tokens: int

    def draw(self, rng: np.random.Generator, num: int) -> NDArray[np.int64]:
        return np.full(num, self.tokens, dtype=np.int64)


class Uniform(msgspec.Struct, frozen=True, tag="uniform", tag_field="distribution"):
    """Every whole number from `low` to `high`, both included, equally likely."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator, num: int) -> NDArray[np.int64]:
        return rng.integers(self.low, self.high, size=num, endpoint=True, dtype=np.int64)


class Lognormal(msgspec.Struct, frozen=True, kw_only=True, tag="lognormal", tag_field="distribution"):
    """exp(N(ln `median`, `sigma`²)), rounded, then cut to `low`..`high`.

    The mean before the cut is median · exp(sigma² / 2).
    """

    median: float
    sigma: float
    low: int = 1
    high: int | None = None

    def draw(self, rng: np.random.Generator, num: int) -> NDArray[np.int64]:
        values = np.exp(math.log(self.median) + self.sigma * rng.standard_normal(num))
        high = MAX_TOKENS if self.high is None else self.high
        return np.clip(np.rint(values), self.low, high).astype(np.int64)


Lengths = Fixed | Uniform | Lognormal


def parse_lengths(text: str) -> Lengths:
    """The distribution that `text` names.

    Raises:
        ConfigError: `text` is none of the forms, or a number in it cannot be a length.
    """
    kind, colon, rest = text.strip().partition(":")
    if not colon:
        return Fixed(_tokens(kind, text))
    match kind.strip():
        case "fixed":
            return Fixed(_tokens(rest, text))
        case "uniform":
            return _uniform(rest, text)
        case "lognormal":
            return _lognormal(rest, text)
        case _:
            raise ConfigError(f"Length `{text}`: `{kind}` is no distribution; use {_FORMS}.")


def _uniform(rest: str, text: str) -> Uniform:
    low, dash, high = rest.partition("-")
    if not dash:
        raise ConfigError(f"Length `{text}`: `uniform` needs two ends, such as `uniform:100-500`.")
    ends = Uniform(_tokens(low, text), _tokens(high, text))
    if ends.low > ends.high:
        raise ConfigError(f"Length `{text}`: the low end {ends.low} is above the high end {ends.high}.")
    return ends


def _lognormal(rest: str, text: str) -> Lognormal:
    fields: dict[str, str] = {}
    for item in rest.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or name not in ("mean", "median", "sigma", "min", "max"):
            raise ConfigError(
                f"Length `{text}`: `{item}` is not `mean=`, `median=`, `sigma=`, `min=` or `max=`."
            )
        if name in fields:
            raise ConfigError(f"Length `{text}`: `{name}` is given twice.")
        fields[name] = value
    if "sigma" not in fields or ("mean" in fields) == ("median" in fields):
        raise ConfigError(f"Length `{text}`: `lognormal` needs `sigma` and one of `mean` and `median`.")
    sigma = _positive(fields["sigma"], text)
    if sigma > 10:
        raise ConfigError(f"Length `{text}`: sigma {sigma:g} is above 10; no lengths spread that far.")
    if "median" in fields:
        median = _positive(fields["median"], text)
    else:
        median = _positive(fields["mean"], text) * math.exp(-sigma * sigma / 2)
    low = _tokens(fields.get("min", "1"), text)
    high = _tokens(fields["max"], text) if "max" in fields else None
    if high is not None and low > high:
        raise ConfigError(f"Length `{text}`: min {low} is above max {high}.")
    return Lognormal(median=median, sigma=sigma, low=low, high=high)


def _tokens(value: str, text: str) -> int:
    value = value.strip()
    if not (value.isascii() and value.isdigit()) or len(value) > 9 or not 1 <= int(value) <= MAX_TOKENS:
        raise ConfigError(
            f"Length `{text}`: `{value}` is not a whole number of tokens from 1 to {MAX_TOKENS}; use "
            f"{_FORMS}."
        )
    return int(value)


def _positive(value: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number <= MAX_TOKENS:
        raise ConfigError(f"Length `{text}`: `{value}` is not a number above 0.")
    return number
