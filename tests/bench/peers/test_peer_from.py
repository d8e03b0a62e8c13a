"""`--from` and `--resume` read a comparison and nothing else, and what is none stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.peers import __main__ as command

OTHERS = [
    '{"schema_version": 1, "kind": "run", "completed": 3, "valid": true}',
    "{}",
    '{"parts": [], "peers": []}',
    '{"parts": [{"facts": {}, "machine": {}}], "peers": []}',
    '{"parts": [{"facts": {}, "machine": {}}], "peers": [5]}',
    '{"parts": [{"facts": {}, "machine": {}}], "peers": [{"rounds": [[5]]}]}',
    "[1, 2]",
    "\xff",
    "no JSON",
]


@pytest.mark.parametrize("text", OTHERS)
@pytest.mark.parametrize("has_out", [False, True])
def test_what_is_no_comparison_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, has_out: bool
) -> None:
    given = tmp_path / "run.json"
    given.write_bytes(text.encode("latin-1"))
    out = ["--out", str(tmp_path / "table")] if has_out else []
    assert command.main(["--from", str(given), *out]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"error: {given} is not the JSON file of a comparison")
    assert said.err.count("\n") == 1
    assert given.read_bytes() == text.encode("latin-1")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_the_help_says_that_the_file_itself_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    assert "over this file, unless --out says where" in " ".join(capsys.readouterr().out.split())
