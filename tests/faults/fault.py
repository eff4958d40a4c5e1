"""One planted mistake, and a copy of the library that has it."""

import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = {"treewy_compile": "treewy", "ops": "treewy/ops", "passes": "treewy/passes"}
"""Folders of the checkout, and where an installation has them."""


@dataclass(frozen=True)
class Fault:
    """A mistake that a competent engineer could make, as a replacement of text.

    Args:
        name: What the faulty library does.
        file: Relative to the checkout.
        old: What stands there, exactly once.
        new: What is to stand there instead.
        caught_by: Ids of the tests that should fail, fastest first.
        why_missed: Why no test fails, if that is so.
    """

    name: str
    file: str
    old: str
    new: str
    caught_by: tuple[str, ...]
    why_missed: str = ""

    def apply(self, source: str) -> str:
        """Return the source of the file with the mistake in it."""
        if source.count(self.old) != 1:
            raise ValueError(f"fault {self.name!r}: its old text occurs {source.count(self.old)} times in {self.file}")
        return source.replace(self.old, self.new)


def copy_library(target: Path, fault: Fault | None) -> None:
    """Copy the library of the checkout to a folder for ``sys.path``, with one fault or as it is."""
    for folder, package in PACKAGES.items():
        shutil.copytree(ROOT / folder, target / package, ignore=shutil.ignore_patterns("__pycache__"))
    if fault is not None:
        folder, _, rest = fault.file.partition("/")
        file = target / PACKAGES[folder] / rest
        file.write_text(fault.apply(file.read_text()))
