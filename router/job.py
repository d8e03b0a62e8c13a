"""From a validated request to what the cluster runs: ids, sampling, limits, text rules.

1. The prompt becomes token ids, once (`router.prompt_builder`): rendered chat, text, or ids as sent.
2. `max_tokens` is settled against the context: explicit and too long is an error with the numbers; not sent
   is the rest of the context (chat) or 16 (text).
3. What the answer has to look like, and the tools it may call, become a grammar (`router.constraint`,
   `router.tool_formats`), checked against the model's tokens.
4. Sampling fields get the model's defaults, the seed is drawn if none came, ids are checked against the
   vocabulary.

All of it happens before anything is queued: a bad request never reaches a worker.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from cluster.errors import ContextLengthExceeded, InvalidRequest
from cluster.grammar import Grammars
from cluster.request import RequestSlo
from cluster.sampling import SamplingParams
from cluster.tokenizer import Tokenizer
from router.beam_rules import beam_rules, beam_sampling, check_beam_fields
from router.beam_search import BeamRules
from router.constraint import SPELLINGS, parse_constraint
from router.limits import RequestLimits
from router.model_info import ModelInfo
from router.output import TextRules
from router.prompt_builder import PromptBuilder, plan_tools
from router.reply import ReplyOptions
from router.schema import ChatRequest, CompletionRequest, GenerationRequest, PromptFields
from router.tool_formats import ToolFormat, call_grammar, check_tools
from router.tools import ToolPlan

DEFAULT_COMPLETION_TOKENS = 16
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a client: `num_choices` answers to each prompt, all by the same rules.

    `num_candidates` are generated, and the best of them are the answers.
    """

    prompts: tuple[tuple[int, ...], ...]
    sampling: tuple[SamplingParams, ...]  # of each prompt: `max_tokens` may differ
    leads: tuple[str, ...]  # of each prompt: what its answers repeat before they begin
    text: TextRules
    reply: ReplyOptions
    stream: bool
    cache_salt: str
    num_choices: int = 1
    num_candidates: int = 1
    beams: tuple[BeamRules, ...] = ()  # of each prompt; empty: answers are sampled, not searched for
    tools: ToolPlan | None = None
    priority: int = 0
    affinity: str = ""
    slo: RequestSlo = field(default_factory=RequestSlo)
    ignored: tuple[str, ...] = ()  # request fields without effect


