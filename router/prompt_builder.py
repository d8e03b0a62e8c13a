"""What a request says as token ids: a conversation rendered by a chat template, or text; tokenized once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster.errors import InvalidRequest
from cluster.tokenizer import TEMPLATE_KWARGS, Tokenizer
from router.limits import RequestLimits
from router.schema import GenerationRequest, PromptFields
from router.tool_formats import knows_tools, with_instructions
from router.tools import ToolPlan, parse_tool_choice


@dataclass(frozen=True, slots=True)
class PromptBuilder:
    """`max_model_len`: see `router.job.JobBuilder`."""

    tokenizer: Tokenizer
    limits: RequestLimits
    max_model_len: int

    def encode(self, text: str, where: str, add_special_tokens: bool) -> tuple[int, ...]:
        try:
            return tuple(self.tokenizer.encode(text, add_special_tokens))
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=where) from error

    def render(
        self, request: PromptFields, add_special_tokens: bool, plan: ToolPlan | None
    ) -> tuple[int, ...]:
        """Ids of a conversation. A template that knows no tools is helped out, if there are any.

        Raises:
            InvalidRequest: the template and the messages, or its options, do not fit.
        """
        template = self._template(request)
        kwargs = _template_kwargs(request)
        messages = [message.for_template() for message in request.messages]
        if knows_tools(template):
            if plan is not None:
                kwargs["tools"] = [tool.for_template() for tool in plan.shown]
        elif plan is not None or any(m.tool_calls or m.role == "tool" for m in request.messages):
            messages = with_instructions(request.messages, plan)
        continued = request.continue_final_message
        header = request.add_generation_prompt
        text = self.tokenizer.render_chat_text(
            messages,
            add_generation_prompt=not continued if header is None else header,
            continue_final_message=continued,
            documents=request.documents,
            chat_template=request.chat_template,
            **kwargs,
        )
        return self.encode(text, "messages", add_special_tokens)

    def truncate(self, prompt: tuple[int, ...], request: GenerationRequest) -> tuple[int, ...]:
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

    def _template(self, request: PromptFields) -> str | None:
        if request.chat_template is None:
            return self.tokenizer.chat_template
        if not self.limits.trust_chat_template:
            raise InvalidRequest(
                "`chat_template` is not supported: the model's own chat template is used.",
                param="chat_template",
                code="unsupported_parameter",
            )
        return request.chat_template


def plan_tools(request: PromptFields) -> ToolPlan | None:
    """What the request wants of its tools.

    Raises:
        InvalidRequest: no such choice, or no such tool.
    """
    return parse_tool_choice(request.tool_choice, request.tools, request.parallel_tool_calls)


def _template_kwargs(request: PromptFields) -> dict[str, Any]:
    for name in request.chat_template_kwargs:
        if name not in TEMPLATE_KWARGS:
            raise InvalidRequest(
                f"`chat_template_kwargs` may hold: {', '.join(sorted(TEMPLATE_KWARGS))}.",
                param=f"chat_template_kwargs.{name[:64]}",
            )
    kwargs: dict[str, Any] = {}
    if request.reasoning_effort is not None:
        kwargs["reasoning_effort"] = request.reasoning_effort
    if request.thinking_token_budget is not None:
        kwargs["thinking_budget"] = request.thinking_token_budget
    return kwargs | request.chat_template_kwargs
