"""The `openai` package against the gateway: what it sends is taken, and what comes back fits its types."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from pydantic import BaseModel

from cluster.errors import InternalError, NotReady, Overloaded
from tests.support.gateway import MODEL, RunningGateway
from tests.support.plain_http import plain_client
from tests.support.scripted_cluster import Script
from tests.support.tools import ADD, CALL, LOOK_UP

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_several_choices(gateway: RunningGateway, client: openai.OpenAI) -> None:
    gateway.cluster.script = lambda spec: Script(f"answer {spec.request[-1]}".encode())
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=3, temperature=1, seed=7)
    texts = ["answer 0", "answer 1", "answer 2"]
    assert [choice.message.content for choice in whole.choices] == texts
    streamed = ["", "", ""]
    with client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=3, stream=True, stream_options={"include_usage": True}
    ) as chunks:
        for chunk in chunks:
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
            usage = chunk.usage
    assert streamed == texts
    assert whole.usage is not None
    assert usage is not None
    assert usage.total_tokens == whole.usage.total_tokens


def test_tools(gateway: RunningGateway, client: openai.OpenAI) -> None:
    gateway.cluster.script = Script(f"I add.\n{CALL}".encode())
    tools: Any = [ADD, LOOK_UP]
    fields: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": tools, "max_tokens": 200}
    whole = client.chat.completions.create(**fields)
    [choice] = whole.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I add."
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1, "b": 2}')

    state = ChatCompletionStreamState()  # the package's own accumulator
    for chunk in client.chat.completions.create(**fields, stream=True):
        state.handle_chunk(chunk)
    final = state.get_final_completion()
    [streamed] = final.choices[0].message.tool_calls or []
    assert (streamed.function.name, streamed.function.arguments) == ("add", '{"a": 1, "b": 2}')
    assert final.choices[0].message.content == "I add."
    assert final.choices[0].finish_reason == "tool_calls"

    answer = choice.message.model_dump(exclude_none=True)
    gateway.cluster.script = Script(b"3")
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    turn: Any = [*MESSAGES, answer, result]
    again = client.chat.completions.create(model=MODEL, messages=turn, tools=tools)
    assert again.choices[0].message.content == "3"


class Point(BaseModel):
    x: int
    label: str


def test_structured_answers(gateway: RunningGateway, client: openai.OpenAI) -> None:
    gateway.cluster.script = Script(b'{"x": 3, "label": "here"}')
    parsed = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Point)
    assert parsed.choices[0].message.parsed == Point(x=3, label="here")
    assert '"label"' in gateway.cluster.streams[-1].spec.sampling.grammar
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=Point) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Point(x=3, label="here")
    client.chat.completions.create(
        model=MODEL, messages=MESSAGES, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "strin"}},
            },
        )
    assert bad.value.param == "response_format.json_schema.schema"


def test_tools_as_the_package_makes_them(gateway: RunningGateway, client: openai.OpenAI) -> None:
    gateway.cluster.script = Script(
        b'<tool_call>\n{"name": "Point", "arguments": {"x": 1, "label": "a"}}\n</tool_call>'
    )
    parsed = client.chat.completions.parse(
        model=MODEL,
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Point)],
        tool_choice="required",
        max_tokens=200,
    )
    [call] = parsed.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == Point(x=1, label="a")


def test_logprobs(gateway: RunningGateway, client: openai.OpenAI) -> None:
    gateway.cluster.script = Script("né".encode())
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2)
    entries = (chat.choices[0].logprobs.content or []) if chat.choices[0].logprobs else []
    assert b"".join(bytes(entry.bytes or []) for entry in entries) == "né".encode()
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    text = client.completions.create(model=MODEL, prompt="ab", logprobs=1, echo=True, max_tokens=5)
    logprobs = text.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.tokens[:2] == ["a", "b"]
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None


def test_text_of_several_prompts(gateway: RunningGateway, client: openai.OpenAI) -> None:
    gateway.cluster.script = lambda spec: Script(bytes(spec.token_ids).upper())
    whole = client.completions.create(model=MODEL, prompt=["ab", "cd"], n=2, best_of=3)
    assert [choice.text for choice in whole.choices] == ["AB", "AB", "CD", "CD"]
    texts = ["", ""]
    for chunk in client.completions.create(model=MODEL, prompt=["ab", "cd"], stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["AB", "CD"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Overloaded("No.", retry_after_s=0.01), openai.InternalServerError),
        (NotReady("Not yet.", retry_after_s=0.01), openai.InternalServerError),
        (InternalError("x"), openai.InternalServerError),
    ],
)
def test_errors_and_retries(
    gateway: RunningGateway, error: Exception, kind: type[openai.APIStatusError]
) -> None:
    gateway.cluster.refuse = error
    seen: list[httpx.Response] = []
    with (
        plain_client(event_hooks={"response": [seen.append]}) as http,
        openai.OpenAI(
            base_url=f"{gateway.url}/v1", api_key="none", max_retries=2, http_client=http
        ) as client,
        pytest.raises(kind) as raised,
    ):
        client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert len(seen) == 3
    assert raised.value.request_id == seen[-1].headers["x-request-id"]
    assert raised.value.type in ("overloaded_error", "server_error")


def test_a_retry_that_succeeds(gateway: RunningGateway) -> None:
    started = time.monotonic()
    attempts: list[httpx.Response] = []

    def note(response: httpx.Response) -> None:
        attempts.append(response)
        gateway.cluster.refuse = None

    gateway.cluster.refuse = Overloaded("No.", retry_after_s=0.3)
    with (
        plain_client(event_hooks={"response": [note]}) as http,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", http_client=http) as client,
    ):
        assert client.chat.completions.create(model=MODEL, messages=MESSAGES).choices
    assert [response.status_code for response in attempts] == [503, 200]
    assert attempts[0].headers["retry-after-ms"] == "300"
    assert time.monotonic() - started >= 0.3


def test_raw_headers(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, store=True, extra_headers={"x-request-id": "mine"}
    )
    assert raw.headers["x-request-id"] == "mine"
    assert int(raw.headers["openai-processing-ms"]) >= 0
    assert raw.headers["x-baton-ignored"] == "store"
    assert raw.parse().choices


async def test_many_streams_at_once(gateway: RunningGateway) -> None:
    gateway.cluster.script = Script(CALL.encode(), delay_s=0.001)
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:

        async def one(index: int) -> str:
            stream = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, tools=[ADD], stream=True, max_tokens=200, n=1 + index % 2
            )
            arguments = ""
            async for chunk in stream:
                for choice in chunk.choices:
                    for call in choice.delta.tool_calls or []:
                        if choice.index == 0 and call.function is not None:
                            arguments += call.function.arguments or ""
            return arguments

        assert await asyncio.gather(*map(one, range(12))) == ['{"a": 1, "b": 2}'] * 12
