import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.lengths import Fixed, Lognormal, Uniform, parse_lengths
from cluster.errors import ConfigError


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def test_forms() -> None:
    assert parse_lengths("256") == parse_lengths(" fixed:256 ") == Fixed(256)
    assert parse_lengths("uniform:100-500") == Uniform(100, 500)
    assert parse_lengths("lognormal:median=1020,sigma=0.5,min=3,max=4096") == Lognormal(
        median=1020, sigma=0.5, low=3, high=4096
    )


def test_lognormal_mean_is_the_mean_before_the_cut() -> None:
    lengths = parse_lengths("lognormal:mean=1155,sigma=1.0")
    assert isinstance(lengths, Lognormal)
    assert lengths.median == pytest.approx(1155 * math.exp(-0.5))
    drawn = lengths.draw(rng(), 200_000)
    assert drawn.mean() == pytest.approx(1155, rel=0.02)
    assert np.median(drawn) == pytest.approx(lengths.median, rel=0.02)


def test_draws_keep_their_ends() -> None:
    assert set(Fixed(9).draw(rng(), 5).tolist()) == {9}
    assert set(Uniform(3, 5).draw(rng(), 200).tolist()) == {3, 4, 5}
    cut = Lognormal(median=100, sigma=2.0, low=10, high=300).draw(rng(), 5000)
    assert (cut.min(), cut.max()) == (10, 300)


@given(st.integers(1, 10_000), st.integers(0, 10_000), st.integers(1, 50))
def test_uniform_stays_within(low: int, more: int, num: int) -> None:
    drawn = parse_lengths(f"uniform:{low}-{low + more}").draw(rng(), num)
    assert len(drawn) == num
    assert low <= drawn.min() <= drawn.max() <= low + more


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "whole number"),
        ("0", "whole number"),
        ("-5", "whole number"),
        ("1.5", "whole number"),
        ("٣", "whole number"),
        ("9" * 40, "whole number"),
        ("normal:3", "`normal` is no distribution"),
        ("uniform:100", "two ends"),
        ("uniform:5-3", "above the high end"),
        ("uniform:-1-3", "whole number"),
        ("lognormal:sigma=1", "one of `mean` and `median`"),
        ("lognormal:mean=1,median=2,sigma=1", "one of `mean` and `median`"),
        ("lognormal:mean=100", "needs `sigma`"),
        ("lognormal:mean=nan,sigma=1", "above 0"),
        ("lognormal:mean=100,sigma=inf", "above 0"),
        ("lognormal:mean=100,sigma=50", "above 10"),
        ("lognormal:mean=100,sigma=1,sigma=2", "twice"),
        ("lognormal:mean=100,sigma=1,mode=2", "`mode=2`"),
        ("lognormal:mean=100,sigma=1,min=9,max=3", "above max"),
    ],
)
def test_wrong_strings_are_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        parse_lengths(text)
    assert f"`{text}`" in str(caught.value)
