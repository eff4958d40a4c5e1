"""Texts of a small compiled model, and of a plain one."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import treewy
from models import fresh_model, greedy
from test_generate_equality import speculative

SMALL = "qwen3_next short"


def compiled_short() -> PreTrainedModel:
    return treewy.compile(fresh_model(SMALL), backend="aot_eager")


def compiled_text(model: PreTrainedModel, prompt: Tensor, **more: Any) -> list[list[int]]:
    text: list[list[int]] = speculative(
        model, prompt, torch.ones_like(prompt), max_new_tokens=14, prompt_lookup_num_tokens=3, **more
    ).sequences.tolist()
    return text


def plain_text(model: PreTrainedModel, prompt: Tensor) -> list[list[int]]:
    text: list[list[int]] = greedy(model, prompt, torch.ones_like(prompt), 14).tolist()
    return text
