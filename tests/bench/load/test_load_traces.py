import contextlib
import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.plans.sharegpt import Exchange, read_sharegpt
from bench.load.plans.trace_formats import FORMATS, LineError
from bench.load.plans.traces import TraceError, read_trace

DATA = Path(__file__).parent / "data"
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURSTGPT_HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "trace"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_azure() -> None:
    trace = read_trace(DATA / "azure.csv")
    assert trace.format == "azure"
    assert trace.sha256 == hashlib.sha256((DATA / "azure.csv").read_bytes()).hexdigest()
    assert [row.time_s for row in trace.rows] == pytest.approx(
        [0, 4.314579, 4.541877, 6.0000001, 11], abs=1e-6
    )
    assert [(row.input_tokens, row.output_tokens) for row in trace.rows[:2]] == [(374, 44), (396, 109)]
    assert trace.rows[-1].output_tokens == 142, "the last line has no newline"
    assert trace.num_empty == 1
    assert trace.was_sorted


def test_azure_of_2024_has_a_utc_offset(tmp_path: Path) -> None:
    text = AZURE_HEADER + "2024-05-12 00:00:00.001163+00:00,10,2\r\n2024-05-12 00:00:01.501163+00:00,11,3\r\n"
    rows = read_trace(write(tmp_path, text)).rows
    assert [row.time_s for row in rows] == pytest.approx([0, 1.5], abs=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        f"{AZURE_HEADER}2023-11-16 18:15:46,1,1\n2023-11-16 18:15:47,999999999999,1\n",
        f"{BURSTGPT_HEADER}5,ChatGPT,472,18,490,API log\n5,ChatGPT,472,100000001,490,API log\n",
        '{"timestamp":0,"input_length":9,"output_length":1}\n'
        '{"timestamp":1,"input_length":999999999999,"output_length":1}\n',
    ],
)
def test_a_length_that_no_memory_holds_names_its_line(tmp_path: Path, text: str) -> None:
    line = text.count("\n")
    with pytest.raises(TraceError, match=rf"trace:{line}: .* above 100,000,000, more than any context"):
        read_trace(write(tmp_path, text))


@pytest.mark.parametrize(
    "second",
    [
        '{"timestamp":1,"input_length":9,"output_length":1,"hash_ids":[99999999999999999999]}',
        '{"timestamp":1,"input_length":9,"output_length":1,"x":' + "[" * 100_000,
    ],
)
def test_json_that_nobody_can_carry_names_its_line(tmp_path: Path, second: str) -> None:
    first = '{"timestamp":0,"input_length":9,"output_length":1,"hash_ids":[1]}'
    with pytest.raises(TraceError, match="trace:2: "):
        read_trace(write(tmp_path, f"{first}\n{second}\n"))
    with pytest.raises(TraceError, match="trace:1: "):
        read_trace(write(tmp_path, f"{second}\n"))
    with pytest.raises(TraceError, match="trace is not JSON"):
        read_sharegpt(write(tmp_path, "[" * 100_000))


def test_burstgpt_drops_failed_rows() -> None:
    trace = read_trace(DATA / "burstgpt.csv")
    assert trace.format == "burstgpt"
    assert [row.time_s for row in trace.rows] == [0, 40, 113.5, 116]
    assert [row.session for row in trace.rows] == [None, "7", "7", None]
    assert trace.num_empty == 1


def test_burstgpt_without_sessions(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, BURSTGPT_HEADER + "5,ChatGPT,472,18,490,API log\n"))
    assert [(row.input_tokens, row.output_tokens, row.session) for row in trace.rows] == [(472, 18, None)]


def test_mooncake() -> None:
    trace = read_trace(DATA / "mooncake.jsonl")
    assert trace.format == "mooncake"
    assert [row.time_s for row in trace.rows] == [0, 1, 3, 6]
    assert trace.rows[1].hash_ids == (0, 1, 3)


def test_canonical_is_sorted_and_says_what_it_does_not_read() -> None:
    trace = read_trace(DATA / "canonical.jsonl")
    assert trace.format == "canonical"
    assert [row.time_s for row in trace.rows] == [0, 1, 2.0005, 4]
    assert [row.session for row in trace.rows] == ["a", "a", "b", None]
    assert not trace.was_sorted
    assert trace.unknown_fields == ("note",)


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = write(tmp_path, b"\xef\xbb\xbf" + (DATA / "azure.csv").read_bytes())
    assert len(read_trace(path).rows) == 5


