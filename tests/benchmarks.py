"""The benchmarks, which are scripts, as modules."""

import importlib.util
import sys
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
