"""The result file: vLLM's names, so that its readers work, and what theirs lacks.

1. `files.check_output` before a run: a path that cannot be written is known before the minutes are spent.
2. `build_result` turns plan, run and summary into one JSON-safe dict (no NaN, no infinity, string keys).
3. `write_result` writes it, and beside it `<stem>.requests.jsonl`: each record with its derived times. Both
   appear whole or not at all.
4. `read_result` and `read_run` give both back, for reports and comparisons.

Times are milliseconds where the key ends in `_ms`, else seconds. Latencies count from the **scheduled** time;
`*_from_send` keys count from the send.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import orjson

from bench.load.figures.latency import derive
from bench.load.figures.slo import Slo, evaluate, is_good, slos_from_ms
from bench.load.figures.summary import Summary
from bench.load.figures.validity import cpu_share, judge
from bench.load.plan import Plan
from bench.load.records import RequestRecord, RunRecord
from bench.load.results.checks import check_keys, check_requests, check_search
from bench.load.results.files import json_safe, write_or_rescue
from bench.load.results.result_keys import (
    counts_keys,
    latencies_keys,
    rates_keys,
    sent_keys,
    timeslice_row,
    trace_block,
    window_block,
)
from bench.load.results.vllm_keys import detailed_arrays, ramp_keys
from bench.load.results.workload_text import absurd_rate, workload_cautions
from cluster.errors import BatonError

SCHEMA_VERSION = 1
RUN, SEARCH = "run", "max-goodput"  # kinds of result files


def build_result(
    plan: Plan,
    run: RunRecord,
    summary: Summary,
    environment: Mapping[str, Any],
    *,
    settings: Mapping[str, Any] | None = None,
    label: str | None = None,
    save_detailed: bool = False,
) -> dict[str, Any]:
    """The result as a dict fit for JSON.

    `environment` is kept whole under its name. Read from it, where present: `backend`, `tokenizer_id`,
    `server` (version, config_hash, topology), and `num_cores` and `num_accelerators`, what the server runs
    on. `settings` is what was asked for beside the plan. `save_detailed` adds vLLM's arrays, one entry per
    request of the run in plan order.
    """
    model, backend, rate = (
        plan.shared_body.get("model"),
        environment.get("backend", "openai"),
        plan.arrival.rate,
    )
    validity, sent = judge(run, summary), sent_keys(run, summary, plan.arrival)
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": RUN,
        "date": datetime.fromtimestamp(run.start_unix_s, UTC).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai-chat" if "chat" in plan.endpoint else "openai",
        "endpoint": plan.endpoint,
        "backend": backend,
        "label": label,
        "model_id": model,
        "tokenizer_id": environment.get("tokenizer_id", model),
        "valid": validity.valid,
        "invalid_reasons": list(validity.invalid_reasons),
        "cautions": [*validity.cautions, *workload_cautions(plan.workload), *absurd_rate(plan, sent)],
        "is_complete": run.is_complete,
        "notes": run.notes,
        "server_gone": run.server_gone,
        **sent,
        "request_rate": "inf" if rate is None or math.isinf(rate) else rate,
        "burstiness": plan.arrival.burstiness,
        "max_concurrency": plan.arrival.closed_loop,
        **ramp_keys(plan.arrival, run.start_unix_s),
        "arrival": msgspec.to_builtins(plan.arrival),
        "settings": dict(settings or {}),
        "workload": plan.workload,
        "trace": trace_block(plan),
        "window": window_block(run, summary),
        **counts_keys(summary),
        **rates_keys(summary, environment),
        **latencies_keys(summary),
        "client_cpu_pct": max((100 * (cpu_share(client) or 0.0) for client in run.clients), default=None),
        "clients": msgspec.to_builtins(run.clients),
        "start_unix_s": run.start_unix_s,
        "wall_s": run.wall_s,
        "timeslices": [timeslice_row(one) for one in summary.timeslices],
        "server": environment.get("server"),
        "environment": dict(environment),
    }
    if save_detailed:
        result |= detailed_arrays(run)
    safe: dict[str, Any] = json_safe(result)
    return safe


def write_result(path: Path, result: Mapping[str, Any], run: RunRecord | None = None) -> None:
    """Write the result, and the requests beside it when `run` is given (first, so that a result implies
    them).

    Raises:
        BatonError: the path cannot be written; says where the files are instead.
    """
    text = [orjson.dumps(json_safe(result), option=orjson.OPT_INDENT_2), b"\n"]
    requests = [] if run is None else [(requests_path(path), lambda: _request_lines(result, run))]
    write_or_rescue([*requests, (path, lambda: text)])


def requests_path(path: Path) -> Path:
    """`result.json` -> `result.requests.jsonl`."""
    return path.with_name(f"{path.stem}.requests.jsonl")


def read_result(path: Path) -> dict[str, Any]:
    """The result file of one run, checked to be one of ours.

    Raises:
        BatonError: as `read_any`, of a search, or not whole.
    """
    result = read_any(path)
    if result.get("kind", RUN) != RUN:
        raise BatonError(
            f"`{path}` is the result of a {result['kind']} search, not of one run: give files of `run` or "
            "`sweep`"
        )
    check_keys(path, result)
    return result


def read_search(path: Path) -> dict[str, Any]:
    """The result file of a max-goodput search.

    Raises:
        BatonError: as `read_any`, or it is not whole.
    """
    found = read_any(path)
    check_search(path, found)
    return found


def read_any(path: Path) -> dict[str, Any]:
    """A result file of any kind: its `kind` is `RUN` (or missing, in older files) or `SEARCH`.

    Raises:
        BatonError: missing or unreadable, not JSON, not a result, or of another kind or schema version.
    """
    try:
        result = orjson.loads(path.read_bytes())
    except OSError as error:
        raise BatonError(f"Cannot read result `{path}`: {error.strerror or error}") from error
    except orjson.JSONDecodeError as error:
        raise BatonError(
            f"Result `{path}` is not JSON ({error}); give a file written by `baton bench`"
        ) from error
    version = result.get("schema_version") if isinstance(result, dict) else None
    if version is None:
        raise BatonError(f"`{path}` is not a result of `baton bench`: it has no schema_version")
    if version != SCHEMA_VERSION:
        raise BatonError(
            f"Result `{path}` has schema_version {version}, this program reads {SCHEMA_VERSION}; "
            "measure again"
        )
    if (kind := result.get("kind", RUN)) not in (RUN, SEARCH):
        raise BatonError(
            f"Result `{path}` is of the kind {kind!r}; give files of `run`, `sweep` or `max-goodput`"
        )
    read: dict[str, Any] = result
    return read


def read_run(path: Path) -> RunRecord | None:
    """The records beside the result file at `path`; None if they were not written.

    Raises:
        BatonError: as `read_result`; or a line of the requests file is not a record (names the line), or the
            requests are of another run.
    """
    result, beside = read_result(path), requests_path(path)
    if not beside.exists():
        return None
    records: list[RequestRecord] = []
    decoder = msgspec.json.Decoder(RequestRecord)
    try:
        with beside.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    records.append(decoder.decode(line))
                except msgspec.MsgspecError as error:
                    raise BatonError(f"`{beside}` line {number} is not a request record: {error}") from error
    except OSError as error:
        raise BatonError(f"Cannot read requests `{beside}`: {error.strerror or error}") from error
    try:
        run = msgspec.convert({**result, "records": []}, RunRecord)
    except msgspec.ValidationError as error:
        raise BatonError(f"Result `{path}` does not describe its run: {error}") from error
    run.records = records
    check_requests(beside, path, result, run)
    return run


def _request_lines(result: Mapping[str, Any], run: RunRecord) -> Iterator[bytes]:
    slos = slos_from_ms(result["slos_ms"])
    window = result["window"]
    for record in run.records:
        yield orjson.dumps(json_safe(_request_row(record, slos, window))) + b"\n"


def _request_row(record: RequestRecord, slos: tuple[Slo, ...], window: Mapping[str, Any]) -> dict[str, Any]:
    latency = derive(record)
    met = evaluate(slos, record.status, latency)
    has_place = window["num_offered"] > 0 and window["start_s"] <= record.scheduled_s <= window["end_s"]
    is_inside = window["is_whole_run"] or has_place
    return {
        **msgspec.to_builtins(record),
        **({} if record.session is None else {"turn": record.turn}),  # the first one too, which is 0
        **msgspec.to_builtins(latency),
        "good": is_good(record.status, met) if slos else None,
        "met": {slo.metric.value: one for slo, one in zip(slos, met, strict=True)},
        "in_window": is_inside,
    }