@dataclass(frozen=True, slots=True)
class JobBuilder:
    """`max_model_len` is the context of the workers that are here, at most the model's. `grammars` reads the
    vocabulary when it is called first."""

    tokenizer: Tokenizer
    model: ModelInfo
    max_model_len: int
    limits: RequestLimits
    grammars: Callable[[], Grammars]
    tool_format: ToolFormat

    @property
    def prompts(self) -> PromptBuilder:
        return PromptBuilder(self.tokenizer, self.limits, self.max_model_len)

    def chat(self, request: ChatRequest, ignored: tuple[str, ...] = ()) -> Job:
        """Raises `InvalidRequest` or `ContextLengthExceeded`."""
        if request.top_logprobs and not request.logprobs:
            raise InvalidRequest("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
        plan = self._tool_plan(request)
        prompt = self.prompts.render(request, request.add_special_tokens, plan)
        prompt = self.prompts.truncate(prompt, request)
        num_logprobs = request.top_logprobs if request.logprobs else None
        last = request.messages[-1]
        lead = last.content if request.echo and last.role == "assistant" else ""
        prompts = [("messages", prompt, lead)]
        labels = sorted({f"messages.{name}" for message in request.messages for name in message.ignored})
        return self._job(request, prompts, num_logprobs, None, _Extras((*ignored, *labels), plan))

    def completion(self, request: CompletionRequest, ignored: tuple[str, ...] = ()) -> Job:
        """Raises `InvalidRequest` or `ContextLengthExceeded`."""
        best_of = request.n if request.best_of is None else request.best_of
        if best_of < request.n:
            raise InvalidRequest(f"`best_of` ({best_of}) is less than `n` ({request.n}).", param="best_of")
        if best_of > request.n and request.stream:
            raise InvalidRequest(
                "`best_of` cannot be streamed: the best is known at the end.", param="best_of"
            )
        if request.max_tokens == 0 and not request.echo:
            raise InvalidRequest("`max_tokens` may be 0 only with `echo`.", param="max_tokens")
        several = len(request.prompt) > 1
        prompts = []
        for index, prompt in enumerate(request.prompt):
            where = f"prompt[{index}]" if several else "prompt"
            if isinstance(prompt, str):
                ids = self.prompts.encode(prompt, where, request.add_special_tokens)
            else:
                self._check_ids(prompt, where)
                ids = prompt
            ids = self.prompts.truncate(ids, request)
            lead = self.tokenizer.decode(ids, request.skip_special_tokens) if request.echo else ""
            prompts.append((where, ids, lead))
        extras = _Extras(ignored, None, best_of)
        return self._job(request, prompts, request.logprobs, DEFAULT_COMPLETION_TOKENS, extras)

    # ---- parts -----------------------------------------------------------------------------------

    def _tool_plan(self, request: PromptFields) -> ToolPlan | None:
        plan = plan_tools(request)
        if plan is not None:
            check_tools(plan, self.grammars(), self.limits.grammar)
        return plan

    def _job(
        self,
        request: GenerationRequest,
        prompts: Sequence[tuple[str, tuple[int, ...], str]],
        num_logprobs: int | None,
        default_max_tokens: int | None,
        extras: _Extras,
    ) -> Job:
        num_candidates = extras.best_of or request.n
        if len(prompts) * num_candidates > self.limits.max_choices:
            raise InvalidRequest(
                f"{len(prompts)} prompts with {num_candidates} answers each are more than the "
                f"{self.limits.max_choices} answers that one request may have.",
                param="n",
            )
        if request.prompt_logprobs is not None and request.stream:
            raise InvalidRequest("`prompt_logprobs` cannot be streamed.", param="prompt_logprobs")
        asked = _asked_max_tokens(request)
        num_prompt_logprobs = _num_prompt_logprobs(request, num_logprobs, default_max_tokens is not None)
        if num_candidates > request.n and num_logprobs is None:
            candidate_logprobs: int | None = 0  # to tell which are the best
        else:
            candidate_logprobs = num_logprobs
        grammar = self._grammar(request, extras.plan)
        check_beam_fields(request, is_constrained=bool(grammar), best_of=extras.best_of)
        kept: list[tuple[int, ...]] = []
        sampling: list[SamplingParams] = []
        for where, prompt, _ in prompts:
            if not prompt:
                raise InvalidRequest(f"`{where}` is empty: there is no token to start from.", param=where)
            max_tokens = self._max_tokens(len(prompt), asked, default_max_tokens, where)
            self._check_num_scores(len(prompt), num_prompt_logprobs, where)
            kept.append(prompt)
            sampling.append(
                self._sampling(request, max_tokens, candidate_logprobs, num_prompt_logprobs, grammar)
            )
        beams: list[BeamRules] = []
        if request.use_beam_search:
            beams = [beam_rules(request, one) for one in sampling]
            sampling = [beam_sampling(one, rules) for one, rules in zip(sampling, beams, strict=True)]
        options = request.stream_options
        return Job(
            prompts=tuple(kept),
            sampling=tuple(sampling),
            beams=tuple(beams),
            leads=tuple(lead for _, _, lead in prompts),
            text=TextRules(
                stop=request.stop,
                include_stop=request.include_stop_str_in_output,
                min_tokens=request.min_tokens,
                skip_special_tokens=request.skip_special_tokens,
                prompt_only=asked == 0,
            ),
            reply=ReplyOptions(
                num_logprobs=num_logprobs,
                num_prompt_logprobs=request.prompt_logprobs,
                echo=request.echo,
                skip_special_tokens=request.skip_special_tokens,
                return_token_ids=request.return_token_ids,
                timings=request.timings,
                include_usage=options.include_usage,
                continuous_usage=options.continuous_usage_stats,
                obfuscate=options.include_obfuscation,
            ),
            stream=request.stream,
            cache_salt=request.cache_salt or "",
            num_choices=request.n,
            num_candidates=num_candidates,
            tools=extras.plan,
            priority=request.priority,
            affinity=request.affinity,
            ignored=(*extras.ignored, *_without_effect(request)),
        )

    def _grammar(self, request: GenerationRequest, plan: ToolPlan | None) -> str:
        """What the answer must match; empty if anything may come."""
        asked = {name: value for name in SPELLINGS if (value := getattr(request, name)) is not None}
        constraint = parse_constraint(asked, self.limits)
        if plan is not None:
            grammar = call_grammar(plan, self.tool_format, constraint, self.limits.grammar)
        else:
            grammar = "" if constraint is None else constraint.grammar
        if grammar:
            self.grammars().check(grammar, "tools" if constraint is None else constraint.param)
        return grammar

    def _max_tokens(self, num_prompt: int, asked: int | None, default: int | None, where: str) -> int:
        room = self.max_model_len - num_prompt
        if asked is not None and max(asked, 1) <= room:
            return max(asked, 1)  # a prompt is computed with one token after it, shown or not
        if asked is None and room > 0:
            return room if default is None else min(default, room)
        wanted = f" and {asked} to be generated" if asked is not None else ", which leaves none to generate"
        raise ContextLengthExceeded(
            f"A request may have {self.max_model_len} tokens here, "
            f"but the prompt has {num_prompt} tokens{wanted}. Shorten the prompt or lower `max_tokens`.",
            param=where,
        )

    def _check_num_scores(self, num_prompt: int, num_prompt_logprobs: int | None, where: str) -> None:
        most = self.limits.max_prompt_logprobs
        if num_prompt_logprobs is not None and num_prompt * (num_prompt_logprobs + 1) > most:
            raise InvalidRequest(
                f"Log-probabilities of {num_prompt} prompt tokens with {num_prompt_logprobs} alternatives "
                f"are more than the {most} numbers that one request may ask for.",
                param=where,
            )

    def _sampling(
        self,
        request: GenerationRequest,
        max_tokens: int,
        num_logprobs: int | None,
        num_prompt_logprobs: int | None,
        grammar: str,
    ) -> SamplingParams:
        defaults = self.model.defaults
        if request.min_tokens > max_tokens:
            raise InvalidRequest(
                f"`min_tokens` ({request.min_tokens}) is more than `max_tokens` ({max_tokens}).",
                param="min_tokens",
            )
        self._check_ids(request.stop_token_ids, "stop_token_ids")
        self._check_ids(request.allowed_token_ids or (), "allowed_token_ids")
        self._check_ids((token_id for token_id, _ in request.logit_bias), "logit_bias", keys=True)

        return SamplingParams(
            max_tokens=max_tokens,
            seed=secrets.randbits(63) if request.seed is None else request.seed,
            temperature=float(_given(request.temperature, defaults.temperature)),
            top_k=max(0, _given(request.top_k, defaults.top_k)),
            top_p=float(_given(request.top_p, defaults.top_p)),
            min_p=float(_given(request.min_p, defaults.min_p)),
            presence_penalty=float(request.presence_penalty),
            frequency_penalty=float(request.frequency_penalty),
            repetition_penalty=float(_given(request.repetition_penalty, defaults.repetition_penalty)),
            logit_bias=request.logit_bias,
            bad_words_ids=self.tokenizer.bad_words_ids(request.bad_words),
            allowed_token_ids=tuple(dict.fromkeys(request.allowed_token_ids or ())),
            min_tokens=request.min_tokens,
            eos_token_ids=() if request.ignore_eos else self.tokenizer.eos_token_ids,
            stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids)),
            num_logprobs=num_logprobs,
            grammar=grammar,
            prompt_logprobs=num_prompt_logprobs,
        )

    def _check_ids(self, token_ids: Iterable[int], where: str, *, keys: bool = False) -> None:
        for index, token_id in enumerate(token_ids):
            if token_id >= self.model.vocab_size:
                param = f"{where}.{token_id}" if keys else f"{where}[{index}]"
                raise InvalidRequest(
                    f"`{param}` is not a token id: the vocabulary has {self.model.vocab_size} tokens.",
                    param=param,
                )


