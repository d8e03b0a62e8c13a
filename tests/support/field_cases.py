"""Request fields, each with values that are taken and values that are refused."""

from __future__ import annotations

from typing import Any

from tests.support.byte_tokenizer import VOCAB_SIZE
from tests.support.gateway import MAX_MODEL_LEN

ROUTES = ("/v1/chat/completions", "/v1/completions")
BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
}

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}

# field, values taken, values refused; on both routes
SHARED: list[tuple[str, list[Any], list[Any]]] = [
    ("temperature", [0, 1, 0.7, 2, 2.0], [-0.01, 2.01, "1", True, [1]]),
    ("top_p", [1, 1.0, 0.5, 1e-6], [0, 1.01, -1, "0.5"]),
    ("top_k", [-1, 0, 1, 50], [-2, 1.5, "5", True, 2**31]),
    ("min_p", [0, 1, 0.05], [-0.1, 1.1, "0"]),
    ("presence_penalty", [-2, 2, 0], [-2.01, 2.01, "1"]),
    ("frequency_penalty", [-2, 2, 0.5], [-2.01, 2.01, False]),
    ("repetition_penalty", [1, 1.2, 0.5], [0, -1, "1"]),
    ("seed", [0, 42, -1, 2**63 - 1, -(2**63)], [1.5, "1", True, 2**63, 2**70]),
    ("stop", ["x", [], ["a", "b"], ["s"] * 16], ["", [""], ["a", ""], [1], 5, list("abcdefghijklmnopq")]),
    ("stop_token_ids", [[], [1, 2]], [[-1], [VOCAB_SIZE], ["1"], 1, [1.5]]),
    ("include_stop_str_in_output", [True, False], [1, "true"]),
    ("ignore_eos", [True, False], [0, "no"]),
    ("min_tokens", [0, 3], [-1, 1.5, "2", 17]),
    ("skip_special_tokens", [True, False], ["x"]),
    ("spaces_between_special_tokens", [True, False], ["x"]),
    ("bad_words", [[], ["foo", "bar"]], [[""], "foo", [1]]),
    ("allowed_token_ids", [[1, 2, 3]], [[], [VOCAB_SIZE], [-1], ["1"]]),
    ("truncate_prompt_tokens", [1, 5, -1], [0, -2, MAX_MODEL_LEN + 1, 1.5]),
    ("truncation_side", ["left", "right"], ["middle", 1]),
    ("logit_bias", [{}, {"5": 1, "6": -100.0, "7": 100}], [{"5": 101}, {"5": "1"}, {"x": 1}, {"-1": 1}, [1]]),
    ("stream", [False], ["yes", 1]),
    ("stream_options", [{}, {"include_usage": True}, {"include_usage": None}], ["x", {"include_usage": 1}]),
    ("cache_salt", ["tenant-a"], ["", "a@b", "a/b", "x" * 129, 5]),
    ("return_token_ids", [True, False], ["x"]),
    ("timings", [True, False], ["x", 1]),
    ("max_tokens", [1, 16], [0, -1, 1.5, "5", True, 2**63]),
    ("max_completion_tokens", [1, 16], [0, -1, 1.5, "5", True, 2**63]),
    ("add_special_tokens", [True, False], ["x"]),
    ("n", [1, 2, 16], [0, -1, 17, 1.0, True, "1"]),
    ("prompt_logprobs", [0, 5, 20], [-1, 21, True, "1", 1.5]),
    ("echo", [False, True], ["x", 1]),
    ("priority", [0, 1, -5, 2**63 - 1], ["1", 1.5, True, 2**63]),
    ("response_format", [{"type": "text"}, {"type": "json_object"}], [{"type": "xml"}, "text", {}, 5]),
    ("response_format", [], [{"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": 5}}]),
    ("structured_outputs", [{"choice": ["a"]}, {"regex": "a+"}], [{}, "x", {"json": {}, "regex": "a"}]),
    ("structured_outputs", [{"json_object": True}], [{"colour": 1}, {"choice": []}, {"json_object": False}]),
    ("guided_json", [{"type": "object"}, '{"type": "integer"}'], [5, "{", [1]]),
    ("guided_regex", ["[0-9]+"], ["", 5, "(["]),
    ("guided_choice", [["yes", "no"]], [[], "yes", [1], [""]]),
    ("guided_grammar", ['root ::= "a" | "b"', 'start: "a"'], ["", 5, "root ::= (", "start: b"]),
    ("regex", ["a"], [5]),
    ("ebnf", ['root ::= "a"'], [5]),
    ("json_schema", [{"type": "object"}], [5]),
    ("suffix", [""], ["tail"]),
    ("prompt_embeds", [], ["x"]),
    ("use_beam_search", [False, True], [1, "true"]),
    ("length_penalty", [1, 1.0], [0.5, "1", -11, True]),  # others: with `use_beam_search`
    ("early_stopping", [False], [True, "never"]),
    ("chat_template", [], ["{{ ''.__class__ }}", 5]),
    ("logits_processors", [[]], [["x"]]),
    ("audio", [], [{"voice": "alloy"}]),
    ("functions", [[]], [[{"name": "f"}]]),
    ("function_call", ["none"], ["auto"]),
    ("stop_regex", [], ["x"]),
    # asked for in vain, but taken: the reply says so
    ("modalities", [["text"], ["audio"]], ["text"]),
    ("store", [False, True], ["x"]),
    ("service_tier", ["auto", "default", "flex"], [1]),
    ("verbosity", ["low", "medium"], [1]),
    ("prediction", [{"type": "content", "content": "x"}], ["x"]),
    ("web_search_options", [{}], [5]),
    ("moderation", [{}], [5]),
    ("kv_transfer_params", [], [{"do_remote_decode": True}, {}]),
    ("bootstrap_host", [], ["10.0.0.1"]),
    ("data_parallel_rank", [], [0]),
    ("tp_size", [], [10**9]),
    ("user", ["someone"], [5, ["someone"], {}]),
    ("metadata", [{"a": "b"}], ["x", ["a"], True]),
    ("safety_identifier", ["x"], [1]),
    ("prompt_cache_key", ["x"], [1.5, "x" * 513]),
    ("session_id", ["x"], [7]),
    ("request_id", ["x"], [7]),
    ("include_reasoning", [True, False], ["x"]),
    ("parallel_tool_calls", [True, False], ["yes", 1]),
]
CHAT_ONLY: list[tuple[str, list[Any], list[Any]]] = [
    ("logprobs", [True, False], [1, "true"]),
    ("tools", [[], [TOOL]], [[{"type": "function"}], {}, [5], [TOOL, TOOL], [{**TOOL, "type": "retrieval"}]]),
    ("tool_choice", ["none"], ["auto", "required", {"type": "function"}, 5]),
    ("reasoning_effort", ["none", "low", "medium", "high", "max"], ["lots", 5]),
    ("thinking_token_budget", [0, 100], [-1, "x"]),
    ("documents", [[], [{"title": "t", "text": "x"}]], ["x", [1]]),
    ("prompt", [], ["x"]),
    ("best_of", [1], [2, "1"]),
    ("top_logprobs", [0], [-1, 21, 10**9, VOCAB_SIZE, 1.5, 5]),  # 5: without `logprobs`
    ("add_generation_prompt", [True, False], ["x"]),
    ("continue_final_message", [False], ["x"]),
    ("chat_template_kwargs", [{}, {"enable_thinking": False}], [{"tokenize": True}, {"messages": []}, "x"]),
    ("messages", [], [[], "x", {}, 5, [5], [[]]]),
]
TEXT_ONLY: list[tuple[str, list[Any], list[Any]]] = [
    ("best_of", [1, 3], [0, 17, "1", True]),
    ("tools", [[]], [[TOOL], {}]),
    ("tool_choice", ["none"], ["auto", "required", {"type": "function"}]),
    ("messages", [], [[{"role": "user", "content": "x"}]]),
    ("reasoning_effort", [], ["low"]),
    ("logprobs", [0, 5, 20], [-1, 21, 10**9, VOCAB_SIZE - 1, True, "5", 1.5]),
    ("prompt", ["x", ["a", "b"], [1, 2], [[1], [2, 3]]], ["", [], [""], [[]], ["a", ""], 5, {}, [1, "a"]]),
    ("prompt", [[0, VOCAB_SIZE - 1]], [[VOCAB_SIZE], [-1], [1.5], [True], ["a", 1], [["a"]], [[1], "a"]]),
]
