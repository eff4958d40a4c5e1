"""Plant the faults of `faults/` one at a time and print which of them the tests catch: `python tests/run_faults.py`.

Each fault gets a copy of the library and a process of its own. First the tests run that are expected to catch it, then,
if they pass, a broader selection. The first line is the library without a fault, on which all expected tests must pass.
Exits with 1 if fewer than 95 % are caught or a fault could not be tried.
"""

import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from faults.catalogue import FAULTS
from faults.child import Outcome, run_tests
from faults.fault import Fault, copy_library

LEAST_RATE = 0.95
AT_ONCE = 2  # processes: one a core of the machine that CI has
SECONDS = 600  # for one process; a fault that makes the engine run forever counts as not tried
BROADER = (
    *("tests/ops", "tests/test_cases.py", "tests/test_policies.py", "tests/test_generate_contract.py"),
    "tests/test_generate_inputs.py",
    *("-k", "not qwen3_5 and not lara_mini"),
)

# What takes long to import is imported once, and every process is forked from there. Nothing of treewy is among it.
_PRELOADED = (
    "torch",
    "hypothesis",
    "transformers.generation.utils",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_5.modeling_qwen3_5",
    "transformers.models.qwen3_next.modeling_qwen3_next",
)


@dataclass(frozen=True)
class Trial:
    """What became of one fault."""

    outcome: Outcome | None  # None: no answer
    seconds: float
    log: str

    @property
    def verdict(self) -> str:
        if self.outcome is None or self.outcome.exit_code not in (0, 1):
            return "NOT TRIED"
        return "caught" if self.outcome.exit_code == 1 else "MISSED"


def try_fault(fault: Fault | None, tests: tuple[str, ...]) -> Trial:
    """Run tests against a copy of the library."""
    context = multiprocessing.get_context("forkserver")
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy_library(Path(folder) / "library", fault)
        log = Path(folder) / "log"
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=run_tests, args=(Path(folder) / "library", tests, log, sending))
        process.start()
        sending.close()
        try:
            outcome = receiving.recv() if receiving.poll(SECONDS) else None
        except EOFError:  # the process ended without an answer
            outcome = None
        process.kill()
        process.join()
        return Trial(outcome, time.monotonic() - start, log.read_text() if log.exists() else "")


def try_with_expected_tests_first(fault: Fault) -> Trial:
    """Run the expected tests, and the broader selection if they pass."""
    first = try_fault(fault, fault.caught_by) if fault.caught_by else Trial(Outcome(0, "", ""), 0.0, "")
    if first.verdict != "MISSED":
        return first
    second = try_fault(fault, BROADER)
    return Trial(second.outcome, first.seconds + second.seconds, second.log)


def report(name: str, trial: Trial, why_missed: str = "") -> None:
    """Print a line, and what is needed to understand a fault that was not caught."""
    by = trial.outcome.failed.removeprefix("tests/") if trial.outcome else ""
    print(f"{trial.verdict:9}  {trial.seconds:5.1f} s  {name:70}  {by}", flush=True)
    if trial.outcome and trial.outcome.failed:
        print(f"{'':20}{trial.outcome.reason[:140]}", flush=True)
    if trial.verdict == "MISSED":
        print(f"{'':20}{why_missed or 'nobody has said why'}", flush=True)
    if trial.verdict == "NOT TRIED":
        print(trial.log[-3000:], flush=True)


def report_control(trial: Trial) -> bool:
    """Tell whether the expected tests pass on the library as it is; otherwise their failures mean nothing."""
    passed = trial.outcome is not None and trial.outcome.exit_code == 0
    print(f"without a fault the expected tests {'pass' if passed else 'FAIL'}, in {trial.seconds:.0f} s", flush=True)
    if not passed:
        print(trial.log[-3000:], flush=True)
    return passed


def main() -> int:
    """Try all faults, or those whose names contain the words of the command line."""
    start = time.monotonic()
    faults = [fault for fault in FAULTS if all(word in fault.name for word in sys.argv[1:])]
    if not faults:
        sys.exit(f"no fault has {' and '.join(sys.argv[1:])} in its name")
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_PRELOADED))
    expected = tuple(dict.fromkeys(test for fault in faults for test in fault.caught_by))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        control = pool.submit(try_fault, None, expected)
        trials = {pool.submit(try_with_expected_tests_first, fault): fault for fault in faults}
        for trial in as_completed(trials):
            report(trials[trial].name, trial.result(), trials[trial].why_missed)
        sound = report_control(control.result())
    verdicts = [trial.result().verdict for trial in trials]
    caught = verdicts.count("caught")
    print(f"{caught} of {len(faults)} faults caught, {caught / len(faults):.1%}, in {time.monotonic() - start:.0f} s")
    sound = sound and "NOT TRIED" not in verdicts
    return 0 if sound and caught >= LEAST_RATE * len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
