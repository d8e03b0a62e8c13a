"""Steps that bring drafts: more than one token of a request per pass over the weights, where that pays.

1. The core says how long a step may take with drafts (`StepPlan.longest_s`; 0: it brings none) and how far
   each row's blocks and limits reach (`Row.end`).
2. `Speculation.draft` gives rows what their own history suggests (`cluster.engine.prompt_lookup`), as much as
   pays (`cluster.engine.draft_policy`).
3. The runner computes and keeps what is right (`cluster.engine.drafts`); `learn` takes note of it.

It lives beside the runner, not in the core: a step that follows at once (`cluster.engine.following`) needs
its drafts before the core has heard of the one before. Rows with a grammar bring none, since a grammar's
state cannot go back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from cluster.engine.batch import Row, Runner, StepOutput, StepPlan
from cluster.engine.draft_policy import MOST_DRAFTS, MOST_ROWS, Acceptance, DraftCosts, choose, most_rest
from cluster.engine.drafts import with_drafts
from cluster.engine.prompt_lookup import Match, PromptLookup
from cluster.ids import Attempt, RequestId

MOST_INDEXED_AT_ONCE: Final = 2048  # tokens of a history, in a step: a millisecond
_MOST_KNOWN: Final = 4 * MOST_ROWS  # requests; those that ended are among them until others come


class Drafts(Protocol):
    """Who guesses. Nothing of what it says can change a token."""

    def draft(self, plan: StepPlan) -> StepPlan:
        """`plan`, with drafts in some of its rows."""
        ...

    def learn(self, plan: StepPlan, output: StepOutput) -> None:
        """What became of a plan that `draft` has returned; not called if its step failed."""
        ...


class RequestDrafts(msgspec.Struct):
    """What drafting knows of an attempt."""

    lookup: PromptLookup
    acceptance: Acceptance
    rest: int = 0  # steps in which nobody looks
    num_vain: int = 0  # looks in a row that came to nothing

    def looked(self, is_useful: bool, num_rows: int) -> None:
        self.num_vain = 0 if is_useful else self.num_vain + 1
        self.rest = min(self.num_vain, most_rest(num_rows))


class Speculation:
    """`Drafts` by prompt lookup. One thread at a time."""

    def __init__(self) -> None:
        self._costs = DraftCosts()
        self._acceptance = Acceptance()  # of all requests
        self._requests: dict[tuple[RequestId, Attempt], RequestDrafts] = {}  # the latest come last
        self._matches: dict[int, Match] = {}  # by row of the plan: those that brought drafts

    def draft(self, plan: StepPlan) -> StepPlan:
        self._matches.clear()
        num_rows = len(plan.rows)
        cost = self._costs.of(num_rows)
        if not plan.longest_s or num_rows > MOST_ROWS or cost is None:
            return plan
        found: list[tuple[int, RequestDrafts, Match]] = []
        chances: list[list[float]] = []
        for index, row in enumerate(plan.rows):
            most = min(row.end - row.start - 1, MOST_DRAFTS)
            known = self._known(row) if most > 0 else None
            if known is None:
                continue
            match = known.lookup.find()
            if match is None:
                known.looked(False, num_rows)
                continue
            found.append((index, known, match))
            chances.append(known.acceptance.chances(match.length, most))
        if not found:
            return plan
        rows = list(plan.rows)
        counts = choose(chances, num_rows, *cost, plan.longest_s)
        for (index, known, match), count in zip(found, counts, strict=True):
            known.looked(count > 0, num_rows)
            if count:
                self._matches[index] = match
                rows[index] = with_drafts(rows[index], known.lookup.draft(match, count))
            else:
                known.acceptance.passed_over()
        return msgspec.structs.replace(plan, rows=tuple(rows)) if self._matches else plan

    def learn(self, plan: StepPlan, output: StepOutput) -> None:
        if not plan.longest_s or len(plan.rows) > MOST_ROWS:
            return
        self._costs.observe(len(plan.rows), num_drafts(plan), output.compute_s)
        for index, row in enumerate(plan.rows):
            token = output.outputs[index]
            known = self.known_of(row)
            if known is None or token is None:
                continue
            further = output.further.get(index, ())
            if index in self._matches:
                known.acceptance.record(self._matches[index].length, row.num_drafts, len(further))
            if len(known.lookup.tokens) == row.start + 1:
                for one in (token, *further):
                    known.lookup.append(one.token_id)

    def known_of(self, row: Row) -> RequestDrafts | None:
        return self._requests.get((row.request, row.attempt))

    def _known(self, row: Row) -> RequestDrafts | None:
        """With the row's whole history. None: it is not told yet or not taken in yet, its tokens are not
        free, or it rests."""
        spec = row.sample
        if spec is None or spec.params.grammar:
            return None
        known, num_prompt = self.known_of(row), len(spec.prompt_ids)
        if known is not None and known.rest:
            known.rest -= 1
            return None
        have = num_prompt if known is None else len(known.lookup.tokens)
        news: list[int] = []
        if have <= row.start:
            news += spec.output_ids[have - num_prompt :]
            if have + len(news) == row.start:  # a step that follows at once: its token is not told yet
                news.append(row.token_ids[0])
        if have + len(news) != row.start + 1:
            return None
        if known is None:
            known = RequestDrafts(PromptLookup([*spec.prompt_ids, *news]), Acceptance(self._acceptance))
        else:
            del self._requests[row.request, row.attempt]
            for token in news:
                known.lookup.append(token)
        self._requests[row.request, row.attempt] = known
        if len(self._requests) > _MOST_KNOWN:
            del self._requests[next(iter(self._requests))]
        return known if known.lookup.catch_up(MOST_INDEXED_AT_ONCE) else None


class SpeculatingRunner:
    """A `Runner` whose steps bring drafts."""

    def __init__(
        self, runner: Runner, drafts: Drafts, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`clock`: as the runner measures."""
        self._runner, self._drafts, self._clock = runner, drafts, clock

    def run(self, plan: StepPlan, await_history: Callable[[], object] | None = None) -> StepOutput:
        if not plan.longest_s:  # most large steps: there are no drafts to think of
            return self._runner.run(plan, await_history)
        waited_s = 0.0

        def wait() -> None:
            """What it takes is nothing that the step computed."""
            nonlocal waited_s
            assert await_history is not None
            began_s = self._clock()
            await_history()
            waited_s += self._clock() - began_s

        drafted = self._drafts.draft(plan)
        output = self._runner.run(drafted, None if await_history is None else wait)
        self._drafts.learn(
            drafted, msgspec.structs.replace(output, compute_s=max(0.0, output.compute_s - waited_s))
        )
        return output if drafted is plan else told(drafted, output)


def told(plan: StepPlan, output: StepOutput) -> StepOutput:
    """`output` with how many drafts there were."""
    return msgspec.structs.replace(output, num_drafted=num_drafts(plan))


def num_drafts(plan: StepPlan) -> int:
    return sum([row.num_drafts for row in plan.rows])
