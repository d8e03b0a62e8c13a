"""Requests that a runner computes step by step: a prompt in chunks here, its tokens there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cluster.engine.batch import Row, SampleSpec, StepPlan
from cluster.engine.runner import ModelRunner
from cluster.ids import Attempt, BlockId, RequestId
from cluster.sampling import SamplingParams, TokenOutput


@dataclass(slots=True)
class CheckRequest:
    """Sampled with log-probabilities, by a seed of its own: `index`."""

    index: int
    prompt: list[int]
    num_tokens: int
    blocks: Sequence[BlockId]
    outputs: list[TokenOutput] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *(output.token_id for output in self.outputs)]

    def row(self, start: int, stop: int) -> Row:
        """Positions [start, stop); sampled if that reaches the end."""
        tokens = self.tokens
        params = SamplingParams(
            max_tokens=self.num_tokens, seed=self.index, temperature=0.8, top_p=0.9, num_logprobs=2
        )
        spec = SampleSpec(params, self.prompt, tokens[len(self.prompt) :]) if stop == len(tokens) else None
        return Row(
            request=RequestId(str(self.index)),
            attempt=Attempt(1),
            token_ids=tokens[start:stop],
            start=start,
            block_ids=self.blocks,
            sample=spec,
        )


def compute_chunk(runner: ModelRunner, request: CheckRequest, start: int, chunk: int) -> int:
    """Prefill up to `chunk` tokens from `start`; returns where the next begins."""
    stop = min(len(request.prompt), start + chunk)
    [output] = runner.run(StepPlan(rows=(request.row(start, stop),))).outputs
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a step is over when its device is: what it wrote may be sent
    if output is not None:
        request.outputs.append(output)
    return stop


def decode(runner: ModelRunner, requests: Sequence[CheckRequest]) -> None:
    """All in one batch, until each has its tokens; token 0 is there."""
    while requests and len(requests[0].outputs) < requests[0].num_tokens:
        rows = tuple(request.row(len(request.tokens) - 1, len(request.tokens)) for request in requests)
        for request, output in zip(requests, runner.run(StepPlan(rows=rows)).outputs, strict=True):
            assert output is not None, "a decode row samples"
            request.outputs.append(output)
