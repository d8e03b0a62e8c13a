"""The table of field faults in tests/README.md tells the truth: every test it names exists, and every row has
one or says why not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROW = re.compile(r"^\| (B\d{3}) [^|]*\| (.*) \|$", re.MULTILINE)
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")
CLASS_1 = {
    f"B0{number:02}"
    for number in (1, 2, 4, 5, 7, 9, 10, 12, 14, 15, 17, 19, 20, 22, 24, 25, 27, 29, 30, 32, 34)
}
CLASS_2 = {"B040", "B042", "B044", "B045"}
CLASS_3 = {"B050", "B052", "B054", "B055", "B057", "B059", "B060", "B062", "B064", "B065", "B067"}
CLASS_4 = {
    f"B0{number}" for number in (70, 72, 74, 75, 77, 79, 80, 82, 84, 85, 87, 89, 90, 92, 94, 95, 97, 99)
}
CLASS_6 = {"B120", "B122", "B124", "B125", "B127"}
CLASS_7 = {f"B1{number}" for number in (30, 32, 34, 35, 37, 39, 40)}
CLASS_8 = {f"B1{number}" for number in (50, 52, 54, 55, 57, 59, 60, 62, 64, 65)}


def rows() -> dict[str, str]:
    return dict(ROW.findall((TESTS / "README.md").read_text(encoding="utf-8")))


def test_every_case_of_these_classes_has_its_row() -> None:
    assert set(rows()) == CLASS_1 | CLASS_2 | CLASS_3 | CLASS_4 | CLASS_6 | CLASS_7 | CLASS_8


def test_every_named_test_exists_and_an_open_case_says_why() -> None:
    for case, text in rows().items():
        named = NAMED.findall(text)
        assert named or text.startswith("open: "), case
        for file, name in named:
            tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            defined = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
            assert name in defined, f"{case}: {file} has no {name}"
