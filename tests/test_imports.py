"""Imports point one way, treewy -> passes -> ops, and what is installed is what the checkout declares."""

import ast
import importlib.metadata
import importlib.resources
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import treewy

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {package: ROOT / folder for package, folder in PYPROJECT["tool"]["setuptools"]["package-dir"].items()}
PACKAGES = PYPROJECT["tool"]["setuptools"]["packages"]


def modules_loaded_by(statement: str) -> set[str]:
    """Run a statement in a fresh interpreter, without the working directory on its path, and list what it loaded."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


def is_within(module: str, packages: set[str]) -> bool:
    """Tell whether a dotted name is one of the packages or lies inside one."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def imported_names(source: str, package: str) -> Iterator[str]:
    """Yield the absolute dotted name behind every import statement, wherever it stands in the file.

    `from a import b` yields `a.b`, since `b` may be a module; relative imports are resolved against `package`.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def forbidden_imports(source: str, package: str, allowed: set[str]) -> list[str]:
    """List imports of treewy outside the allowed packages. `import treewy` alone is one: it reaches everything."""
    names = imported_names(source, package)
    return [name for name in names if is_within(name, {"treewy"}) and not is_within(name, allowed)]


def sources_of(package: str) -> Iterator[tuple[Path, str, str]]:
    """Yield the path, text and containing package of each file of one of the three rooms."""
    folder = FOLDERS[package]
    for path in sorted(folder.rglob("*.py")):
        yield path, path.read_text(), ".".join([package, *path.parent.relative_to(folder).parts])


@pytest.mark.parametrize(
    ("package", "allowed"),
    [("treewy.ops", {"treewy.ops"}), ("treewy.passes", {"treewy.ops", "treewy.passes"})],
)
def test_no_file_imports_against_the_direction(package: str, allowed: set[str]) -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path, source, inside in sources_of(package)
        if (names := forbidden_imports(source, inside, allowed))
    }
    assert not found


def test_ops_import_only_torch_and_triton_besides_the_standard_library() -> None:
    allowed = {"torch", "triton", "treewy"} | sys.stdlib_module_names
    found = {
        (str(path.relative_to(ROOT)), name)
        for path, source, inside in sources_of("treewy.ops")
        for name in imported_names(source, inside)
        if name.split(".")[0] not in allowed
    }
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import treewy",
        "import treewy.passes",
        "from treewy import _engine",
        "from treewy import compile as c",
        "from treewy._cache import TreeCache",
        "from .. import compile",
        "from ..passes import run",
        "def later():\n    from treewy.passes import run",
        "if TYPE_CHECKING:\n    import treewy._engine",
        "import torch, treewy.passes as p",
    ],
)
def test_the_direction_check_sees_every_form_of_import(source: str) -> None:
    assert forbidden_imports(source, "treewy.ops", {"treewy.ops"})


@pytest.mark.parametrize(
    "source", ["from . import _solve", "from treewy import ops", "import treewy.ops._solve", "import torch"]
)
def test_the_direction_check_accepts_imports_inside_the_package(source: str) -> None:
    assert not forbidden_imports(source, "treewy.ops", {"treewy.ops"})


def test_no_file_imports_a_room_by_the_name_of_its_folder() -> None:
    folder_names = {folder.name for folder in FOLDERS.values()}
    places = [*FOLDERS.values(), ROOT / "tests", ROOT / "examples", ROOT / "docs"]
    found = {
        (str(path.relative_to(ROOT)), name)
        for place in places
        for path in place.rglob("*.py")
        for name in imported_names(path.read_text(), "")
        if name.split(".")[0] in folder_names
    }
    assert not found


def test_importing_ops_loads_nothing_else_of_treewy_and_no_transformers() -> None:
    loaded = modules_loaded_by("import treewy.ops")
    assert {name for name in loaded if is_within(name, {"treewy"})} - {"treewy"} == {
        name for name in loaded if is_within(name, {"treewy.ops"})
    }
    assert "transformers" not in loaded


def test_importing_passes_loads_nothing_of_the_engine() -> None:
    loaded = modules_loaded_by("import treewy.passes")
    assert not {
        name for name in loaded if is_within(name, {"treewy"}) and not is_within(name, {"treewy.ops", "treewy.passes"})
    } - {"treewy"}


def test_the_folders_are_not_importable_by_their_own_names() -> None:
    folder_names = sorted(folder.name for folder in FOLDERS.values())
    loaded = modules_loaded_by(
        f"import importlib.util\nassert not any(map(importlib.util.find_spec, {folder_names!r}))\nimport treewy.ops"
    )
    assert not loaded & set(folder_names)
    assert not set(sys.modules) & set(folder_names)


def test_every_name_that_treewy_exports_resolves() -> None:
    modules_loaded_by("import treewy\nfor name in treewy.__all__:\n    getattr(treewy, name)")


def test_the_version_is_the_one_in_pyproject() -> None:
    assert treewy.__version__ == importlib.metadata.version("treewy") == PYPROJECT["project"]["version"]


@pytest.mark.parametrize("package", sorted(FOLDERS))
def test_py_typed_ships(package: str) -> None:
    assert (importlib.resources.files(package) / "py.typed").is_file()


def test_every_package_folder_is_declared_so_that_it_ships() -> None:
    found = {
        ".".join([package, *path.parent.relative_to(folder).parts])
        for package, folder in FOLDERS.items()
        for path in folder.rglob("__init__.py")
    }
    assert found == set(PACKAGES)
