from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from bench.load.plan import Plan
from bench.load.plans import arrivals
from bench.load.plans.build import build_plan, check_plan
from bench.load.plans.lengths import Fixed, Lognormal, Uniform
from bench.load.plans.settings import (
    Chats,
    Endpoint,
    Oversize,
    PlanSettings,
    PromptForm,
    SharedPrefix,
    ShareGpt,
    Synthetic,
    TraceReplay,
    at_rate,
)
from cluster.errors import BatonError, ConfigError
from tests.bench.load.plan_support import WordTokenizer

DATA = Path(__file__).parent / "data"
SYNTHETIC = Synthetic(input=Uniform(5, 40), output=Uniform(1, 9))
SHARED = SharedPrefix(input=Uniform(5, 40), output=Fixed(4), num_groups=3, prefix_tokens=25, skew=1.0)
CHATS = Chats(
    turns=Uniform(1, 4),
    input=Uniform(5, 9),
    output=Fixed(6),
    system_tokens=11,
    think_s=2.0,
    random_think=True,
)
MOONCAKE = TraceReplay(path=str(DATA / "mooncake.jsonl"))
AZURE = TraceReplay(path=str(DATA / "azure.csv"))
SHAREGPT = ShareGpt(path=str(DATA / "sharegpt.json"), turns=2, think_s=1.5)


def make(workload: Any = SYNTHETIC, **changes: Any) -> PlanSettings:
    fields: dict[str, Any] = {
        "model": "m",
        "arrival": arrivals.poisson(10, 1),
        "workload": workload,
        "num_requests": 20,
    }
    return PlanSettings(**(fields | changes))


def build(workload: Any = SYNTHETIC, **changes: Any) -> Plan:
    settings = make(workload, **changes)
    needs_server = settings.form is PromptForm.TEXT
    return build_plan(settings, WordTokenizer() if needs_server else None)


def prompts(plan: Plan) -> list[Any]:
    return [request.body["prompt"] for request in plan.requests]


def shared_tokens(first: list[int], second: list[int]) -> int:
    same = [one == other for one, other in zip(first, second, strict=False)]
    return same.index(False) if False in same else len(same)


ALL_KINDS: list[dict[str, Any]] = [
    {},
    {"workload": SHARED},
    {"workload": SHARED, "prompt_form": PromptForm.TEXT},
    {"workload": SYNTHETIC, "endpoint": Endpoint.CHAT},
    {"workload": CHATS, "endpoint": Endpoint.CHAT},
    {"workload": MOONCAKE, "num_requests": 3},
    {"workload": MOONCAKE, "num_requests": 3, "arrival": arrivals.trace_times(), "endpoint": Endpoint.CHAT},
    {"workload": AZURE, "num_requests": 2, "arrival": arrivals.closed_loop(2)},
    {"workload": SHAREGPT, "num_requests": 3, "endpoint": Endpoint.CHAT},
]


@pytest.mark.parametrize("changes", ALL_KINDS)
def test_a_plan_is_a_function_of_settings_and_seed(changes: dict[str, Any]) -> None:
    plan = build(**changes)
    assert plan == build(**changes)
    assert [request.index for request in plan.requests] == list(range(len(plan.requests)))
    times_s = [request.scheduled_s for request in plan.requests]
    assert times_s == sorted(times_s)
    # it crosses process borders, and its parts go into JSON
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan) == plan
    assert orjson.loads(orjson.dumps(plan.workload))["num_requests"] == len(plan.requests)


@pytest.mark.parametrize("changes", ALL_KINDS[:6])
def test_salt_changes_tokens_only_and_seed_lengths_too(changes: dict[str, Any]) -> None:
    def shape(plan: Plan) -> list[Any]:
        return [
            (
                request.scheduled_s,
                request.output_tokens,
                request.prefix_group,
                request.session,
                request.think_s,
            )
            for request in plan.requests
        ]

    plan, salted = build(**changes), build(**changes, salt=1)
    assert shape(salted) == shape(plan)
    assert [request.input_tokens for request in salted.requests] == [
        request.input_tokens for request in plan.requests
    ]
    for before, after in zip(plan.requests, salted.requests, strict=True):
        is_template_alone = before.input_tokens == 8 and "messages" in before.body
        assert before.body != after.body or is_template_alone
    if "workload" in changes and isinstance(changes["workload"], TraceReplay):
        return
    assert shape(build(**changes, seed=1)) != shape(plan)


