"""Rows with drafts, and what becomes of them: tokens that are guessed, computed together, and kept if right.

1. `with_drafts`: a decode row brings guesses behind its last token. The step computes logits after that token
   and after each guess, as so many steps would: a row's bits depend on its own tokens only.
2. `asked_of`: each is sampled with the history and the random number that it has without drafts.
3. `sort_out` keeps what was sampled up to the first token that is not the guess, or that ends the request. So
   the tokens are those without drafts, whatever was guessed. The keys and values behind them are written over
   by the steps that follow.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from cluster.engine.batch import Row, SampleSpec
from cluster.sampling import TokenOutput, finish_reason_at

Further = dict[int, tuple[TokenOutput, ...]]  # by row: the tokens after its first


def with_drafts(row: Row, drafts: Sequence[int]) -> Row:
    """`row` brings one token; its blocks have room for the drafts."""
    return msgspec.structs.replace(row, token_ids=(*row.token_ids, *drafts), num_drafts=len(drafts))


def asked_of(rows: Sequence[Row]) -> tuple[list[SampleSpec], list[int]]:
    """The histories and positions of all tokens that are to be chosen, in the order of their logits. The
    histories of `rows` are complete."""
    specs, positions = [], []
    for row in rows:
        spec = row.sample
        if spec is None:
            continue
        first = row.start + len(row.token_ids) - row.num_drafts
        specs.append(spec)
        positions.append(first)
        if row.num_drafts:
            history = [*spec.output_ids, *row.token_ids[-row.num_drafts :]]
            num_known = len(spec.output_ids)
            for index in range(1, row.num_drafts + 1):
                ids = history[: num_known + index]
                specs.append(SampleSpec(spec.params, spec.prompt_ids, ids, spec.notes))
                positions.append(first + index)
    return specs, positions


def sort_out(
    rows: Sequence[Row], sampled: Iterable[TokenOutput]
) -> tuple[tuple[TokenOutput | None, ...], Further]:
    """The first token of each row, and those after it that hold; `sampled`: as `asked_of` says."""
    outputs: list[TokenOutput | None] = []
    further: Further = {}
    tokens = iter(sampled)
    for index, row in enumerate(rows):
        if row.sample is None:
            outputs.append(None)
            continue
        outputs.append(token := next(tokens))
        if row.num_drafts:
            held = _held(row, row.sample, token, [next(tokens) for _ in range(row.num_drafts)])
            if held:
                further[index] = held
    return tuple(outputs), further


def _held(
    row: Row, spec: SampleSpec, token: TokenOutput, after: list[TokenOutput]
) -> tuple[TokenOutput, ...]:
    num_known = len(spec.output_ids)
    for index, draft in enumerate(row.token_ids[-row.num_drafts :]):
        token_id = token.token_id
        if token_id != draft or finish_reason_at(spec.params, token_id, num_known + index + 1) is not None:
            return tuple(after[:index])
        token = after[index]
    return tuple(after)
