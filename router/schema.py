"""The public request schema: strict types and ranges, one error for the first field at fault.

1. `parse_json`: bytes → object. NaN, Infinity and numbers beyond a double are not JSON and are refused; so is
   what is nested too deeply.
2. `fields.screen_fields`: nulls dropped; internal and unsupported fields refused; unknown ones set aside.
3. `parse_request`: a pydantic model in strict mode (no numbers in strings, no booleans or fractions for
   integers); its first complaint becomes an `InvalidRequest` that names the field. What the operator limits
   (`router.limits`) is checked here too.

Ranges that need the model (vocabulary, context) are checked where the request is built, in `router.job`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
)

from cluster.errors import InvalidRequest
from router import nested_json
from router.fields import screen_fields
from router.limits import RequestLimits
from router.messages import ChatMessage, parse_messages
from router.prompts import Prompt, parse_prompts
from router.tools import Tool, parse_tools

_INT64 = 2**63

Int = Annotated[int, Field(ge=-_INT64, lt=_INT64)]
PositiveInt = Annotated[int, Field(ge=1, lt=_INT64)]


def _limits(info: ValidationInfo) -> RequestLimits:
    assert isinstance(info.context, RequestLimits)  # `parse_request` gives it
    return info.context


def _at_most(limit: str, of: str = "entries") -> AfterValidator:
    """A number up to a limit of `RequestLimits`, or something that has so many of a kind."""

    def check(value: Any, info: ValidationInfo) -> Any:
        most = getattr(_limits(info), limit)
        if value is not None and (value if isinstance(value, int) else len(value)) > most:
            bound = f"be at most {most}" if isinstance(value, int) else f"have at most {most} {of}"
            raise InvalidRequest(f"`{info.field_name}` may {bound}.", param=info.field_name)
        return value

    return AfterValidator(check)


def _real(low: float, high: float, *, exclusive: bool = False) -> Any:
    bound = Field(gt=low, le=high) if exclusive else Field(ge=low, le=high)
    return Annotated[float, Field(allow_inf_nan=False), bound]


def _parse_stop(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    limits = _limits(info)
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise InvalidRequest("`stop` must be a string or a list of strings.", param="stop")
    if "" in strings:
        raise InvalidRequest("`stop` must not contain an empty string.", param="stop")
    if len(strings) > limits.max_stop_strings:
        raise InvalidRequest(f"`stop` may have at most {limits.max_stop_strings} strings.", param="stop")
    if max(map(len, strings), default=0) > limits.max_stop_chars:
        raise InvalidRequest(
            f"A string of `stop` may have at most {limits.max_stop_chars} characters.", param="stop"
        )
    return tuple(dict.fromkeys(strings))


def _check_bad_words(value: list[str], info: ValidationInfo) -> list[str]:
    most = _limits(info).max_bad_words_chars
    if sum(map(len, value)) > most:
        raise InvalidRequest(
            f"`bad_words` may have at most {most} characters, all together.", param="bad_words"
        )
    return value


def _parse_logit_bias(value: Any, info: ValidationInfo) -> tuple[tuple[int, float], ...]:
    most = _limits(info).max_listed_ids
    if not isinstance(value, dict):
        raise InvalidRequest("`logit_bias` must be an object of token id to bias.", param="logit_bias")
    if len(value) > most:
        raise InvalidRequest(f"`logit_bias` may have at most {most} entries.", param="logit_bias")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        shown = f"logit_bias.{key[:32]}"
        if not (key.isascii() and key.isdigit() and len(key) < 19):
            raise InvalidRequest("Keys of `logit_bias` must be token ids.", param=shown)
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise InvalidRequest("Values of `logit_bias` must be numbers from -100 to 100.", param=shown)
        biases[int(key)] = float(bias)
    return tuple(biases.items())


class StreamOptions(BaseModel):
    """`include_obfuscation` pads chunks against eavesdroppers of their sizes."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


def _parse_stream_options(value: Any) -> Any:
    """Nested nulls, too, count as "not sent"."""
    if not isinstance(value, dict):
        raise InvalidRequest("`stream_options` must be an object.", param="stream_options")
    return {key: item for key, item in value.items() if item is not None}


_Affinity = Annotated[str, _at_most("max_session_chars", "characters")]


