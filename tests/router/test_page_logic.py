"""The page's JavaScript: pure modules in Node, and what holds the files together."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from router.page import STATIC

NODE = shutil.which("node")
LOGIC = Path(__file__).with_name("page_logic.mjs")


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
def test_pure_modules(tmp_path: Path) -> None:
    """Copied beside each other, and declared as modules: browsers know by how they were loaded."""
    for file in (*STATIC.glob("*.js"), LOGIC):
        shutil.copy(file, tmp_path)
    (tmp_path / "package.json").write_text(json.dumps({"type": "module"}))
    assert NODE is not None
    result = subprocess.run(
        [NODE, "--test", LOGIC.name], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^# pass [1-9]", result.stdout, re.MULTILINE)


class Page(HTMLParser):
    """Elements of a page, in order, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def ids(self) -> list[str]:
        return [value for _, attributes in self.elements if (value := attributes.get("id")) is not None]


PAGE = Page((STATIC / "index.html").read_text(encoding="utf-8"))
SCRIPTS = {file.name: file.read_text(encoding="utf-8") for file in STATIC.glob("*.js")}


def test_every_id_is_there_once_and_every_reference_leads_to_one() -> None:
    ids = PAGE.ids()
    assert len(ids) == len(set(ids))
    wanted = {name for text in SCRIPTS.values() for name in re.findall(r"\bby\(\"([\w-]+)\"\)", text)}
    for _, attributes in PAGE.elements:
        for name in ("aria-labelledby", "for"):
            wanted |= {attributes[name]} if attributes.get(name) else set()
        href = attributes.get("href") or ""
        wanted |= {href[1:]} if href.startswith("#") else set()
    assert wanted <= set(ids), wanted - set(ids)


def test_everything_a_person_can_use_has_a_name() -> None:
    labelled = {attributes.get("for") for tag, attributes in PAGE.elements if tag == "label"}
    for tag, attributes in PAGE.elements:
        if tag in ("input", "textarea"):
            assert attributes.get("id") in labelled, attributes
        if tag == "img":
            assert "alt" in attributes
        if attributes.get("role") in ("img", "region", "log"):
            assert attributes.get("aria-label"), attributes
    tag, html = PAGE.elements[0]
    assert (tag, html.get("lang")) == ("html", "en")


def test_nothing_is_inline_and_nothing_comes_from_elsewhere() -> None:
    """What the content security policy forbids is not even tried."""
    for tag, attributes in PAGE.elements:
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")], attributes
        assert tag != "style"
        for name in ("src", "href"):
            assert not re.match(r"(?i)[a-z]+:|//", attributes.get(name) or ""), attributes
    for name, text in {**SCRIPTS, "style.css": (STATIC / "style.css").read_text(encoding="utf-8")}.items():
        code = re.sub(r"//.*|/\*[\s\S]*?\*/", "", text)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|@import", code)
        assert not re.search(r"https?:", code), name
        assert 'setAttribute("style"' not in code


def test_imports_lead_to_files_that_export_the_name() -> None:
    for name, text in SCRIPTS.items():
        for names, file in re.findall(r"import \{([^}]*)\} from \"\./([\w.]+)\"", text):
            assert file in SCRIPTS, f"{name} imports {file}"
            for imported in names.split(","):
                pattern = rf"export (?:class|function|const) {imported.strip()}\b"
                assert re.search(pattern, SCRIPTS[file]), f"{name}: {file} has no {imported.strip()}"


def test_every_stage_has_its_colour_in_both_themes() -> None:
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"^  (--[\w-]+): light-dark\((#\w{6}, #\w{6})\);$", style, re.MULTILINE))
    assert {f"--{stage}" for stage in ("queue", "prefill", "transfer", "decode")} <= set(colours)
    assert not re.findall(r"^  --[\w-]+: #", style, re.MULTILINE), "a colour for one theme alone"
    used = set(re.findall(r"var\((--[\w-]+)", style))
    defined = set(re.findall(r"(--[\w-]+):", style))
    assert used <= defined, used - defined
