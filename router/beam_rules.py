"""The fields of a beam search, as vLLM's clients send them: `use_beam_search`, with `n` as its width,
`length_penalty` and `early_stopping`.

A search looks for the `n` most probable answers by the model's own distribution. What shapes or bounds that
distribution, or cuts the text, has no meaning for it and is refused by name rather than left out.
"""

from __future__ import annotations

from cluster.errors import InvalidRequest
from cluster.sampling import SamplingParams
from router.beam_search import BeamRules
from router.schema import GenerationRequest

# Field |-> the values at which it asks for nothing. `seed` asks for what a search always keeps.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "temperature": (None, 0, 1),
    "top_p": (None, 1),
    "top_k": (None, -1, 0),
    "min_p": (None, 0),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (None, 1),
    "logit_bias": ((),),
    "bad_words": ([],),
    "allowed_token_ids": (None,),
    "stop": ((),),
}


def check_beam_fields(request: GenerationRequest, *, is_constrained: bool, best_of: int | None) -> None:
    """Raises `InvalidRequest` for a field that a search cannot follow, or that needs one."""
    if not request.use_beam_search:
        for name, neutral in (("length_penalty", (None, 1)), ("early_stopping", (False,))):
            if getattr(request, name) not in neutral:
                raise InvalidRequest(f"`{name}` needs `use_beam_search`.", param=name)
        return
    if request.stream:
        raise InvalidRequest(
            "`use_beam_search` cannot be streamed: the best is known at the end.", param="stream"
        )
    if best_of not in (None, request.n):
        raise InvalidRequest("`best_of` has no effect with `use_beam_search`: send `n`.", param="best_of")
    if is_constrained:
        raise InvalidRequest(
            "`use_beam_search` cannot follow a format or tools that are required: send one of them.",
            param="use_beam_search",
        )
    for name, values in _NEUTRAL.items():
        if getattr(request, name) not in values:
            raise InvalidRequest(
                f"`{name}` has no meaning with `use_beam_search`, which compares the model's own "
                "log-probabilities: leave it out.",
                param=name,
            )


def beam_rules(request: GenerationRequest, sampling: SamplingParams) -> BeamRules:
    """Of one prompt, whose `max_tokens` are settled."""
    return BeamRules(
        width=request.n,
        max_tokens=sampling.max_tokens,
        end_ids=frozenset((*sampling.eos_token_ids, *sampling.stop_token_ids)),
        min_tokens=sampling.min_tokens,
        length_penalty=1.0 if request.length_penalty is None else float(request.length_penalty),
        early_stopping=request.early_stopping,
    )


def beam_sampling(sampling: SamplingParams, rules: BeamRules) -> SamplingParams:
    """How a beam's stream goes on: greedily, with the alternatives that are compared or wanted."""
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=0.0,
        min_tokens=sampling.min_tokens,
        eos_token_ids=sampling.eos_token_ids,
        stop_token_ids=sampling.stop_token_ids,
        num_logprobs=max(rules.num_logprobs, sampling.num_logprobs or 0),
        prompt_logprobs=sampling.prompt_logprobs,
    )