class GenerationRequest(BaseModel):
    """What chat and text completions share. None = not sent: the model's default decides."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", arbitrary_types_allowed=True)

    model: str | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    temperature: _real(0, 2) | None = None  # type: ignore[valid-type]
    top_p: _real(0, 1, exclusive=True) | None = None  # type: ignore[valid-type]
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: _real(0, 1) | None = None  # type: ignore[valid-type]
    presence_penalty: _real(-2, 2) = 0.0  # type: ignore[valid-type]
    frequency_penalty: _real(-2, 2) = 0.0  # type: ignore[valid-type]
    repetition_penalty: _real(0, 1e6, exclusive=True) | None = None  # type: ignore[valid-type]
    n: Annotated[int, Field(ge=1), _at_most("max_n")] = 1
    use_beam_search: bool = False  # for the `n` most probable answers
    length_penalty: _real(-10, 10) | None = None  # type: ignore[valid-type]
    early_stopping: bool = False
    seed: Int | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_parse_stop)] = ()
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], _at_most("max_listed_ids")] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, lt=_INT64)] = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool | None = None  # text is the tokens' bytes: there are never any
    bad_words: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        _at_most("max_listed_ids"),
        AfterValidator(_check_bad_words),
    ] = []
    allowed_token_ids: (
        Annotated[
            list[Annotated[int, Field(ge=0, lt=_INT64)]], Field(min_length=1), _at_most("max_listed_ids")
        ]
        | None
    ) = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=_INT64)] | None = None
    truncation_side: Literal["left", "right"] = "left"
    logit_bias: Annotated[tuple[tuple[int, float], ...], PlainValidator(_parse_logit_bias)] = ()
    prompt_logprobs: Annotated[int, Field(ge=0), _at_most("max_logprobs")] | None = None
    stream: bool = False
    stream_options: Annotated[StreamOptions, BeforeValidator(_parse_stream_options)] = StreamOptions()
    echo: bool = False
    priority: Int = 0  # lower is earlier
    cache_salt: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]+$")] | None = None
    session_id: _Affinity | None = None
    prompt_cache_key: _Affinity | None = None
    user: _Affinity | None = None
    return_token_ids: bool = False
    timings: bool = False
    # What the answer has to look like, in all spellings; read by `router.constraint`.
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None

    @property
    def affinity(self) -> str:
        """What requests that belong together have in common; empty if nothing was said."""
        return self.session_id or self.prompt_cache_key or self.user or ""


def _parse_chat(value: Any, info: ValidationInfo) -> tuple[ChatMessage, ...]:
    return parse_messages(value, _limits(info))


def _parse_tool_list(value: Any, info: ValidationInfo) -> tuple[Tool, ...]:
    return parse_tools(value, _limits(info))


class PromptFields(BaseModel):
    """How a conversation becomes a prompt: shared by chat and by `/tokenize`."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", arbitrary_types_allowed=True)

    messages: Annotated[tuple[ChatMessage, ...], PlainValidator(_parse_chat)]
    add_generation_prompt: bool | None = None  # None: true, unless the final message is continued
    continue_final_message: bool = False
    tools: Annotated[tuple[Tool, ...], PlainValidator(_parse_tool_list)] = ()
    tool_choice: Any = None  # read by `router.tools`
    parallel_tool_calls: bool = True
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, lt=_INT64)] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}


class ChatRequest(PromptFields, GenerationRequest):
    add_special_tokens: bool = False  # chat templates write the special tokens themselves
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0), _at_most("max_logprobs")] = 0


class CompletionRequest(GenerationRequest):
    prompt: Annotated[
        tuple[Prompt, ...], PlainValidator(lambda value, info: parse_prompts(value, _limits(info)))
    ]
    max_tokens: Annotated[int, Field(ge=0, lt=_INT64)] | None = None  # 0: with `echo` only
    add_special_tokens: bool = True
    logprobs: Annotated[int, Field(ge=0), _at_most("max_logprobs")] | None = None
    best_of: Annotated[int, Field(ge=1), _at_most("max_n")] | None = None


class TokenizeTextRequest(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(PromptFields):
    model: str | None = None
    add_special_tokens: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


Request = TypeVar("Request", bound=BaseModel)


def parse_json(body: bytes, max_depth: int) -> dict[str, Any]:
    """The request body as a JSON object.

    Raises:
        InvalidRequest: it is not JSON, or not an object.
    """
    try:
        raw = nested_json.loads(body, max_depth)
    except ValueError as error:
        message = f"The request body cannot be read as JSON: {error}."
        raise InvalidRequest(message, code="invalid_json") from None
    if not isinstance(raw, dict):
        raise InvalidRequest("The request body must be a JSON object.", code="invalid_json")
    return raw


def parse_request(
    schema: type[Request], raw: dict[str, Any], limits: RequestLimits
) -> tuple[Request, tuple[str, ...]]:
    """(a validated request, the names of fields that have no effect).

    Raises:
        InvalidRequest: naming the first field at fault.
    """
    kept, ignored = screen_fields(raw, field_names(schema), limits.max_fields)
    try:
        return schema.model_validate(kept, context=limits), ignored
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = _path(first["loc"])
    reason = "field required" if first["type"] == "missing" else first["msg"][:1].lower() + first["msg"][1:]
    raise InvalidRequest(f"`{path}`: {reason}.", param=path)


@lru_cache
def field_names(schema: type[BaseModel]) -> frozenset[str]:
    return frozenset(schema.model_fields)


def _path(location: Sequence[int | str]) -> str:
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
    return path
