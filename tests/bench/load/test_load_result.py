import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from bench.load.figures.metrics import summarize
from bench.load.figures.slo import parse_slos
from bench.load.figures.window import Window
from bench.load.plan import Arrival, TraceSource
from bench.load.records import RunRecord, Status
from bench.load.results.files import check_output, check_output_with_text, json_safe, write_atomically
from bench.load.results.result import (
    SCHEMA_VERSION,
    build_result,
    read_result,
    read_run,
    requests_path,
    write_result,
)
from cluster.errors import BatonError, ConfigError
from tests.bench.load.load_values import answer, plan_of, run_of, skipped, steady_run

ENVIRONMENT = {
    "backend": "baton",
    "num_cores": 4,
    "num_accelerators": 2,
    "server": {"version": "1", "config_hash": "abc", "topology": "1P1D"},
}

# What readers of vLLM's result files look for.
VLLM_KEYS = [
    *[
        "date",
        "endpoint_type",
        "backend",
        "label",
        "model_id",
        "tokenizer_id",
        "num_prompts",
        "request_rate",
        "burstiness",
    ],
    *["max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens"],
    *["request_throughput", "request_goodput", "output_throughput", "total_token_throughput"],
    *["max_output_tokens_per_s", "max_concurrent_requests"],
    *(
        f"{prefix}_{name}_ms"
        for prefix in ("mean", "median", "std", "p99")
        for name in ["ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue"]
    ),
]
OWN_KEYS = [
    *[
        "schema_version",
        "slos_ms",
        "slo_attainment",
        "slo_attainment_by_metric",
        "token_goodput",
        "goodput_per_gpu",
    ],
    *[
        "send_lag_ms",
        "client_cpu_pct",
        "valid",
        "invalid_reasons",
        "arrival",
        "trace",
        "server",
        "timeslices",
        "environment",
    ],
    *[
        "window",
        "failures",
        "error_counts",
        "per_core",
        "notes",
        "cautions",
        "is_complete",
        "num_samples",
        "workload",
    ],
]
DETAILS = [
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "latencies",
    "start_times",
    "queue_times",
    "generated_texts",
    "errors",
]


def result_of(run: RunRecord, slos: str = "ttft=200ms,tpot=50ms", **kwargs: Any) -> dict[str, Any]:
    plan = plan_of(run, kwargs.pop("arrival", None))
    window = kwargs.pop("window", Window())
    summary = summarize(run, parse_slos(slos) if slos else (), window)
    return build_result(plan, run, summary, kwargs.pop("environment", ENVIRONMENT), **kwargs)


def mixed_run() -> RunRecord:
    return run_of(
        [
            answer(0.0, [0.125, 0.15625]),
            answer(0.5, [1.0, 1.5], lag_s=0.25),
            answer(1.0, [], status=Status.REFUSED, http_status=503, error="HTTP 503: busy", end_s=1.25),
            answer(1.5, [], status=Status.REFUSED, http_status=503, error="HTTP 503: busy", end_s=1.75),
            skipped(2.0),
        ]
    )


def test_all_keys_are_there() -> None:
    result = result_of(steady_run())
    assert [key for key in [*VLLM_KEYS, *OWN_KEYS] if key not in result] == []
    assert [key for key in DETAILS if key in result] == []


def test_values_in_the_file_are_those_of_the_summary() -> None:
    result = result_of(steady_run(num=100, rate=10.0, ttft_s=0.1, tpot_s=0.02), label="A")
    assert result["label"] == "A"
    assert result["mean_ttft_ms"] == pytest.approx(100.0)
    assert result["p99_tpot_ms"] == pytest.approx(20.0)
    assert result["median_gap_ms"] == pytest.approx(20.0)
    assert result["median_e2el_ms"] == pytest.approx(280.0)
    assert result["duration"] == pytest.approx(9.9 + 0.28)
    assert result["output_throughput"] == pytest.approx(1000 / result["duration"])
    assert result["per_core"]["output_throughput"] == pytest.approx(result["output_throughput"] / 4)
    assert result["goodput_per_gpu"] == pytest.approx(100 / result["duration"] / 2)
    assert result["slos_ms"] == {"ttft": 200, "tpot": 50}
    assert result["slo_attainment"] == 1.0
    assert result["num_samples"]["ttft"] == 100
    assert result["num_samples"]["itl"] == 900
    assert result["client_cpu_pct"] == pytest.approx(10.0)
    assert result["valid"] is True


