"""Clients that people build on, each where it is installed (the extra `clients`): what they send is taken,
what they read is there. Everything stays on this machine."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from tests.support.gateway import MODEL, RunningGateway
from tests.support.scripted_cluster import Script
from tests.support.tools import ADD, CALL

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]


class Point(BaseModel):
    """A place with a name."""

    x: int
    label: str


POINT = b'{"x": 3, "label": "here"}'


# ---- LangChain -----------------------------------------------------------------------------------


@pytest.fixture
def langchain(gateway: RunningGateway) -> Any:
    module = pytest.importorskip("langchain_openai")
    return module.ChatOpenAI(
        model=MODEL, base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, stream_usage=True
    )


def test_langchain_answers_and_streams(gateway: RunningGateway, langchain: Any) -> None:
    gateway.cluster.script = Script(b"Hello")
    answer = langchain.invoke([("system", "Be brief."), ("human", "Hi")])
    assert answer.content == "Hello"
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata["output_tokens"] == 6
    assert answer.usage_metadata["input_token_details"]["cache_read"] == 2
    chunks = list(langchain.stream("Hi"))
    assert "".join(chunk.content for chunk in chunks) == "Hello"
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) == 6


def test_langchain_calls_tools(gateway: RunningGateway, langchain: Any) -> None:
    gateway.cluster.script = Script(CALL.encode())
    bound = langchain.bind_tools([ADD], tool_choice="required")
    answer = bound.invoke("What is 1 + 2?")
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("add", {"a": 1, "b": 2})]
    whole = None
    for chunk in bound.stream("What is 1 + 2?"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("add", {"a": 1, "b": 2})]


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_langchain_structures_answers(gateway: RunningGateway, langchain: Any, method: str) -> None:
    gateway.cluster.script = Script(POINT)
    assert langchain.with_structured_output(Point, method=method).invoke("Where, as JSON?") == Point(
        x=3, label="here"
    )
    assert gateway.cluster.streams[-1].spec.sampling.grammar


# ---- LiteLLM -------------------------------------------------------------------------------------


@pytest.fixture
def litellm(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network
    module = pytest.importorskip("litellm")
    module.telemetry = False

    def complete(**fields: Any) -> Any:
        return module.completion(
            model=f"hosted_vllm/{MODEL}",
            api_base=f"{gateway.url}/v1",
            api_key="none",
            messages=[{"role": "user", "content": "Hi"}],
            num_retries=0,
            **fields,
        )

    return complete


def test_litellm_answers_and_streams(gateway: RunningGateway, litellm: Any) -> None:
    gateway.cluster.script = Script(b"Hello")
    answer = litellm(temperature=0.5, extra_body={"top_k": 5})
    assert answer.choices[0].message.content == "Hello"
    assert answer.usage.completion_tokens == 6
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert gateway.cluster.streams[-1].spec.sampling.top_k == 5
    parts = list(litellm(stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == "Hello"


def test_litellm_calls_tools(gateway: RunningGateway, litellm: Any) -> None:
    gateway.cluster.script = Script(CALL.encode())
    answer = litellm(tools=[ADD], tool_choice="auto")
    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1, "b": 2}')
    assert answer.choices[0].finish_reason == "tool_calls"


# ---- LlamaIndex ----------------------------------------------------------------------------------


@pytest.fixture
def llama_index(gateway: RunningGateway) -> Any:
    module = pytest.importorskip("llama_index.llms.openai_like")
    return module.OpenAILike(
        model=MODEL,
        api_base=f"{gateway.url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=2048,
        max_retries=0,
    )


def test_llama_index_answers_and_streams(gateway: RunningGateway, llama_index: Any) -> None:
    gateway.cluster.script = Script(b"Hello")
    assert str(llama_index.complete("Hi")) == "Hello"
    assert [part.text for part in llama_index.stream_complete("Hi")][-1] == "Hello"
