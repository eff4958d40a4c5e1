"""Settings of the whole suite."""

import pytest
import torch
from hypothesis import settings

from compiled_calls import graphs_run_as_they_are, nothing_compiled_is_kept
from contract import drafting, family
from gpu_solves import nan_in_new_memory
from refusals import compiled, model

__all__ = [  # fixtures
    "compiled",
    "drafting",
    "family",
    "graphs_run_as_they_are",
    "model",
    "nan_in_new_memory",
    "nothing_compiled_is_kept",
]

torch.set_num_threads(1)

# No deadline: the machines that run this are shared, and no test measures time. No random seed: a failure repeats.
settings.register_profile("treewy", deadline=None, derandomize=True)
settings.load_profile("treewy")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(
                    pytest.mark.skip(reason="no CUDA device here; docs/benchmarks holds the log of an H200")
                )