def test_failures_and_attainment_over_all_offered() -> None:
    result = result_of(mixed_run())
    assert (result["num_prompts"], result["completed"], result["failed"]) == (5, 2, 3)
    assert result["failures"] == {"refused": 2, "skipped": 1}
    assert result["error_counts"][0] == {
        "status": "refused",
        "http_status": 503,
        "error": "HTTP 503: busy",
        "count": 2,
    }
    assert result["slo_attainment"] == 1 / 5
    assert result["slo_attainment_by_metric"] == {"ttft": 1 / 5, "tpot": 1 / 5}
    assert result["valid"] is False
    assert result["send_lag_ms"]["p99"] == pytest.approx(242.5)
    assert result["send_lag_ms"]["num"] == 4
    assert result["send_lag_ms"]["limit"] == pytest.approx(10.0)


def test_without_slos() -> None:
    result = result_of(steady_run(), slos="")
    for key in ("slo_attainment", "request_goodput", "token_goodput", "goodput_per_gpu"):
        assert result[key] is None
    assert result["slos_ms"] == result["slo_attainment_by_metric"] == {}


def test_an_environment_that_says_nothing() -> None:
    result = result_of(steady_run(), environment={})
    assert result["backend"] == "openai"
    assert result["tokenizer_id"] == result["model_id"] == "m"
    assert result["goodput_per_gpu"] is None
    assert set(result["per_core"].values()) == {None}
    assert result_of(steady_run(), environment={"num_accelerators": 0})["goodput_per_gpu"] is None


@pytest.mark.parametrize(
    ("arrival", "rate", "max_concurrency"),
    [
        (Arrival(kind="poisson", seed=1, rate=2.5), 2.5, None),
        (Arrival(kind="burst", seed=1), "inf", None),
        (Arrival(kind="burst", seed=1, rate=math.inf), "inf", None),
        (Arrival(kind="closed-loop", seed=1, closed_loop=8), "inf", 8),
    ],
)
def test_request_rate_as_vllm_says_it(arrival: Arrival, rate: object, max_concurrency: int | None) -> None:
    result = result_of(steady_run(), arrival=arrival)
    assert result["request_rate"] == rate
    assert result["max_concurrency"] == max_concurrency
    assert result["arrival"]["kind"] == arrival.kind


@pytest.mark.parametrize(
    ("shape", "start_rate", "end_rate", "events"),
    [
        ("linear", 1.0, 3.0, [(1, 0.0), (2, 5.0), (3, 10.0)]),
        ("linear", 2.5, 0.5, [(2, 2.5), (1, 7.5)]),
        ("exponential", 1.0, 4.0, [(1, 0.0), (2, 5.0), (3, 10 * math.log(3) / math.log(4)), (4, 10.0)]),
        ("linear", 2.0, 2.0, [(2, 0.0)]),
    ],
)
def test_ramps_as_vllm_says_them(
    shape: str, start_rate: float, end_rate: float, events: list[tuple[int, float]]
) -> None:
    details = {"shape": shape, "start_rate": start_rate, "end_rate": end_rate, "over_s": 10.0}
    result = result_of(steady_run(), arrival=Arrival(kind="ramp", seed=1, details=details))
    assert result["ramp_up_strategy"] == shape
    assert (result["ramp_up_start_rps"], result["ramp_up_end_rps"]) == (start_rate, end_rate)
    assert [event["rps"] for event in result["rps_change_events"]] == [rate for rate, _ in events]
    assert all("T" in event["timestamp"] for event in result["rps_change_events"])


