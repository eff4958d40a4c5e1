"""The planted faults of `run_faults.py` still fit the code, and are tried as they should be."""

import ast
from pathlib import Path

import pytest

from faults.catalogue import FAULTS
from faults.child import _import_copy
from faults.fault import PACKAGES, ROOT, Fault, copy_library

by_name = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)


@by_name
def test_a_fault_replaces_a_text_that_occurs_once_and_leaves_python(fault: Fault) -> None:
    source = (ROOT / fault.file).read_text()
    assert ast.dump(ast.parse(fault.apply(source))) != ast.dump(ast.parse(source))


@by_name
def test_a_fault_names_tests_that_exist_or_says_why_none_fails(fault: Fault) -> None:
    assert bool(fault.caught_by) != bool(fault.why_missed)
    for test in fault.caught_by:
        file, _, name = test.partition("::")
        assert f"\ndef {name.partition('[')[0]}(" in (ROOT / file).read_text()


def test_no_two_faults_are_the_same() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len({(fault.file, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("old", ["not in the file", "import"])
def test_a_fault_whose_text_is_gone_or_not_alone_is_refused(old: str) -> None:
    with pytest.raises(ValueError, match=r"fault 'x': its old text occurs \d+ times in ops/_solve.py"):
        Fault("x", "ops/_solve.py", old, "", ()).apply((ROOT / "ops/_solve.py").read_text())


def test_a_copy_of_the_library_has_one_fault_and_is_otherwise_the_library(tmp_path: Path) -> None:
    fault = next(fault for fault in FAULTS if fault.file.startswith("ops/"))
    copy_library(tmp_path, fault)
    for folder, package in PACKAGES.items():
        for file in (ROOT / folder).rglob("*.py"):
            name = file.relative_to(ROOT / folder)
            same = (tmp_path / package / name).read_text() == file.read_text()
            assert same == (f"{folder}/{name}" != fault.file)


def test_tests_are_not_run_where_another_copy_is_imported_already(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="imported already"):
        _import_copy(tmp_path)
