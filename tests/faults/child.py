"""Run tests in a process of its own, against a given copy of the library."""

import gc
import importlib
import os
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from faults.fault import PACKAGES, ROOT


@dataclass(frozen=True)
class Outcome:
    """What pytest said.

    Args:
        exit_code: Of pytest; 1 if a test failed.
        failed: Id of the test that failed, "" if none did.
        reason: First line of its error.
    """

    exit_code: int
    failed: str
    reason: str


class _Recorder:
    """A plugin of pytest that keeps the first failure, and looks for no smaller example of it."""

    failed = reason = ""

    def pytest_sessionstart(self) -> None:
        ours = settings.get_profile("treewy")  # of conftest.py, which is loaded by now
        settings.register_profile("treewy, unshrunk", ours, phases=(Phase.explicit, Phase.generate))
        settings.load_profile("treewy, unshrunk")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid
            crash = getattr(report.longrepr, "reprcrash", None)
            self.reason = crash.message.splitlines()[0] if crash else ""


def run_tests(copy: Path, tests: tuple[str, ...], log: Path, connection: Connection) -> None:
    """Run tests until the first failure and send the outcome; what they print goes to a log."""
    with log.open("w") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    gc.freeze()  # pytest collects garbage several times, and what was imported before the fork is none
    os.chdir(ROOT)
    _import_copy(copy)
    recorder = _Recorder()
    # no cache: several processes would write it at once
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests], plugins=[recorder])
    connection.send(Outcome(int(code), recorder.failed, recorder.reason))


def _import_copy(copy: Path) -> None:
    """Make the copy what ``import treewy`` means, here and in processes that tests start."""
    if loaded := [name for name in sys.modules if name.partition(".")[0] == "treewy"]:
        raise RuntimeError(f"{loaded} are imported already, from somewhere else")
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = str(copy)
    for folder in PACKAGES.values():
        module = importlib.import_module(folder.replace("/", "."))
        if not Path(str(module.__file__)).is_relative_to(copy):
            raise RuntimeError(f"{module.__name__} was imported from {module.__file__}, not from the copy in {copy}")