def test_trace_and_window_are_told() -> None:
    run = steady_run()
    plan = msgspec.structs.replace(
        plan_of(run),
        trace=TraceSource(
            path="t.csv", sha256="ff", format="azure", speed_up=2.0, num_rows=5, num_rows_skipped=2
        ),
    )
    result = build_result(plan, run, summarize(run, (), Window(warmup_s=2.0)), {})
    trace = {"path": "t.csv", "sha256": "ff", "format": "azure", "speedup": 2.0, "num_rows": 5}
    trace["num_rows_skipped"] = 2
    assert result["trace"] == trace
    assert result["window"]["start_s"] == 2.0
    assert result["window"]["num_run_offered"] == 100
    assert result["window"]["excluded_by_status"] == {"ok": 20}
    assert "warm-up" in result["window"]["rule"]


def test_detailed_arrays_line_up() -> None:
    result = result_of(mixed_run(), save_detailed=True)
    assert all(len(result[key]) == 5 for key in DETAILS)
    assert result["ttfts"] == [0.125, 0.5, 0.0, 0.0, 0.0]
    assert result["itls"] == [[0.03125], [0.5], [], [], []]
    assert result["queue_times"] == [0.0, 0.25, 0.0, 0.0, 0.0]
    assert result["errors"] == ["", "", "HTTP 503: busy", "HTTP 503: busy", "An earlier turn failed."]
    firsts = [
        start + ttft for start, ttft in zip(result["start_times"][:2], result["ttfts"][:2], strict=True)
    ]
    assert firsts == [0.125, 1.0]


def test_written_and_read_back(tmp_path: Path) -> None:
    run = mixed_run()
    run.notes = ["Client process 0 died."]
    result = result_of(run)
    path = tmp_path / "new" / "dir" / "result.json"
    write_result(path, result, run)
    assert read_result(path) == result
    assert json.loads(path.read_text()) == result
    again = read_run(path)
    assert again == run
    assert sorted(file.name for file in path.parent.iterdir()) == ["result.json", "result.requests.jsonl"]


def test_request_lines(tmp_path: Path) -> None:
    run = mixed_run()
    path = tmp_path / "r.json"
    write_result(path, result_of(run, window=Window(warmup_s=0.25)), run)
    rows = [orjson.loads(line) for line in requests_path(path).read_bytes().splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["status"] for row in rows] == ["ok", "ok", "refused", "refused", "skipped"]
    assert [row["good"] for row in rows] == [True, False, False, False, False]
    assert [row["in_window"] for row in rows] == [False, True, True, True, False]
    assert rows[0]["ttft_s"] == 0.125
    assert rows[0]["met"] == {"ttft": True, "tpot": True}
    assert rows[0]["tpot_s"] == rows[0]["gap_s"] == 0.03125
    assert rows[1]["met"] == {"ttft": False, "tpot": False}
    assert (rows[1]["ttft_s"], rows[1]["ttft_from_send_s"], rows[1]["send_lag_s"]) == (0.5, 0.25, 0.25)
    assert rows[4]["ttft_s"] is None


def test_the_first_turn_of_a_chat_says_that_it_is_one(tmp_path: Path) -> None:
    run = run_of([answer(0.0, [0.1]), answer(1.0, [1.1])])
    run.records[0].session = 0
    path = tmp_path / "r.json"
    write_result(path, result_of(run), run)
    rows = [orjson.loads(line) for line in requests_path(path).read_bytes().splitlines()]
    assert rows[0]["turn"] == 0
    assert "turn" not in rows[1]
    assert read_run(path) == run


