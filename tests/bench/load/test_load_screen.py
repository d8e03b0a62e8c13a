"""What is printed, on outputs that cannot show everything."""

from __future__ import annotations

import io
import sys

import pytest

from bench.load.cli_screen import note, say


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
@pytest.mark.parametrize("text", ["goodput ≥ 2 req/s", "–", "written: r\udcff.json"])
def test_what_an_encoding_lacks_is_a_question_mark(
    encoding: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, print_it in (("stdout", lambda: say([text])), ("stderr", lambda: note(text))):
        written = io.BytesIO()
        monkeypatch.setattr(sys, name, io.TextIOWrapper(written, encoding=encoding))
        print_it()
        shown = written.getvalue().decode(encoding)
        assert shown.endswith("\n")
        assert len(shown) == len(text) + 1
        pairs = zip(text, shown, strict=False)
        assert all(one == other or other == "?" for one, other in pairs)
        assert ("?" in shown) is (encoding != "utf-8" or not text.isprintable())
