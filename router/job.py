"""From a validated request to what the cluster runs: ids, sampling, limits, text rules.

1. The prompt becomes token ids, once: rendered chat, text, or ids as sent.
2. `max_tokens` is settled against the context: explicit and too long is an error with the numbers; not sent
   is the rest of the context (chat) or 16 (text).
3. Sampling fields get the model's defaults, the seed is drawn if none came, ids are checked against the
   vocabulary.

All of it happens before anything is queued: a bad request never reaches a worker.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from cluster.errors import ContextLengthExceeded, InvalidRequest
from cluster.sampling import SamplingParams
from cluster.tokenizer import TEMPLATE_KWARGS, Tokenizer
from router.model_info import ModelInfo
from router.output import TextRules
from router.reply import ReplyOptions
from router.schema import ChatRequest, CompletionRequest, GenerationRequest, PromptFields

DEFAULT_COMPLETION_TOKENS = 16
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a client: one choice per prompt, all with the same rules."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: tuple[SamplingParams, ...]  # of each prompt: `max_tokens` may differ
    text: TextRules
    reply: ReplyOptions
    stream: bool
    cache_salt: str


@dataclass(frozen=True, slots=True)
class JobBuilder:
    """`max_model_len` is the context of the workers that are here, at most the model's."""

    tokenizer: Tokenizer
    model: ModelInfo
    max_model_len: int

    def chat(self, request: ChatRequest) -> Job:
        """Raises `InvalidRequest` or `ContextLengthExceeded`."""
        if request.top_logprobs and not request.logprobs:
            raise InvalidRequest("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
        prompt = self.render(request, request.add_special_tokens)
        num_logprobs = request.top_logprobs if request.logprobs else None
        return self._job(request, (("messages", prompt),), num_logprobs, default_max_tokens=None)

    def completion(self, request: CompletionRequest) -> Job:
        """Raises `InvalidRequest` or `ContextLengthExceeded`."""
        if request.stream and len(request.prompt) > 1:
            raise InvalidRequest(
                "Several prompts cannot be streamed: send one request per prompt, or `stream: false`.",
                param="stream",
                code="unsupported_parameter",
            )
        several = len(request.prompt) > 1
        prompts = []
        for index, prompt in enumerate(request.prompt):
            where = f"prompt[{index}]" if several else "prompt"
            if isinstance(prompt, str):
                prompts.append((where, self.encode(prompt, where, request.add_special_tokens)))
            else:
                self._check_ids(prompt, where)
                prompts.append((where, prompt))
        return self._job(request, prompts, request.logprobs, DEFAULT_COMPLETION_TOKENS)

    def encode(self, text: str, where: str, add_special_tokens: bool) -> tuple[int, ...]:
        try:
            return tuple(self.tokenizer.encode(text, add_special_tokens))
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=where) from error

    def render(self, request: PromptFields, add_special_tokens: bool) -> tuple[int, ...]:
        """Ids of a conversation."""
        for name in request.chat_template_kwargs:
            if name not in TEMPLATE_KWARGS:
                raise InvalidRequest(
                    f"`chat_template_kwargs` may hold: {', '.join(sorted(TEMPLATE_KWARGS))}.",
                    param=f"chat_template_kwargs.{name[:64]}",
                )
        continued = request.continue_final_message
        header = request.add_generation_prompt
        text = self.tokenizer.render_chat_text(
            [{"role": message.role, "content": message.content} for message in request.messages],
            add_generation_prompt=not continued if header is None else header,
            continue_final_message=continued,
            **request.chat_template_kwargs,
        )
        return self.encode(text, "messages", add_special_tokens)

    # ---- parts -----------------------------------------------------------------------------------

    def _job(
        self,
        request: GenerationRequest,
        prompts: Iterable[tuple[str, tuple[int, ...]]],
        num_logprobs: int | None,
        default_max_tokens: int | None,
    ) -> Job:
        if not request.spaces_between_special_tokens:
            raise InvalidRequest(
                "`spaces_between_special_tokens` is not supported with this value.",
                param="spaces_between_special_tokens",
                code="unsupported_parameter",
            )
        asked = _asked_max_tokens(request)
        kept: list[tuple[int, ...]] = []
        sampling: list[SamplingParams] = []
        for where, prompt in prompts:
            prompt = self._truncate(prompt, request)
            if not prompt:
                raise InvalidRequest(f"`{where}` is empty: there is no token to start from.", param=where)
            max_tokens = self._max_tokens(len(prompt), asked, default_max_tokens, where)
            kept.append(prompt)
            sampling.append(self._sampling(request, max_tokens, num_logprobs))
        options = request.stream_options
        return Job(
            prompts=tuple(kept),
            sampling=tuple(sampling),
            text=TextRules(
                stop=request.stop,
                include_stop=request.include_stop_str_in_output,
                min_tokens=request.min_tokens,
                skip_special_tokens=request.skip_special_tokens,
            ),
            reply=ReplyOptions(
                num_logprobs=num_logprobs,
                return_token_ids=request.return_token_ids,
                timings=request.timings,
                include_usage=options.include_usage,
                continuous_usage=options.continuous_usage_stats,
            ),
            stream=request.stream,
            cache_salt=request.cache_salt or "",
        )

    def _truncate(self, prompt: tuple[int, ...], request: GenerationRequest) -> tuple[int, ...]:
        limit = request.truncate_prompt_tokens
        if limit is None:
            return prompt
        if limit == 0 or limit > self.max_model_len:
            raise InvalidRequest(
                f"`truncate_prompt_tokens` must be -1 or from 1 to {self.max_model_len}.",
                param="truncate_prompt_tokens",
            )
        limit = self.max_model_len if limit == -1 else limit
        return prompt[-limit:] if request.truncation_side == "left" else prompt[:limit]

    def _max_tokens(self, num_prompt: int, asked: int | None, default: int | None, where: str) -> int:
        room = self.max_model_len - num_prompt
        if asked is not None and asked <= room:
            return asked
        if asked is None and room > 0:
            return room if default is None else min(default, room)
        wanted = f" and {asked} to be generated" if asked is not None else ", which leaves none to generate"
        raise ContextLengthExceeded(
            f"The context of this model is {self.max_model_len} tokens, "
            f"but the prompt has {num_prompt} tokens{wanted}. Shorten the prompt or lower `max_tokens`.",
            param=where,
        )

    def _sampling(
        self, request: GenerationRequest, max_tokens: int, num_logprobs: int | None
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
        )

    def _check_ids(self, token_ids: Iterable[int], where: str, *, keys: bool = False) -> None:
        for index, token_id in enumerate(token_ids):
            if token_id >= self.model.vocab_size:
                param = f"{where}.{token_id}" if keys else f"{where}[{index}]"
                raise InvalidRequest(
                    f"`{param}` is not a token id: the vocabulary has {self.model.vocab_size} tokens.",
                    param=param,
                )


def _asked_max_tokens(request: GenerationRequest) -> int | None:
    """`max_completion_tokens` is the newer name of `max_tokens`; two different values are a mistake."""
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest("`max_tokens` and `max_completion_tokens` differ: send one.", param="max_tokens")
    return old if new is None else new


def _given(value: _T | None, default: _T) -> _T:
    return default if value is None else value
