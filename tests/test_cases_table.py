"""docs/cases.md names tests that exist, and they name the case and its reports."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROWS = re.findall(
    r"^\| ([A-G]\d+) \|[^|]*\| ([^|]*) \| ([^|]*) \|$", (TESTS.parent / "docs/cases.md").read_text(), re.M
)
WAITING = ("E32", "F15")


def docstring(test: str) -> str:
    file, _, name = test.partition("::")
    tree: ast.Module | ast.FunctionDef = ast.parse((TESTS / file).read_text())
    if name:
        tree = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return ast.get_docstring(tree) or ""


@pytest.mark.parametrize(("case", "reports", "tests"), ROWS, ids=[row[0] for row in ROWS])
def test_the_tests_of_a_case_name_it_and_its_reports(case: str, reports: str, tests: str) -> None:
    names = re.findall(r"`([^`]+)`", tests)
    assert (tests == "waits for captured graphs") == (case in WAITING) == (not names)
    for name in names:
        assert re.search(rf"\bCases? (?:\w+, )*(?:\w+ and )?{case}\b", docstring(name)), name
        assert reports.split(", ")[0] in docstring(name), name


def test_every_case_that_a_test_names_is_in_the_table() -> None:
    named = {
        case
        for file in TESTS.rglob("test_*.py")
        for cases in re.findall(r"\bCases? ((?:[A-G]\d+(?:, | and )?)+)", file.read_text())
        for case in re.findall(r"[A-G]\d+", cases)
    }
    assert named | set(WAITING) == {case for case, _, _ in ROWS}
