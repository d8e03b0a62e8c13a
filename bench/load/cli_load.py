"""The options that every measuring command shares, as given on the command line, and their help."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from bench.load.cli_options import option
from bench.load.plans.settings import Endpoint, Oversize, PromptForm

DEFAULT_INPUT, DEFAULT_OUTPUT = "256", "128"
SERVER, REQUESTS, ARRIVALS = "Server", "Requests", "Arrivals"
MEASURING, OUTPUT = "Measuring", "Output"


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Command-line options, as given; None means not given."""

    url: str = option("http://127.0.0.1:8000", "OpenAI-compatible server, with or without /v1", SERVER)
    model: str | None = option(None, "model to ask for (default: the first one served)", SERVER)
    endpoint: Endpoint = option(Endpoint.COMPLETIONS, "which API carries the requests", SERVER)
    api_key_env: str = option("OPENAI_API_KEY", "environment variable with the API key, if any", SERVER)
    backend: str = option("openai", "name of the server software, for the result file", SERVER)

    input_tokens: str | None = option(
        None,
        f"prompt length: 256, uniform:100-500, lognormal:mean=1155,sigma=1; with --prefix-groups what "
        f"follows the prefix, in chats the user's message of each turn (default: {DEFAULT_INPUT})",
        REQUESTS,
    )
    output_tokens: str | None = option(
        None, f"answer length, same forms (default: {DEFAULT_OUTPUT})", REQUESTS
    )
    prefix_groups: int | None = option(None, "prompts share the prefix of one of this many groups", REQUESTS)
    prefix_tokens: int = option(512, "length of a shared prefix, before --input-tokens", REQUESTS)
    prefix_skew: float = option(0.0, "Zipf exponent of the groups' popularity; 0: all alike", REQUESTS)
    turns: str | None = option(
        None,
        "multi-turn chats with this many requests each (any length form); --rate is then chats per second",
        REQUESTS,
    )
    think: str = option("0", "time between an answer and the next turn, such as 2s", REQUESTS)
    random_think: bool = option(False, "draw think times from an exponential distribution", REQUESTS)
    system_tokens: int = option(0, "length of the system message that all chats share", REQUESTS)
    trace: Path | None = option(
        None,
        "trace file: Azure CSV, BurstGPT CSV (times in seconds), Mooncake JSONL or canonical JSONL of "
        "timestamp, input_length, output_length (timestamp in milliseconds)",
        REQUESTS,
    )
    trace_format: str | None = option(
        None, "azure, mooncake, burstgpt or canonical (default: detected)", REQUESTS
    )
    trace_offset: str = option("0", "begin this far into the trace", REQUESTS)
    speed_up: float = option(1.0, "divide the trace's times by this", REQUESTS)
    scale_lengths: float = option(1.0, "divide the trace's lengths by this", REQUESTS)
    sharegpt: Path | None = option(None, "JSON file of conversations; prompts are their text", REQUESTS)
    prompt: PromptForm | None = option(
        None,
        "prompts as token ids or as text of exact length (default: ids; text for chats and --sharegpt)",
        REQUESTS,
    )
    ids: str = option("1000-30000", "range of the token ids of `ids` prompts", REQUESTS)
    max_model_len: int | None = option(None, "context length (default: what the server says)", REQUESTS)
    oversize: Oversize = option(
        Oversize.SKIP, "requests that exceed the context: leave out or shorten", REQUESTS
    )
    allow_stop: bool = option(False, "let the model end answers early (no ignore_eos)", REQUESTS)
    temperature: float = option(0.0, "sampling temperature", REQUESTS)
    extra_body: str | None = option(
        None,
        'JSON object to add to every request; a Baton server is asked for {"timings": true} by default',
        REQUESTS,
    )

    rate: float | None = option(
        None,
        "mean requests (chats, with --turns) per second; a trace keeps its rhythm (default: a trace's own)",
        ARRIVALS,
    )
    arrival: str | None = option(
        None,
        "poisson, constant, gamma:B, ramp:1-20@60, piecewise:5@30,20@10, burst, trace (default: poisson, or "
        "trace with --trace)",
        ARRIVALS,
    )
    burstiness: float | None = option(None, "short for --arrival gamma:B; 1 is Poisson", ARRIVALS)
    closed_loop: int | None = option(None, "instead: keep this many requests in flight", ARRIVALS)
    requests: int | None = option(
        None,
        "how many requests (or chats) to offer (default: no limit; --duration or the end of a trace is one)",
        ARRIVALS,
    )
    duration: str | None = option(
        None, "for how long to offer, such as 60s or 5m (default: no limit; max-goodput: 60s)", ARRIVALS
    )
    seed: int = option(0, "decides arrivals, lengths and tokens", ARRIVALS)
    salt: int | None = option(
        None,
        "changes the tokens only; a new one each run, so no run finds its prompts cached (default: the time)",
        ARRIVALS,
    )

    slo: str | None = option(
        None, "bounds such as ttft=200ms,tpot=50ms,gap=150ms,itl=60ms,e2e=5s; a plain number is ms", MEASURING
    )
    warmup: str | None = option(
        None,
        "leave out requests scheduled in the first so many seconds (default: 0; max-goodput: a sixth)",
        MEASURING,
    )
    cooldown: str | None = option(
        None, "leave out requests scheduled in the last so many seconds (default: 0)", MEASURING
    )
    steady: bool = option(False, "measure an automatic steady window instead", MEASURING)
    timeout: str | None = option(
        None,
        "longest life of one request (default: 10m; max-goodput with an e2e SLO: twice that, plus 5 s)",
        MEASURING,
    )
    processes: int = option(1, "client processes", MEASURING)
    percentiles: str = option("50,90,95,99", "percentiles to report", MEASURING)
    strict: bool = option(False, "exit with 6 if too few requests met the SLOs", MEASURING)

    out: Path | None = option(None, "result file (JSON); requests go to OUT.requests.jsonl beside it", OUTPUT)
    report: Path | None = option(None, "write an HTML report here", OUTPUT)
    label: str | None = option(None, "name of this run in reports and comparisons", OUTPUT)
    save_detailed: bool = option(False, "keep per-request arrays in the result file too", OUTPUT)
    keep_text: bool = option(False, "keep generated texts in the requests file", OUTPUT)
    accelerators: int = option(0, "accelerators of the server, for goodput per accelerator", OUTPUT)
    cores: int | None = option(None, "cores of the server, for figures per core", OUTPUT)


def is_given(given: LoadOptions, name: str) -> bool:
    """Whether an option has another value than its default."""
    return any(getattr(given, field.name) != field.default for field in fields(given) if field.name == name)