@pytest.mark.parametrize(
    ("content", "line", "named"),
    [
        (AZURE_HEADER + "2023-11-16 18:15:46.68,374\n", 2, "2 fields, but 3"),
        (AZURE_HEADER + "2023-11-16 18:15:46.68,374,44\n\n18:15:46,1,2\n", 4, "`18:15:46` is not a time"),
        (AZURE_HEADER + "2023-13-16 18:15:46.68,374,44\n", 2, "is not a time"),
        (AZURE_HEADER + "2023-11-16 18:15:46.68,many,44\n", 2, "ContextTokens `many`"),
        (AZURE_HEADER + "2023-11-16 18:15:46.68,3,-4\n", 2, "GeneratedTokens `-4`"),
        (AZURE_HEADER.encode() + b"2023-11-16 18:15:46.68,\xff,4\n", 2, "UTF-8"),
        (BURSTGPT_HEADER + "5,ChatGPT,472,18\n", 2, "the header has 6"),
        (BURSTGPT_HEADER + "nan,ChatGPT,472,18,490,API log\n", 2, "Timestamp `nan`"),
        ('{"timestamp": 1, "input_length": 3, "output_length": 4}\n{"timest', 2, "canonical lines look like"),
        ('{"timestamp": 1, "input_length": 3}\n', 1, "output_length"),
        ('{"timestamp": 1, "input_length": "3", "output_length": 4}\n', 1, "input_length"),
        ('{"timestamp": 1, "input_length": 3, "output_length": -4}\n', 1, "`output_length` -4"),
        ('{"timestamp": null, "input_length": 3, "output_length": 4}\n', 1, "timestamp"),
        (
            '{"timestamp": 1, "input_length": 3, "output_length": 4, "hash_ids": [1]}\n'
            '{"timestamp": 1, "input_length": 3, "output_length": 4}\n',
            2,
            "`hash_ids` is missing",
        ),
        ('{"timestamp": 1, "input_length": 3, "output_length": 4}\n[1]\n', 2, "Expected `object`"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, content: str | bytes, line: int, named: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(TraceError, match=named) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("a,b,c\n1,2,3\n", "none of the formats azure, mooncake, burstgpt, canonical"),
        (AZURE_HEADER, "nothing to offer"),
        (AZURE_HEADER + "2023-11-16 18:15:46.68,374,0\n", "nothing to offer"),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, content: str, named: str) -> None:
    with pytest.raises(TraceError, match=named):
        read_trace(write(tmp_path, content))


def test_missing_file_and_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "absent")
    with pytest.raises(TraceError, match="`splitwise` is unknown"):
        read_trace(DATA / "azure.csv", "splitwise")


def test_a_named_format_is_not_guessed() -> None:
    assert read_trace(DATA / "mooncake.jsonl", "canonical").format == "canonical"
    with pytest.raises(TraceError, match=r"mooncake\.jsonl:1: the header lacks"):
        read_trace(DATA / "mooncake.jsonl", "azure")


@given(st.sampled_from(sorted(FORMATS)), st.lists(st.binary(max_size=60), max_size=4))
def test_no_bytes_do_anything_but_raise_line_errors(name: str, lines: list[bytes]) -> None:
    parse = FORMATS[name].parser()
    for line in lines:
        with contextlib.suppress(LineError):
            row = parse(line)
            assert row is None or row.input_tokens >= 0


def test_sharegpt() -> None:
    read = read_sharegpt(DATA / "sharegpt.json")
    assert read.num_empty == 1
    one, two, three = read.conversations
    assert one.exchanges[1] == Exchange("Who passes it", "One runner to the next")
    assert two.exchanges == (Exchange("Name a river", "The Elbe"),)
    assert two.system is None, "a system message counts at the beginning only"
    assert three.system == "You are a guide"
    assert len(three.exchanges) == 2


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "is not JSON"),
        ("{}", "not a JSON list"),
        ("[]", "nothing to offer"),
        ("[3]", "entry 1: no list of turns"),
        ('[{"conversations": []}, {"turns": []}]', "entry 2: no list of turns"),
        ('[{"conversations": [{"from": "human"}]}]', "entry 1, turn 1: not a speaker and a text"),
        ('[{"conversations": [{"from": "owl", "value": "hu"}]}]', "entry 1, turn 1: the speaker `owl`"),
        ('[{"conversations": [{"from": "gpt", "value": "a"}]}]', "nothing to offer"),
    ],
)
def test_malformed_conversations_are_named(tmp_path: Path, content: str, named: str) -> None:
    with pytest.raises(TraceError, match=named):
        read_sharegpt(write(tmp_path, content))


@pytest.mark.parametrize("junk", [b"\x7fELF\x02\x01\0\0\x03", b"\x1f\x8b\x08\xff\xfe", b"PK\x03\x04\0"])
def test_a_binary_file_is_called_one(tmp_path: Path, junk: bytes) -> None:
    with pytest.raises(TraceError, match="is no text, but a binary or compressed file") as caught:
        read_trace(write(tmp_path, junk))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("start", ["\x1b[31mhello", AZURE_HEADER + "\x1b[2Jx,1,2", "{\x1b", "z" * 5000])
def test_what_a_file_says_is_shown_as_short_text(tmp_path: Path, start: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(write(tmp_path, start))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 700
