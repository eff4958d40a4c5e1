"""What the benchmarks share: how a result is written down."""

import datetime
import functools
import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


@functools.cache
def git_commit() -> str:
    """Return the commit of the checkout that this file lies in."""
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    ).stdout.strip()


@functools.cache
def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def hardware(device: str) -> str:
    """Return what a record calls the machine."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine()


def write_record(
    path: Path, device: str, packages: tuple[str, ...], *, commit: str | None = None, **content: Any
) -> None:
    """Write the content behind a header with command, commit, date, hardware and versions."""
    on_gpu = device.startswith("cuda")
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}
    if on_gpu:
        versions["driver"] = _driver()
    header = {
        "command": f"python examples/benchmarks/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}",
        "commit": commit or git_commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": hardware(device),
        "versions": versions,
    }
    path.write_text(json.dumps(header | content, indent=1) + "\n")