@given(st.integers(1, 60), st.integers(0, 2**40))
@hypothesis_settings(max_examples=30)
def test_more_requests_leave_the_earlier_ones_alone(num: int, seed: int) -> None:
    many, few = (build(num_requests=n, seed=seed) for n in (60, num))
    assert many.requests[:num] == few.requests


def test_lengths_are_what_is_sent() -> None:
    plan = build()
    for request in plan.requests:
        assert len(request.body["prompt"]) == request.input_tokens
        assert request.body["max_tokens"] == request.output_tokens
    assert len({tuple(prompt[:5]) for prompt in prompts(plan)}) == 20
    assert plan.workload["total_known_input_tokens"] == sum(map(len, prompts(plan)))


def test_the_seed_is_told_whatever_the_arrival() -> None:
    assert build(arrival=arrivals.poisson(10, 1), seed=7).arrival.seed == 1
    for arrival in (arrivals.constant(3), arrivals.burst(), arrivals.closed_loop(2)):
        assert build(arrival=arrival, seed=7).arrival.seed == 7
    assert build(AZURE, arrival=arrivals.trace_times(), num_requests=3, seed=7).arrival.seed == 7


def test_the_shared_body() -> None:
    plan = build(extra_body={"top_p": 0.5, "stream_options": {"continuous_usage_stats": True}})
    assert plan.endpoint == "/v1/completions"
    assert plan.shared_body == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": 0.0,
        "ignore_eos": True,
        "top_p": 0.5,
    }


def test_a_model_that_may_stop_has_no_planned_output_length() -> None:
    plan = build(ignore_eos=False)
    assert "ignore_eos" not in plan.shared_body
    assert all(request.output_tokens is None and request.body["max_tokens"] > 0 for request in plan.requests)


def test_shared_prefixes_are_shared_within_groups_only() -> None:
    plan = build(SHARED, num_requests=60)
    groups = [request.prefix_group for request in plan.requests]
    assert groups.count(0) > groups.count(2) > 0
    for first in plan.requests:
        for second in plan.requests[: first.index]:
            shared = shared_tokens(first.body["prompt"], second.body["prompt"])
            assert (shared >= 25) == (first.prefix_group == second.prefix_group)
            assert shared < 29


def test_chats_keep_their_turns_together() -> None:
    plan = build(CHATS, endpoint=Endpoint.CHAT)
    assert plan.endpoint == "/v1/chat/completions"
    assert plan.workload["num_arrivals"] == 20
    assert len(plan.requests) > 20
    by_session: dict[int | None, list[Any]] = {}
    for request in plan.requests:
        by_session.setdefault(request.session, []).append(request)
    assert len(by_session) == 20
    for requests in by_session.values():
        assert [request.turn for request in requests] == list(range(len(requests)))
        assert len({request.scheduled_s for request in requests}) == 1
        assert requests[0].think_s == 0
        assert requests[0].input_tokens == 11 + 11 + len(requests[0].body["messages"][1]["content"].split())
        assert all(request.input_tokens is None and request.think_s > 0 for request in requests[1:])
        assert all(len(request.body["messages"]) == 1 for request in requests[1:])


def test_chats_lose_the_turns_that_do_not_fit() -> None:
    fixed = Chats(turns=Fixed(4), input=Fixed(10), output=Fixed(10))
    # first turn 7 + 20, each later one 8 + 20
    plan = build(
        fixed, endpoint=Endpoint.CHAT, num_requests=1, max_model_len=27 + 28 + 27, oversize=Oversize.CLAMP
    )
    assert len(plan.requests) == 2
    assert plan.workload["num_turns_oversize_cut"] == 2
    assert len(build(fixed, endpoint=Endpoint.CHAT, num_requests=1, max_model_len=27 + 3 * 28).requests) == 4
    with pytest.raises(ConfigError, match="A chat of 4 turns does not fit"):
        build(fixed, endpoint=Endpoint.CHAT, num_requests=1, max_model_len=80)
    with pytest.raises(ConfigError, match="does not fit"):
        build(fixed, endpoint=Endpoint.CHAT, max_model_len=26, oversize=Oversize.CLAMP)


