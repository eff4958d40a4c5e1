"""``generate`` with ``do_sample=True``: what is drawn has the distribution of plain sampling."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import treewy
from contract import NEW, THREE, compiled
from distributions import Text, p_value
from small_vocabulary import (
    NUM_DRAWS,
    PROMPT,
    VOCAB_SIZE,
    DrawingDrafter,
    Options,
    drawn_texts,
    eight_tokens,
    expected_texts,
    sample,
)
from tolerances import CHI_SQUARE_P_VALUE, STANDARD_ERRORS
from treewy import AssistantDrafter, Drafter, DraftTree
from treewy._sampling import draw


def assistant(seed: int, shape: tuple[int, ...], **options: Any) -> Callable[[], Options]:
    return lambda: {"drafter": AssistantDrafter(eight_tokens(seed), shape, **options)}


TARGET, OTHER = 0, 1  # seeds


DRAFTERS: dict[str, Callable[[], Options]] = {
    "the target itself, chain": lambda: {"assistant_model": eight_tokens(TARGET), "draft_tree": (1, 1)},
    "the target itself, top": assistant(TARGET, (2, 1), sampling="top"),
    "another model, chain": assistant(OTHER, (1, 1)),
    "another model, top": assistant(OTHER, (2, 2), sampling="top"),
    "another model, with replacement": assistant(OTHER, (3, 2), sampling="with_replacement"),
    # three possible tokens: some nodes get fewer than four children
    "another model, without replacement": lambda: {"assistant_model": eight_tokens(OTHER), "draft_tree": (4, 2)},
    "prompt lookup": lambda: {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_continuations_have_the_distribution_of_plain_sampling(drafter: str) -> None:
    """Case G13: transformers#47932. With top-3 of eight, drafts have no mass where the target has, and vice versa."""
    texts, accepted = drawn_texts(DRAFTERS[drafter])
    assert p_value(texts, expected_texts()) > CHI_SQUARE_P_VALUE
    assert accepted > 0
    if drafter == "the target itself, chain":
        assert accepted == 1.0


@pytest.mark.parametrize("sampling", ["top", "without_replacement"])
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"min_p": 0.2, "top_p": 0.8},
        {"typical_p": 0.7, "epsilon_cutoff": 0.1, "suppress_tokens": [2]},
    ],
)
def test_distributions_are_compared_behind_the_processors(options: Options, sampling: Any) -> None:
    number = 1000 if {"repetition_penalty", "no_repeat_ngram_size"} & {*options} else 2000  # row by row
    texts, _ = drawn_texts(assistant(OTHER, (2, 2), sampling=sampling), number, **options)
    assert p_value(texts, expected_texts(**options)) > CHI_SQUARE_P_VALUE
    assert p_value(texts, expected_texts()) < CHI_SQUARE_P_VALUE  # the processors matter


def test_a_draft_that_claims_another_distribution_is_noticed_by_this_test() -> None:
    class Lying(AssistantDrafter):
        def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
            tree = super().propose(input_ids, lengths)
            if tree.draft_probs is None:  # nothing was drafted
                return tree
            uniform = torch.full_like(tree.draft_probs, 1 / VOCAB_SIZE)
            return DraftTree(
                tree.token_ids,
                tree.parents,
                num_nodes=tree.num_nodes,
                draft_probs=uniform,
                sampling=tree.sampling,
            )

    texts, _ = drawn_texts(lambda: {"drafter": Lying(eight_tokens(OTHER), (1, 1))})
    assert p_value(texts, expected_texts()) < CHI_SQUARE_P_VALUE


def test_the_rate_of_acceptance_is_the_overlap_of_the_distributions() -> None:
    """Of the second token, over the first ones of plain sampling."""
    overlap = 0.0
    for (first,), probability in _first_tokens().items():
        ids = torch.cat([PROMPT, torch.tensor([[first]])], dim=1)
        p, q = (_warped(eight_tokens(seed)(ids).logits[:, -1]) for seed in (TARGET, OTHER))
        overlap += probability * float(torch.minimum(p, q).sum())
    _, accepted = drawn_texts(assistant(OTHER, (1,)), length=3)  # there is room for one drafted token, in one round
    assert abs(accepted - overlap) <= STANDARD_ERRORS * (overlap * (1 - overlap) / NUM_DRAWS) ** 0.5


def _warped(logits: Tensor) -> Tensor:
    top = logits.topk(3, dim=-1)
    return torch.full_like(logits, float("-inf")).scatter(1, top.indices, top.values / 0.7).softmax(dim=-1)


def _first_tokens() -> dict[Text, float]:
    first: dict[Text, float] = {}
    for text, probability in expected_texts().items():
        first[text[:1]] = first.get(text[:1], 0.0) + probability
    return first


@pytest.mark.parametrize("sampling", ["with_replacement", "without_replacement"])
def test_a_drafter_of_ones_own_may_draw_from_any_distributions(sampling: str) -> None:
    texts, accepted = drawn_texts(lambda: {"drafter": DrawingDrafter((2, 3), sampling)})
    assert p_value(texts, expected_texts()) > CHI_SQUARE_P_VALUE
    assert accepted > 0.1


def test_a_drafter_of_ones_own_learns_what_it_drafts_for() -> None:
    """From ``prepare``: here the processors and the generator, so that the text repeats."""

    class Prepared(Drafter):
        def prepare(self, context: treewy.DraftingContext) -> None:
            self.context = context

        def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
            logits = torch.zeros(len(lengths), 1, self.context.vocab_size)
            probs = self.context.scores.of_nodes(logits, lambda row, node: input_ids[row]).softmax(dim=-1)
            token_ids = draw(probs, self.context.generator)
            return DraftTree(token_ids, torch.tensor([-1]), draft_probs=probs, sampling="with_replacement")

    model = compiled()
    texts = []
    for seed in (1, 1, 2):
        drafter, generator = Prepared(), torch.Generator().manual_seed(seed)
        texts.append(sample(model, drafter=drafter, generator=generator, suppress_tokens=[5, 6]).tolist())
        assert drafter.context.generator is generator
        assert drafter.context.do_sample
        assert drafter.context.max_length == THREE.shape[1] + NEW
    assert texts[0] == texts[1] != texts[2]
