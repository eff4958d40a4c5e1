"""Bad drafters and trees: each is refused by name with a remedy, and leaves everything as it was."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
)

from api_models import (
    PROMPT,
    noisy_draft,
)
from models import VOCAB_SIZE, fresh_model, plain_model
from refusals import (
    FAMILY,
    Call,
    Case,
    generate,
    parameters,
    right,
    shape,
)
from treewy import DraftTree, PromptLookupDrafter


class NoUpdate:
    def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree: ...

    def reset(self) -> None: ...

    def reorder(self, index: Tensor) -> None: ...


def assistant(**options: Any) -> Call:
    return lambda model: generate(model, **({"assistant_model": noisy_draft(FAMILY)} | options))


def drafting_model(vocab_size: int) -> PreTrainedModel:
    config = copy.deepcopy(plain_model("qwen3").config)
    config.vocab_size = vocab_size
    return type(plain_model("qwen3"))(config).eval()


def flash_draft() -> PreTrainedModel:
    model = fresh_model("qwen3")
    model.config._attn_implementation = "flash_attention_2"
    return model


DRAFTERS = [
    Case("a width of 0", assistant(draft_tree=(2, 0)), r"widths \(2, 0\) must be positive integers.*chain of 3"),
    Case("a negative width", assistant(draft_tree=(-1,)), r"widths \(-1,\) must be positive integers"),
    Case("no widths", assistant(draft_tree=()), r"widths \(\) must be positive integers"),
    Case("a fractional width", assistant(draft_tree=(2, 1.5)), r"widths \(2, 1\.5\) must be positive integers"),
    Case("a number for widths", assistant(draft_tree=5), "widths 5 must be a sequence with one integer", TypeError),
    Case(
        "a width larger than the vocabulary",
        assistant(draft_tree=(2, VOCAB_SIZE + 1)),
        "62 children, but the draft model has only 61 tokens to offer",
    ),
    Case(
        "a shape that differs from row to row",
        assistant(draft_tree=shape([[-1, 0], [-1, -1]])),
        "same full topology in every row",
    ),
    Case(
        "a shape with padding",
        assistant(draft_tree=shape([[-1, 0]], num_nodes=torch.tensor([1]))),
        "same full topology in every row",
    ),
    Case(
        "a shape on another device",
        assistant(draft_tree=shape([[-1, 0]], device="meta")),
        "meta",
    ),
    Case(
        "a tree and nobody to draft it",
        lambda model: generate(model, draft_tree=(2, 2)),
        r"draft_tree=\(2, 2\) needs somebody to draft it; pass assistant_model",
    ),
    Case(
        "a tree for prompt lookup",
        lambda model: generate(model, draft_tree=(2, 2), prompt_lookup_num_tokens=3),
        r"draft_tree=\(2, 2\) shapes the drafts of an assistant_model, not of prompt_lookup_num_tokens",
    ),
    Case(
        "a tree for a drafter",
        lambda model: generate(model, draft_tree=(2, 2), **right()),
        r"draft_tree=\(2, 2\) shapes the drafts of an assistant_model, not of drafter",
    ),
    Case("an assistant and a drafter", assistant(**right()), "assistant_model and drafter both.*pass one of them"),
    Case(
        "an assistant and prompt lookup",
        assistant(prompt_lookup_num_tokens=2),
        "assistant_model and prompt_lookup_num_tokens both.*pass one of them",
    ),
    Case(
        "a drafter and prompt lookup of a configuration object",
        lambda model: model.generate(PROMPT, GenerationConfig(prompt_lookup_num_tokens=2), **right()),
        "drafter and prompt_lookup_num_tokens both.*pass one of them",
    ),
    Case(
        "an object that is no drafter",
        lambda model: generate(model, drafter="auto"),
        r"drafter='auto' is not an object with the methods of treewy\.Drafter \(propose, .*; it lacks.*see",
    ),
    Case(
        "a drafter that lacks a method",
        lambda model: generate(model, drafter=NoUpdate()),
        r"drafter=<.*NoUpdate object.* is not an object with the methods of treewy\.Drafter \(propose, update",
    ),
    Case(
        "a class for a drafter",
        lambda model: generate(model, drafter=PromptLookupDrafter),
        r"drafter=<class '.*PromptLookupDrafter'> is not an object with the methods of treewy\.Drafter",
    ),
    Case(
        "a name for an assistant",
        assistant(assistant_model="gpt2"),
        "gpt2",
        TypeError,
    ),
    Case(
        "a drafter for an assistant",
        assistant(assistant_model=PromptLookupDrafter(2)),
        "PromptLookupDrafter",
        TypeError,
    ),
    Case(
        "an assistant with a larger vocabulary",
        assistant(assistant_model=drafting_model(70)),
        "assistant_model has a vocabulary of 70, the model one of 61; pass an assistant that shares the.*tokenizer",
    ),
    Case(
        "an assistant with a smaller vocabulary",
        assistant(assistant_model=drafting_model(50), draft_tree=(2,)),
        "assistant_model has a vocabulary of 50, the model one of 61; pass an assistant that shares the.*tokenizer",
    ),
    Case(
        "an assistant with flash attention",
        assistant(assistant_model=flash_draft(), draft_tree=(2,)),
        r"'flash_attention_2' cannot take a tree's mask; call model\.set_attn_implementation\('sdpa'\)",
    ),
    Case(
        "no tokens to look up", lambda model: generate(model, prompt_lookup_num_tokens=0), "num_tokens is 0; .*least 1"
    ),
    Case(
        "fewer than no tokens to look up",
        lambda model: generate(model, prompt_lookup_num_tokens=-2),
        "num_tokens is -2; it must be at least 1",
    ),
    Case(
        "an empty suffix to look up",
        lambda model: generate(model, prompt_lookup_num_tokens=2, max_matching_ngram_size=0),
        "max_.*ngram_size is 0; it must be at least 1",
    ),
    Case(
        "a negative suffix to look up",
        lambda model: generate(model, prompt_lookup_num_tokens=2, max_matching_ngram_size=-1),
        "max_ngram_size is -1; it must be at least 1",
    ),
]


@pytest.mark.parametrize("case", parameters(DRAFTERS))
def test_a_bad_drafter_or_tree_is_refused(model: PreTrainedModel, case: Case) -> None:
    with pytest.raises(case.error, match=case.message):
        case.call(model)