@dataclass(frozen=True, slots=True)
class _Extras:
    """What only one of the routes knows."""

    ignored: tuple[str, ...]
    plan: ToolPlan | None
    best_of: int | None = None


def _without_effect(request: GenerationRequest) -> tuple[str, ...]:
    """Asked for in vain: text is the tokens' bytes, so there are no spaces between special tokens that are
    shown. Where none is shown there is nothing to say."""
    wants_spaces = request.spaces_between_special_tokens and not request.skip_special_tokens
    return ("spaces_between_special_tokens",) if wants_spaces else ()


def _asked_max_tokens(request: GenerationRequest) -> int | None:
    """`max_completion_tokens` is the newer name of `max_tokens`; two different values are a mistake."""
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest("`max_tokens` and `max_completion_tokens` differ: send one.", param="max_tokens")
    return old if new is None else new


def _num_prompt_logprobs(request: GenerationRequest, num_logprobs: int | None, is_text: bool) -> int | None:
    """Alternatives per token of the prompt; None if nobody asks for its log-probabilities. A text that is
    echoed has them with `logprobs`."""
    echoed = num_logprobs if request.echo and is_text else None
    asked = [number for number in (request.prompt_logprobs, echoed) if number is not None]
    return max(asked, default=None)


def _given(value: _T | None, default: _T) -> _T:
    return default if value is None else value
