"""Speculation on a compiled model, for the tests of compile."""

from typing import Any

from torch import Tensor
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