def test_drawn_lengths_that_do_not_fit() -> None:
    lengths = Synthetic(input=Lognormal(median=50, sigma=2.0), output=Fixed(30))
    with pytest.raises(ConfigError, match="give the lengths a `max`"):
        build(lengths, num_requests=200, max_model_len=100)
    free = build(lengths, num_requests=200)
    plan = build(lengths, num_requests=200, max_model_len=100, oversize=Oversize.CLAMP)
    num_clamped = 0
    for request, wanted in zip(plan.requests, free.requests, strict=True):
        assert request.input_tokens is not None
        assert request.input_tokens + request.body["max_tokens"] <= 100
        assert request.body["prompt"] == wanted.body["prompt"][: request.input_tokens]
        num_clamped += request.body != wanted.body
    assert plan.workload["num_oversize_clamped"] == num_clamped > 0


def test_mooncake_blocks_are_shared_prefixes() -> None:
    first, second, third, fourth = prompts(build(MOONCAKE, num_requests=4))
    assert [len(prompt) for prompt in (first, second, third, fourth)] == [1200, 1300, 600, 2048]
    assert shared_tokens(first, second) == 1024
    assert shared_tokens(first, third) == shared_tokens(second, third) == 512
    assert shared_tokens(first, fourth) == 0


@pytest.mark.parametrize("scale", [1, 2, 3, 7.7, 16, 100, 512, 700, 0.5])
def test_scaled_prefixes_stay_shared(scale: float) -> None:
    plan = build(msgspec.structs.replace(MOONCAKE, scale=scale), num_requests=4)
    sent = prompts(plan)
    assert [len(prompt) for prompt in sent] == [
        max(1, int(length / scale)) for length in (1200, 1300, 600, 2048)
    ]
    assert plan.requests[2].output_tokens == max(1, int(7 / scale))
    block = int(1024 / scale)
    assert shared_tokens(sent[0], sent[1]) == block or scale > 512
    assert shared_tokens(sent[0], sent[2]) == int(512 / scale) or scale >= 512


def test_the_size_of_scaled_blocks_is_told() -> None:
    scaled = msgspec.structs.replace(MOONCAKE, scale=16.0)
    for workload, tokens in ((MOONCAKE, 512.0), (scaled, 32.0), (AZURE, None)):
        plan = build(workload, num_requests=1)
        assert plan.workload["block_tokens_scaled"] == tokens


def test_tokens_beyond_the_hash_ids_are_the_rows_own(tmp_path: Path) -> None:
    line = '{"timestamp": 0, "input_length": 20, "output_length": 5, "hash_ids": [3]}\n'
    path = tmp_path / "trace.jsonl"
    path.write_text(line * 2)
    plan = build(TraceReplay(path=str(path), block_tokens=16), num_requests=2)
    assert shared_tokens(*prompts(plan)) == 16
    assert [len(prompt) for prompt in prompts(plan)] == [20, 20]


def test_rows_of_one_session_begin_alike() -> None:
    plan = build(TraceReplay(path=str(DATA / "canonical.jsonl")), num_requests=4)
    first, second, other, alone = prompts(plan)
    assert shared_tokens(first, second) == 100
    assert shared_tokens(first, other) == shared_tokens(first, alone) == 0
    assert [request.prefix_group for request in plan.requests] == [0, 0, 1, None]


def test_trace_times_and_speed_up() -> None:
    replay = msgspec.structs.replace(AZURE, speed_up=2.0)
    plan = build(replay, arrival=arrivals.trace_times(), num_requests=None, duration_s=3.5)
    assert [request.scheduled_s for request in plan.requests] == pytest.approx(
        [0, 2.1572895, 2.2709385, 3.00000005], abs=1e-6
    )
    assert plan.trace is not None
    assert (plan.trace.format, plan.trace.speed_up, plan.trace.num_rows) == ("azure", 2.0, 4)
    assert plan.arrival.kind == "trace"
    assert plan.arrival.rate == pytest.approx(3 / 3.00000005)
    assert plan.workload["num_rows_empty"] == 1


def test_trace_times_at_a_rate() -> None:
    plan = build(AZURE, arrival=arrivals.trace_times(20.0), num_requests=None, duration_s=0.25)
    assert len(plan.requests) == 5, "rate times duration"
    times_s = [request.scheduled_s for request in plan.requests]
    assert 4 / times_s[-1] == pytest.approx(20)
    assert plan.trace is not None
    assert plan.trace.speed_up == pytest.approx(20 / (4 / 11))
    assert [time_s * plan.trace.speed_up for time_s in times_s] == pytest.approx(
        [0, 4.314579, 4.541877, 6.0000001, 11], abs=1e-6
    )


