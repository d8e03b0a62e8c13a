"""ShareGPT-like lengths of prompts and answers, since DistServe's prepared data set is not at hand.

What it did: of each conversation of three turns or more, the turns up to a random one are the prompt and the
turn after them, whoever's it is, is the answer; 2,048 tokens or more in all are left out. Nearly half of the
answers are a user's turns, so most are short and some are long.

- `gpt4`: quantiles of the same preparation of 5,678 conversations with GPT-4, put together again from their
  turns' lengths in github.com/microsoft/sarathi-serve
  (`data/processed_traces/sharegpt_8k_filtered_stats_llama2_tokenizer.csv` at 72339db5; Llama-2's tokens).
  Prompts and answers are drawn apart. Means 642 and 267.
- `paper`: the same shapes, stretched until the means are those of the ShareGPT requests in DistServe's paper
  (755.5 and 200.3, its figure 7). The nearest to what it ran; the shape is still another data set's.
- `lognormal`: the paper's means too, in another shape: sigma 1, medians 903 and 140 before the cut.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bench.load.plans.trace_formats import TraceRow

MOST_TOKENS = 2_047  # prompt and answer
PAPER_MEANS = (755.5, 200.3)
_PROMPTS = (  # quantiles 0, 5, ... 100 %
    *(2, 23, 46, 84, 143, 225, 329, 414, 487, 562, 638),
    *(710, 792, 869, 949, 1047, 1155, 1285, 1439, 1648, 2034),
)
_ANSWERS = (
    *(1, 7, 11, 15, 20, 27, 36, 50, 74, 115, 180),
    *(249, 316, 374, 430, 490, 555, 623, 720, 868, 1866),
)
_PROMPT_STRETCH, _ANSWER_STRETCH = 1.372, 0.739
_SIGMA, _PROMPT_MEDIAN, _ANSWER_MEDIAN = 1.0, 903.0, 140.0

_Lengths = NDArray[np.float64]


def _gpt4(rng: np.random.Generator, num: int) -> tuple[_Lengths, _Lengths]:
    share = rng.random((2, num)) * 100
    at = np.arange(0, 101, 5)
    return np.interp(share[0], at, _PROMPTS), np.interp(share[1], at, _ANSWERS)


def _paper(rng: np.random.Generator, num: int) -> tuple[_Lengths, _Lengths]:
    prompts, answers = _gpt4(rng, num)
    return prompts * _PROMPT_STRETCH, answers * _ANSWER_STRETCH


def _lognormal(rng: np.random.Generator, num: int) -> tuple[_Lengths, _Lengths]:
    normal = rng.standard_normal((2, num))
    return _PROMPT_MEDIAN * np.exp(_SIGMA * normal[0]), _ANSWER_MEDIAN * np.exp(_SIGMA * normal[1])


_KINDS: dict[str, Callable[[np.random.Generator, int], tuple[_Lengths, _Lengths]]] = {
    "paper": _paper,
    "lognormal": _lognormal,
    "gpt4": _gpt4,
}
NAMES = tuple(_KINDS)


def sharegpt_like(name: str, num: int, seed: int = 0) -> list[TraceRow]:
    """`num` rows of a kind in `NAMES`, in no order; times are their numbers."""
    rng = np.random.default_rng(seed)
    rows: list[TraceRow] = []
    while len(rows) < num:
        prompts, answers = _KINDS[name](rng, num)
        for prompt, answer in zip(np.rint(prompts).tolist(), np.rint(answers).tolist(), strict=True):
            is_kept = min(prompt, answer) >= 1 and max(prompt, answer) >= 4
            if is_kept and prompt + answer <= MOST_TOKENS and len(rows) < num:
                rows.append(TraceRow(float(len(rows)), int(prompt), int(answer)))
    return rows
