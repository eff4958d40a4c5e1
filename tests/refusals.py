"""A compiled model that must come back unharmed, and cases of what it refuses."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
)

import treewy
from api_models import (
    PROMPT,
    knowing,
    model_snapshot,
    modeling_globals,
    noisy_draft,
    plain_text,
    process_state,
)
from models import fresh_model, plain_model
from treewy import DraftTree

FAMILY = "qwen3_next"
NEW = 10
TWO_ROWS = PROMPT.repeat(2, 1)

Call = Callable[[PreTrainedModel], Any]


@dataclass(frozen=True)
class Case:
    """One bad input: the call, and what the message must say."""

    name: str
    call: Call
    message: str  # the value, then the remedy
    error: type[Exception] = ValueError


def parameters(cases: Sequence[Case]) -> list[Any]:
    assert len({case.name for case in cases}) == len(cases)
    return [pytest.param(case, id=case.name) for case in cases]


@functools.cache
def text() -> Tensor:
    return plain_text(plain_model(FAMILY), PROMPT, NEW)


def generate(model: PreTrainedModel, prompt: Tensor = PROMPT, **options: Any) -> Any:
    return model.generate(prompt, **({"max_new_tokens": NEW, "do_sample": False} | options))


def right(prompt: Tensor = PROMPT) -> dict[str, Any]:
    """A drafter that nothing is wrong with."""
    return {"drafter": knowing(text().repeat(len(prompt), 1), prompt)}


def assert_works(model: PreTrainedModel) -> None:
    """Generation returns the plain text, with drafters of two kinds and without one."""
    for options in (right(), {"assistant_model": noisy_draft(FAMILY), "draft_tree": (2, 1)}, {}):
        assert torch.equal(generate(model, **options), text())


@dataclass(frozen=True)
class Compiled:
    model: PreTrainedModel
    before: tuple[Any, ...]


def visible_state(*models: PreTrainedModel) -> tuple[Any, ...]:
    """What a user can see of some models and of the files that define them."""
    return (*map(model_snapshot, models), modeling_globals(*models))


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    model = treewy.compile(fresh_model(FAMILY))
    for attention in ("eager", "sdpa"):  # at the first change transformers remembers something of the class
        model.set_attn_implementation(attention)
    assert_works(model)
    return Compiled(model, visible_state(model, noisy_draft(FAMILY)))


@pytest.fixture
def model(compiled: Compiled) -> Iterator[PreTrainedModel]:
    """A compiled model, which must come back as it was given and still work."""
    process = process_state()
    yield compiled.model
    assert process_state() == process
    assert visible_state(compiled.model, noisy_draft(FAMILY)) == compiled.before
    assert_works(compiled.model)


def ids(*rows: Sequence[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


class OwnError(Exception):
    """An error of the user's own."""


def shape(parents: Sequence[Sequence[int]], device: str = "cpu", **options: Any) -> DraftTree:
    nodes = torch.tensor(parents, device=device)
    return DraftTree(torch.zeros_like(nodes), nodes, **options)