def test_trace_lengths_with_drawn_arrivals() -> None:
    plan = build(AZURE, num_requests=3)
    assert [len(prompt) for prompt in prompts(plan)] == [374, 396, 9000]
    assert [request.scheduled_s for request in plan.requests] == arrivals.schedule(
        arrivals.poisson(10, 1), 3, None
    )
    assert plan.trace is not None
    assert plan.trace.speed_up == 1.0


def test_trace_rows_that_do_not_fit_are_skipped_or_cut() -> None:
    skipped = build(AZURE, num_requests=4, max_model_len=2000)
    assert [request.input_tokens for request in skipped.requests] == [374, 396, 91, 1313]
    assert skipped.workload["num_rows_oversize_skipped"] == 1
    cut = build(AZURE, num_requests=5, max_model_len=2000, oversize=Oversize.CLAMP)
    assert [request.input_tokens for request in cut.requests] == [374, 396, 1945, 91, 1313]
    assert cut.workload["num_rows_oversize_clamped"] == 1
    tight = build(AZURE, num_requests=5, max_model_len=100, oversize=Oversize.CLAMP)
    assert [(r.input_tokens, r.output_tokens) for r in tight.requests] == [
        (56, 44),
        (50, 50),
        (50, 50),
        (84, 16),
        (50, 50),
    ]
    with pytest.raises(ConfigError, match="No row of"):
        build(AZURE, num_requests=1, max_model_len=50)


def test_where_a_trace_starts() -> None:
    offset = msgspec.structs.replace(AZURE, offset_s=4.4)
    plan = build(offset, arrival=arrivals.trace_times(), num_requests=2)
    assert [request.input_tokens for request in plan.requests] == [9000, 91]
    assert plan.requests[0].scheduled_s == 0
    starts = {
        build(msgspec.structs.replace(AZURE, random_offset=True), num_requests=4, seed=seed)
        .requests[0]
        .input_tokens
        for seed in range(20)
    }
    assert starts == {374, 396}
    with pytest.raises(ConfigError, match=r"ends at 11\.0 s"):
        build(msgspec.structs.replace(AZURE, offset_s=60), num_requests=1)


def test_a_plan_that_no_one_lives_to_see_ends_in_is_refused(tmp_path: Path) -> None:
    """A timestamp of another unit, or a rate mistyped."""
    path = tmp_path / "trace.jsonl"
    row = '{"timestamp": %s, "input_length": 5, "output_length": 2}'
    path.write_text("\n".join(row % time for time in ("0", "1e27")))
    trace = TraceReplay(path=str(path))
    settings = make(trace, arrival=arrivals.trace_times(), num_requests=None)
    for attempt in (build_plan, check_plan):
        with pytest.raises(ConfigError, match=r"due after 1e\+24 s.* look at its timestamps"):
            attempt(settings, None)
    assert len(build(trace, arrival=arrivals.trace_times(), num_requests=1).requests) == 1
    with pytest.raises(ConfigError, match="use a higher rate"):
        build(arrival=arrivals.constant(1e-9))


def test_a_trace_with_too_few_rows() -> None:
    for arrival in (arrivals.poisson(10, 1), arrivals.trace_times(), arrivals.trace_times(3.0)):
        with pytest.raises(ConfigError, match="has 5 usable rows"):
            build(AZURE, arrival=arrival, num_requests=6)


def test_sharegpt_turns() -> None:
    plan = build(SHAREGPT, endpoint=Endpoint.CHAT, num_requests=3)
    found = {(request.body["messages"][-1]["content"], request.turn): request for request in plan.requests}
    assert len(found) == 5
    question = found["What is a baton", 0]
    assert question.input_tokens == 3 + 4 + 4
    assert question.output_tokens == 6, "as the recorded answer"
    assert found["Who passes it", 1].think_s == 1.5
    assert found["Who passes it", 1].session == question.session is not None
    assert found["Name a river", 0].session is None
    assert [message["role"] for message in found["Where is north", 0].body["messages"]] == ["system", "user"]
    assert plan.trace is not None
    assert plan.trace.format == "sharegpt"
    assert plan.workload["num_conversations_empty"] == 1


