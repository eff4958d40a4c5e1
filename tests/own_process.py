"""Scripts that replace parts of torch, run in processes of their own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def results_of(script: str, *arguments: str) -> dict[str, Any]:
    """Run a script of this folder and return the JSON of its last line; skip the test if it says that it cannot run."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    results: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    if "skip" in results:
        pytest.skip(str(results["skip"]))
    return results
