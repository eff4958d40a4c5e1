"""The benchmarks, which are scripts, as modules, and a subject for their processes."""

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).parents[1] / "examples" / "benchmarks"


def load_benchmark(name: str) -> ModuleType:
    """Import a benchmark as it finds itself when it runs: beside what benchmarks share."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", _FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(_FOLDER))
    try:
        sys.modules[module.__name__] = module  # where dataclasses look for it
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(_FOLDER))
    return module


class Counting:
    """A subject for a process of its own: says how often it was asked, or fails as it is told."""

    def __init__(self) -> None:
        self._prepared: list[str] = []

    def prepare(self, what: str) -> None:
        if what == "slow":
            time.sleep(1)
        self._prepared.append(what)

    def measure(self, what: str) -> dict[str, object]:
        if what == "broken":
            raise ValueError("so it is")
        if what == "endless":
            time.sleep(1000)
        return {"what": what, "prepared": self._prepared}