def test_sharegpt_that_does_not_fit() -> None:
    # by words and template: "one" needs 17, then 36; "two" 12; "three" 25 and more
    changes: dict[str, Any] = {"endpoint": Endpoint.CHAT, "max_model_len": 20}
    skipped = build(SHAREGPT, num_requests=1, **changes)
    assert [request.body["messages"][0]["content"] for request in skipped.requests] == ["Name a river"]
    cut = build(SHAREGPT, num_requests=2, oversize=Oversize.CLAMP, **changes)
    assert sorted(request.body["messages"][0]["content"] for request in cut.requests) == [
        "Name a river",
        "What is a baton",
    ]
    assert cut.workload["num_turns_oversize_cut"] >= 1
    with pytest.raises(ConfigError, match=r"has 2 that fit"):
        build(SHAREGPT, num_requests=3, oversize=Oversize.CLAMP, **changes)


def test_sharegpt_without_a_counting_server() -> None:
    single = ShareGpt(path=str(DATA / "sharegpt.json"), output=Fixed(7))
    plan = build_plan(make(single, prompt_form=PromptForm.TEXT, num_requests=3), None)
    assert {request.input_tokens for request in plan.requests} == {None}
    assert {request.output_tokens for request in plan.requests} == {7}
    assert "Name a river" in prompts(plan)


def test_at_rate() -> None:
    settings = at_rate(make(), 25.0, seed=9, salt=4)
    assert settings.arrival == arrivals.poisson(25, 9)
    assert (settings.seed, settings.salt) == (9, 4)
    replay = make(
        msgspec.structs.replace(AZURE, speed_up=3.0), arrival=arrivals.trace_times(), num_requests=3
    )
    plan = build_plan(at_rate(replay, 5.0, seed=1, salt=0), None)
    assert 2 / plan.requests[-1].scheduled_s == pytest.approx(5)
    with pytest.raises(ConfigError, match="cannot use burst arrivals"):
        at_rate(make(arrival=arrivals.burst()), 5.0, seed=1, salt=0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"endpoint": Endpoint.CHAT, "prompt_form": PromptForm.IDS}, "takes messages"),
        ({"workload": CHATS}, "use the chat endpoint"),
        ({"workload": SHAREGPT}, "Conversations are text"),
        ({"workload": SHAREGPT, "prompt_form": PromptForm.TEXT}, "Recorded answers"),
        ({"prompt_form": PromptForm.TEXT}, "name one, or offer token ids"),
        ({"endpoint": Endpoint.CHAT}, "name one, or offer token ids"),
        ({"arrival": arrivals.trace_times()}, "need a trace"),
        ({"num_requests": None}, "no end"),
        ({"max_model_len": 1}, "holds no prompt"),
        ({"id_range": (5, 5)}, "no token ids"),
        ({"id_range": (-1, 5)}, "no token ids"),
        ({"extra_body": {"stream": False}}, "`stream`"),
        ({"extra_body": {"max_tokens": 3}}, "`max_tokens`"),
        ({"extra_body": {"stream_options": {"include_usage": False}}}, "include_usage"),
        ({"extra_body": {"stream_options": 3}}, "must be an object"),
        ({"workload": msgspec.structs.replace(SHARED, num_groups=0)}, "1 or more groups"),
        ({"workload": msgspec.structs.replace(AZURE, scale=0.0)}, "above 0"),
        (
            {"workload": msgspec.structs.replace(AZURE, speed_up=2.0)},
            "leave --speed-up or the other arrival out",
        ),
        ({"workload": msgspec.structs.replace(AZURE, block_tokens=0)}, "stands for nothing"),
        ({"workload": msgspec.structs.replace(AZURE, offset_s=1.0, random_offset=True)}, "give one"),
        (
            {
                "workload": msgspec.structs.replace(AZURE, speed_up=2.0),
                "arrival": arrivals.trace_times(2.0),
                "num_requests": 3,
            },
            "give one of them",
        ),
        (
            {
                "workload": AZURE,
                "arrival": arrivals.trace_times(0.1),
                "num_requests": None,
                "duration_s": 3.0,
            },
            "0 requests have no rate",
        ),
    ],
)
def test_settings_that_contradict_one_another(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        build_plan(make(**changes), None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["absent.csv", "sharegpt.json"])
def test_a_wrong_trace_file_is_one_line(path: str) -> None:
    with pytest.raises(BatonError) as caught:
        build(TraceReplay(path=str(DATA / path)), num_requests=1)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings_of",
    [lambda: make(CHATS, endpoint=Endpoint.CHAT), lambda: make(MOONCAKE), lambda: make(SHARED)],
)
def test_settings_are_data(settings_of: Callable[[], PlanSettings]) -> None:
    settings = settings_of()
    assert msgspec.json.decode(msgspec.json.encode(settings), type=PlanSettings) == settings