def test_no_requests_file_without_records(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_result(path, result_of(steady_run()))
    assert not requests_path(path).exists()
    assert read_run(path) is None


@pytest.mark.parametrize("text", ["caf\udce9", "\ud83d", "\udcff\udcfe", "é \udcff", "plain", "é", "😀"])
def test_what_is_no_text_is_written_all_the_same(text: str) -> None:
    """Arguments of a command line may be any bytes."""
    safe = json_safe({"command": text, text: [text]})
    back = orjson.loads(orjson.dumps(safe))
    lost = any(0xD800 <= ord(character) < 0xE000 for character in text)
    assert back["command"] == "".join("�" if 0xD800 <= ord(one) < 0xE000 else one for one in text)
    assert (back["command"] == text) is not lost
    assert [back["command"]] in back.values()


def test_a_result_is_json_safe() -> None:
    run = steady_run(num=3)
    run.records[0].timings = {"prompt_ms": math.nan}
    environment = {"load": math.inf, "pair": (1, 2), 3: "three"}
    result = result_of(run, environment=environment)  # type: ignore[arg-type]
    assert result["environment"] == {"load": None, "pair": [1, 2], "3": "three"}
    json.dumps(result, allow_nan=False)
    assert json_safe({"a": [math.nan, {"b": -math.inf}]}) == {"a": [None, {"b": None}]}


def test_an_empty_run_makes_a_whole_result() -> None:
    result = result_of(run_of([]))
    json.dumps(result, allow_nan=False)
    assert result["num_prompts"] == 0
    assert result["slo_attainment"] is None
    assert result["valid"] is False
    assert [key for key in VLLM_KEYS if key not in result] == []


def test_an_unwritable_place_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "r.json", tmp_path, tmp_path / ("x" * 300)):
        for attempt in (lambda: check_output(path), lambda: write_result(path, {"slos_ms": {}})):  # noqa: B023
            with pytest.raises(BatonError) as caught:
                attempt()
            assert str(path) in str(caught.value)
            assert "\n" not in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_check_output_makes_the_directory_and_leaves_nothing_in_it(tmp_path: Path) -> None:
    check_output(tmp_path / "a" / "b" / "r.json")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("old")

    def chunks() -> Any:
        yield b"new"
        raise OSError(28, os.strerror(28))

    with pytest.raises(BatonError, match="No space left"):
        write_atomically(path, chunks())
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ("[]", "no schema_version"),
        ("{}", "no schema_version"),
        (json.dumps({"schema_version": SCHEMA_VERSION + 1}), f"schema_version {SCHEMA_VERSION + 1}"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path: Path, content: str | None, why: str) -> None:
    path = tmp_path / "r.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BatonError, match=why) as caught:
        read_result(path)
    assert str(path) in str(caught.value)


def test_a_broken_request_line_is_named_by_number(tmp_path: Path) -> None:
    run = steady_run(num=3)
    path = tmp_path / "r.json"
    write_result(path, result_of(run), run)
    lines = requests_path(path).read_text().splitlines()
    requests_path(path).write_text("\n".join([lines[0], "{", lines[2]]))
    with pytest.raises(BatonError, match="line 2"):
        read_run(path)


def test_a_result_without_its_run_is_refused(tmp_path: Path) -> None:
    run = steady_run(num=3)
    path = tmp_path / "r.json"
    result = result_of(run)
    del result["wall_s"]
    write_result(path, result, run)
    with pytest.raises(BatonError, match="wall_s"):
        read_run(path)


def test_a_file_with_a_version_and_nothing_else_is_no_result(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"schema_version": SCHEMA_VERSION}))
    with pytest.raises(BatonError, match="lacks date, endpoint, model_id") as caught:
        read_result(path)
    assert "\n" not in str(caught.value)


def test_requests_of_another_run_are_refused(tmp_path: Path) -> None:
    ours, longer = steady_run(num=3), steady_run(num=4)
    later = run_of([answer(10 + i, [10 + i + 0.5]) for i in range(3)])
    path, other = tmp_path / "r.json", tmp_path / "other.json"
    for strange, why in ((longer, "has 4 requests, but the run of .* offered 3"), (later, "ended after")):
        write_result(other, result_of(strange), strange)
        write_result(path, result_of(ours), ours)
        requests_path(other).replace(requests_path(path))
        with pytest.raises(BatonError, match=why):
            read_run(path)


def test_what_is_no_ordinary_file_is_left_as_it_is(tmp_path: Path) -> None:
    """A device renamed over is a device lost."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for attempt in (lambda: check_output(pipe), lambda: write_atomically(pipe, [b"x"])):
        with pytest.raises(BatonError, match="it is there already, and no ordinary file"):
            attempt()
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    target, link = tmp_path / "data" / "target.json", tmp_path / "link.json"
    target.parent.mkdir()
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_atomically(link, [b"new"])
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


@pytest.mark.parametrize("check", [check_output, check_output_with_text])
@pytest.mark.parametrize("name", ["", ".", "/"])
def test_a_path_without_a_name_is_no_output(check: Callable[[Path], None], name: str) -> None:
    with pytest.raises(ConfigError, match="give the name of a file"):
        check(Path(name))
