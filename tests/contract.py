"""What the tests of the generate contract share: a compiled model, known texts and a drafter of each kind."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor
from transformers import PreTrainedModel

import treewy
from api_models import (
    MIXED,
    PROMPT,
    knowing,
    noisy_draft,
    plain_text,
)
from models import INTERFACE_FAMILIES, fresh_model, left_padded, plain_model
from treewy.testing import Proposal

NEW = 16

THREE, THREE_MASK = left_padded((7, 4, 9), seed=8, width=10)

# One drafter of each kind; the first knows the text, and is right and wrong where its script says.
Drafting = Callable[[Tensor, Tensor], dict[str, Any]]
DRAFTING: dict[str, Drafting] = {
    "scripted": lambda text, prompt: {"drafter": knowing(text, prompt)},
    "assistant": lambda text, prompt: {"assistant_model": noisy_draft("qwen3_next"), "draft_tree": (2, 2, 1)},
    "prompt lookup": lambda text, prompt: {"prompt_lookup_num_tokens": 4},
}


@pytest.fixture(params=INTERFACE_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=DRAFTING)
def drafting(request: pytest.FixtureRequest) -> Drafting:
    return DRAFTING[request.param]


@functools.cache
def compiled(family: str = "qwen3_next", mixing: float = 1.0) -> PreTrainedModel:
    """One compiled model for all tests, each of which must leave it as it was."""
    return treewy.compile(fresh_model(family, mixing=mixing))


def speculate(model: PreTrainedModel, prompt: Tensor = PROMPT, max_new_tokens: int = NEW, **options: Any) -> Any:
    return model.generate(prompt, max_new_tokens=max_new_tokens, do_sample=False, **options)


@functools.cache
def longer_text(family: str, prompt: Tensor, mixing: float = 1.0) -> Tensor:
    """Plain text that goes on beyond what is to be generated, for a drafter that looks ahead of the end."""
    return plain_text(plain_model(family, mixing=mixing), prompt, NEW + 8)


def stats_of(script: Sequence[Proposal] = MIXED, prompt: Tensor = PROMPT, **options: Any) -> treewy.SpeculationStats:
    drafter = knowing(longer_text("qwen3_next", prompt), prompt, script)
    output = speculate(compiled(), prompt, drafter=drafter, return_dict_in_generate=True, **options)
    stats: treewy.SpeculationStats = output.speculation
    return stats
