"""Speculation on a compiled model, for the tests of compile."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

import treewy
from api_models import (
    PROMPT,
    noisy_draft,
)

NEW = 14


def speculate(model: PreTrainedModel, prompt: Tensor = PROMPT, max_new_tokens: int = NEW, **options: Any) -> Any:
    """Generate with a draft model that is sometimes right, as a tree."""
    options = {"assistant_model": noisy_draft("qwen3_next"), "draft_tree": (2, 2, 1), "do_sample": False} | options
    return model.generate(prompt, max_new_tokens=max_new_tokens, **options)


def stats_of(model: PreTrainedModel, **options: Any) -> treewy.SpeculationStats:
    stats: treewy.SpeculationStats = speculate(model, return_dict_in_generate=True, **options).speculation
    return stats


def graphs() -> int:
    """How many graphs Dynamo has made since ``nothing_compiled_is_kept``."""
    return int(counters["stats"]["unique_graphs"])


def cuda_calls(function: Callable[[], object]) -> dict[str, int]:
    """How often each function of CUDA is called meanwhile."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    return {event.key: event.count for event in profile.key_averages()}


@pytest.fixture
def graphs_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let "aot_eager" run the rewritten graphs of Dynamo, for tests of what is around them.

    AOTAutograd traces the operators' own code as well, which takes three times as long as all the rest of compiling.
    """
    lookup = torch._dynamo.lookup_backend
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: lookup("eager" if name == "aot_eager" else name))


@pytest.fixture
def nothing_compiled_is_kept() -> Iterator[None]:
    """Begin and end without what Dynamo compiled, and count from zero."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
