"""What is offered: a workload and a seed become units, each the drafts of one arrival.

A unit is one request, or all turns of one conversation in order. Everything here is pure; `prompts` writes
the words, `build` brings units and times together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bench.load.prompts import Draft
from bench.load.randomness import generator
from bench.load.settings import Chats, Oversize, SharedPrefix, Synthetic, TraceReplay
from bench.load.sharegpt import Conversation
from bench.load.tokens import Part, Segment, num_tokens, resize
from bench.load.trace_formats import TraceRow

Unit = tuple[Draft, ...]


def synthetic_units(workload: Synthetic, seed: int, num: int) -> list[Unit]:
    inputs = workload.input.draw(generator(seed, "inputs"), num).tolist()
    outputs = workload.output.draw(generator(seed, "outputs"), num).tolist()
    return [(Draft((Segment(Part.REQUEST, index, inputs[index]),), outputs[index]),) for index in range(num)]


def shared_prefix_units(workload: SharedPrefix, seed: int, num: int) -> list[Unit]:
    inputs = workload.input.draw(generator(seed, "inputs"), num).tolist()
    outputs = workload.output.draw(generator(seed, "outputs"), num).tolist()
    weights = np.arange(1, workload.num_groups + 1, dtype=np.float64) ** -workload.skew
    groups = (
        generator(seed, "groups").choice(workload.num_groups, size=num, p=weights / weights.sum()).tolist()
    )
    return [
        (
            Draft(
                (
                    Segment(Part.PREFIX, groups[index], workload.prefix_tokens),
                    Segment(Part.REQUEST, index, inputs[index]),
                ),
                outputs[index],
                prefix_group=groups[index],
            ),
        )
        for index in range(num)
    ]


def chat_units(workload: Chats, seed: int, num: int) -> list[Unit]:
    turns = workload.turns.draw(generator(seed, "turns"), num).tolist()
    total = sum(turns)
    inputs = workload.input.draw(generator(seed, "inputs"), total).tolist()
    outputs = workload.output.draw(generator(seed, "outputs"), total).tolist()
    thinks_s = [workload.think_s] * total
    if workload.random_think:
        thinks_s = (workload.think_s * generator(seed, "think").standard_exponential(total)).tolist()
    system = (Segment(Part.SYSTEM, 0, workload.system_tokens),) if workload.system_tokens else None
    units: list[Unit] = []
    first = 0
    for session, num_turns in enumerate(turns):
        units.append(
            tuple(
                Draft(
                    (Segment(Part.REQUEST, first + turn, inputs[first + turn]),),
                    outputs[first + turn],
                    system=system if turn == 0 else None,
                    session=session,
                    turn=turn,
                    think_s=thinks_s[first + turn] if turn else 0.0,
                    prefix_group=0 if system else None,
                )
                for turn in range(num_turns)
            )
        )
        first += num_turns
    return units


def replay_units(workload: TraceReplay, rows: Sequence[TraceRow]) -> list[Unit]:
    """One request per (scaled) row. Prompts begin alike where hash ids are equal, or else where sessions
    are.
    """
    sessions: dict[str, int] = {}
    units: list[Unit] = []
    for index, row in enumerate(rows):
        group: int | None = None
        own = Segment(Part.REQUEST, index, row.input_tokens)
        prompt: tuple[Segment, ...] = (own,)
        if row.hash_ids:
            group = row.hash_ids[0]
            prompt = resize((*_blocks(workload, row.hash_ids), replace(own, num_tokens=0)), row.input_tokens)
        elif row.session is not None:
            group = sessions.setdefault(row.session, len(sessions))
            prompt = (Segment(Part.SESSION, group, row.input_tokens),)
        units.append((Draft(prompt, row.output_tokens, prefix_group=group),))
    return units


def _blocks(workload: TraceReplay, hash_ids: Sequence[int]) -> list[Segment]:
    """Block j spans ⌊j·b/scale⌋ to ⌊(j+1)·b/scale⌋: the same for all prompts, so equal blocks stay at equal
    places.
    """
    blocks = []
    start = 0
    for position, hash_id in enumerate(hash_ids):
        end = int((position + 1) * workload.block_tokens / workload.scale)
        blocks.append(Segment(Part.BLOCK, hash_id, end - start))
        start = end
    return blocks


def conversation_unit(
    conversation: Conversation, session: int, outputs: Sequence[int], think_s: float, *, is_chat: bool
) -> Unit:
    """The first `len(outputs)` questions. Completions offer the first one without its system message."""
    if not is_chat:
        return (Draft(conversation.exchanges[0].question, outputs[0]),)
    return tuple(
        Draft(
            conversation.exchanges[turn].question,
            output_tokens,
            system=conversation.system if turn == 0 else None,
            session=session if len(outputs) > 1 else None,
            turn=turn,
            think_s=think_s if turn else 0.0,
        )
        for turn, output_tokens in enumerate(outputs)
    )


def fit_lengths(
    input_tokens: int, output_tokens: int, limit: int | None, rule: Oversize
) -> tuple[int, int] | None:
    """The lengths that `rule` makes of those two under `limit`; None: left out."""
    if limit is None or input_tokens + output_tokens <= limit:
        return input_tokens, output_tokens
    if rule is Oversize.SKIP or limit < 2:
        return None
    output_tokens = min(output_tokens, limit // 2)
    return min(input_tokens, limit - output_tokens), output_tokens


def fit_draft(draft: Draft, limit: int | None, rule: Oversize) -> Draft | None:
    """The same for a drafted prompt, which loses its end."""
    assert not isinstance(draft.prompt, str)
    have = (num_tokens(draft.prompt), draft.output_tokens)
    fitting = fit_lengths(*have, limit, rule)
    if fitting is None or fitting == have:
        return None if fitting is None else draft
    return replace(draft, prompt=resize(draft.prompt, fitting[0]), output_tokens=fitting[1])


def fit_chat(unit: Unit, limit: int | None, rule: Oversize, first_added: int, turn_added: int) -> Unit | None:
    """The turns whose whole history fits, counting what the template adds; None: left out (the first does
    not fit).
    """
    if limit is None:
        return unit
    total = first_added - turn_added
    for turn, draft in enumerate(unit):
        contents = [part for part in (draft.system, draft.prompt) if part is not None]
        total += turn_added + draft.output_tokens
        total += sum(num_tokens(part) for part in contents if not isinstance(part, str))
        if total > limit:
            return unit[:turn] if turn and rule is Oversize.CLAMP else None
    return unit
