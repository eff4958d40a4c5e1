"""Accepting sampled drafts leaves the target's distribution as it is: exactly, by enumeration, and in draws."""

import itertools
from collections.abc import Callable, Sequence
from typing import get_args

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper
from transformers.generation.stopping_criteria import MaxLengthCriteria

from distributions import Text, p_value, total_variation
from tolerances import (
    CHI_SQUARE_P_VALUE,
    PROBABILITIES_FLOAT32,
    PROBABILITIES_FLOAT64,
    STANDARD_ERRORS,
    TOTAL_VARIATION_OF_200_000_DRAWS,
)
from treewy import DraftTree
from treewy._draft_tree import Sampling
from treewy._sampling import SampledDecoding, draw, draw_without_replacement
from treewy._texts import Texts
from treewy.ops._sample import try_sibling

VOCAB_SIZE = 6
SAMPLINGS: tuple[Sampling, ...] = get_args(Sampling)
WARPERS = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(3)])


def warped(seed: int, *shape: int) -> Tensor:
    """Distributions at temperature 0.7 of the three most probable tokens, in float64."""
    logits = 1.5 * torch.randn(*shape, VOCAB_SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    processed: Tensor = WARPERS(None, logits.flatten(0, -2))
    return processed.softmax(dim=-1).view(logits.shape)


TARGET = warped(0, 1)
DRAFTS = {
    "the target itself": TARGET,
    "independent": torch.randn(1, VOCAB_SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).softmax(
        1
    ),
    "none where the target has mass": (TARGET.max() != TARGET).double() / (VOCAB_SIZE - 1),
    "other three tokens": TARGET.flip(1),
    "nearly certain": torch.tensor([[1 - 1e-9, *[1e-9 / (VOCAB_SIZE - 1)] * (VOCAB_SIZE - 1)]], dtype=torch.float64),
}


def all_siblings(q: Tensor, width: int, sampling: Sampling) -> list[tuple[Text, float]]:
    """Every way of drafting so many siblings, with its probability."""
    if sampling == "top":
        return [(tuple(q.topk(width).indices.tolist()), 1.0)]
    drafts = []
    for tokens in itertools.product(range(len(q)), repeat=width):
        probability, left = 1.0, q.clone()
        for token in tokens:
            probability *= float(left[token] / left.sum())
            if sampling == "without_replacement":
                left[token] = 0.0
        if probability > 0:
            drafts.append((tokens, probability))
    return drafts


Rule = Callable[[Tensor, Tensor, Tensor, Sampling], tuple[Tensor, Tensor]]


def sibling_acceptance(p: Tensor, q: Tensor, tokens: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The probability of accepting each sibling [R, W] behind rejected ones, and what is left behind all [R, V]."""
    accept = []
    for token in tokens.unbind(dim=1):
        probability, p, q = try_sibling(p, q, token, sampling)
        accept.append(probability)
    return torch.stack(accept, dim=1), p


def emitted(
    p: Tensor, q: Tensor, width: int, sampling: Sampling, rule: Rule = sibling_acceptance
) -> tuple[Tensor, float]:
    """The exact distribution of the emitted token, and the probability that it was drafted."""
    distribution, accepted = torch.zeros_like(p[0]), 0.0
    for tokens, probability in all_siblings(q[0], width, sampling):
        accept, residual = rule(p, q, torch.tensor([tokens]), sampling)
        for token, chance in zip(tokens, accept[0].tolist(), strict=True):
            distribution[token] += probability * chance
            accepted += probability * chance
            probability *= 1 - chance
        distribution += probability * residual[0]
    return distribution, accepted


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_emitted_token_has_the_target_distribution_exactly(draft: str, sampling: Sampling, width: int) -> None:
    distribution, _ = emitted(TARGET, DRAFTS[draft], width, sampling)
    assert (distribution - TARGET[0]).abs().max() <= PROBABILITIES_FLOAT64


def draws(q: Tensor, sampling: Sampling, rule: Rule = sibling_acceptance) -> tuple[Tensor, Tensor]:
    """200,000 tokens emitted with two siblings, in float32, and which of them were drafted."""
    number, width, generator = 200_000, 2, torch.Generator().manual_seed(2)
    p, q = (x.float().expand(number, -1) for x in (TARGET, q))
    if sampling == "top":
        tokens = q.topk(width, dim=1).indices
    elif sampling == "with_replacement":
        tokens = torch.stack([draw(q, generator) for _ in range(width)], dim=1)
    else:
        tokens, possible = draw_without_replacement(q, width, generator)
        assert bool(possible.all())
    accept, residual = rule(p, q, tokens, sampling)
    accepted = torch.rand(number, width, generator=generator) < accept
    first = accepted.int().argmax(dim=1, keepdim=True)
    drafted = accepted.any(dim=1)
    return torch.where(drafted, tokens.gather(1, first)[:, 0], draw(residual, generator)), drafted


EXPECTED = {(token,): probability for token, probability in enumerate(TARGET[0].tolist()) if probability > 0}


def residual_forgotten(p: Tensor, q: Tensor, tokens: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    return sibling_acceptance(p, q, tokens, sampling)[0], p


def ratio_forgotten(p: Tensor, q: Tensor, tokens: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    accept, residual = sibling_acceptance(p, q, tokens, sampling)
    return (accept > 0).to(accept), residual


def as_if_with_replacement(p: Tensor, q: Tensor, tokens: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    return sibling_acceptance(p, q, tokens, "with_replacement")


WRONG_RULES = {
    "residual forgotten": (residual_forgotten, "independent"),
    "ratio forgotten": (ratio_forgotten, "independent"),
    "as if with replacement": (as_if_with_replacement, "nearly certain"),
}


@pytest.mark.parametrize("name", WRONG_RULES)
def test_a_wrong_rule_changes_the_distribution(name: str) -> None:
    rule, draft = WRONG_RULES[name]
    distribution, _ = emitted(TARGET, DRAFTS[draft], 2, "without_replacement", rule)
    assert (distribution - TARGET[0]).abs().max() > 1e-3
    token, _ = draws(DRAFTS[draft], "without_replacement", rule)
    assert total_variation(token, TARGET[0]) > TOTAL_VARIATION_OF_200_000_DRAWS
    assert p_value(((t,) for t in token.tolist()), EXPECTED) < CHI_SQUARE_P_VALUE


@pytest.mark.parametrize("sampling", ["with_replacement", "without_replacement"])
def test_another_distribution_than_that_of_the_draws_changes_the_distribution(sampling: Sampling) -> None:
    """Case G13: transformers#47932. Drafts were drawn from other probabilities than those that were returned."""
    unwarped = DRAFTS["independent"]
    logits: Tensor = WARPERS(None, unwarped.log())
    distribution = torch.zeros_like(TARGET[0])
    for (token,), probability in all_siblings(logits.softmax(dim=-1)[0], 1, sampling):
        accept, residual = sibling_acceptance(TARGET, unwarped, torch.tensor([[token]]), sampling)
        distribution[token] += probability * accept[0, 0]
        distribution += probability * (1 - accept[0, 0]) * residual[0]
    assert not (distribution - TARGET[0]).abs().max() <= PROBABILITIES_FLOAT64


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_single_draft_is_accepted_with_the_overlap_of_the_distributions(draft: str) -> None:
    q = DRAFTS[draft]
    overlap = float(torch.minimum(TARGET, q).sum())
    for sampling in ("with_replacement", "without_replacement"):
        _, accepted = emitted(TARGET, q, 1, sampling)
        assert abs(accepted - overlap) <= PROBABILITIES_FLOAT64
    _, accepted = emitted(TARGET, q, 1, "top")
    assert abs(accepted - float(TARGET[0, q[0].topk(1).indices])) <= PROBABILITIES_FLOAT64


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_more_siblings_are_accepted_more_often(draft: str, sampling: Sampling) -> None:
    q = DRAFTS[draft]
    rates = [emitted(TARGET, q, width, sampling)[1] for width in (1, 2, 3)]
    assert all(rate <= more + PROBABILITIES_FLOAT64 for rate, more in itertools.pairwise([*rates, 1.0]))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_200_000_draws_are_close_to_the_target(draft: str, sampling: Sampling) -> None:
    token, accepted = draws(DRAFTS[draft], sampling)
    assert total_variation(token, TARGET[0]) < TOTAL_VARIATION_OF_200_000_DRAWS
    assert p_value(((t,) for t in token.tolist()), EXPECTED) > CHI_SQUARE_P_VALUE
    _, rate = emitted(TARGET, DRAFTS[draft], 2, sampling)
    observed = float(accepted.float().mean())
    assert abs(observed - rate) <= STANDARD_ERRORS * (rate * (1 - rate) / len(accepted)) ** 0.5 + PROBABILITIES_FLOAT32


def test_draws_without_replacement_run_out_of_outcomes() -> None:
    tokens, possible = draw_without_replacement(torch.tensor([[0.0, 0.3, 0.0, 0.7]]), 3, None)
    assert possible.tolist() == [[True, True, False]]
    assert set(tokens[0, :2].tolist()) == {1, 3}


# A whole tree through the decoding of a round.


def decoding(max_length: int, generator: torch.Generator | None) -> SampledDecoding:
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length)])
    return SampledDecoding(LogitsProcessorList(), criteria, 1, generator)


def topologies() -> dict[str, tuple[int, ...]]:
    return {
        "chain": (-1, 0, 1),
        "(2, 2)": (-1, -1, 0, 0, 1, 1),
        "late parents": (-1, 0, -1, 2, 2, 0, 3),
    }


def drawn_tree(parents: Sequence[int], probs: Tensor, sampling: Sampling, generator: torch.Generator) -> list[int]:
    """Tokens of the nodes, siblings in order, from the distributions [1 + N, V] after each node, -1 first."""
    tokens = [0] * len(parents)
    for parent in {*parents}:
        children = [node for node, other in enumerate(parents) if other == parent]
        q = probs[parent + 1]
        if sampling == "top":
            chosen = q.topk(len(children)).indices
        elif sampling == "with_replacement":
            chosen = torch.stack([draw(q, generator) for _ in children])
        else:
            chosen, _ = draw_without_replacement(q, len(children), generator)
        for child, token in zip(children, chosen.tolist(), strict=True):
            tokens[child] = token
    return tokens


@pytest.mark.parametrize("topology", topologies())
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_path_of_a_tree_has_the_target_distribution(sampling: Sampling, topology: str) -> None:
    """The target's and the draft's distribution differ from node to node: by its text."""
    parents = topologies()[topology]
    by_text: dict[tuple[Text, int], Tensor] = {}

    def distribution(text: Text, seed: int) -> Tensor:
        key = (text, seed)
        if key not in by_text:
            logits = torch.randn(4, generator=torch.Generator().manual_seed(hash((*text, seed)) % 2**31))
            by_text[key] = logits.softmax(dim=0)
        return by_text[key]

    generator = torch.Generator().manual_seed(3)
    sampled = decoding(1 + 2, generator)
    texts_drawn, depth_two = [], 0
    for _ in range(2500):
        texts: list[Text] = [()]
        tokens = [0] * len(parents)
        probs = torch.zeros(1 + len(parents), 4)
        for node in range(-1, len(parents)):  # parents first: their children's tokens are known when they are reached
            text = (*texts[parents[node] + 1], tokens[node]) if node >= 0 else ()
            if node >= 0:
                texts.append(text)
            probs[node + 1] = distribution(text, seed=1)
            children = [child for child, parent in enumerate(parents) if parent == node]
            relabelled = [-1] * len(children)
            for child, token in zip(
                children, drawn_tree(relabelled, probs[node + 1 : node + 2], sampling, generator), strict=True
            ):
                tokens[child] = token
        own = sorted({*parents})
        draft = DraftTree(
            torch.tensor([tokens]),
            torch.tensor(parents),
            draft_probs=None if sampling == "top" else probs[None, [parent + 1 for parent in own]],
            sampling=sampling,
        )
        draft.check_draft_probs(4)
        logits = torch.stack([distribution(text, seed=0) for text in texts]).log()[None]
        nodes = torch.tensor([[9, *tokens]])
        shifted = torch.tensor([[-1, *(parent + 1 for parent in parents)]])
        emission = sampled.emit(
            logits, nodes, shifted, Texts(torch.tensor([[9]]), torch.ones(1, 1), logits.device), draft
        )
        text = tuple(emission.token_ids[0, : int(emission.num_tokens)].tolist())
        depth_two += len(text) == 2
        if len(text) == 1:  # a rejection at the first level: what follows is the next round's
            text = (*text, int(draw(distribution(text, seed=0), generator)))
        texts_drawn.append(text)
    assert depth_two > 150
    expected = {(a, b): float(distribution((), 0)[a] * distribution((a,), 0)[b]) for a in range(4) for b in range(4)}
    assert p_value(texts_drawn, expected) > CHI_SQUARE_P_VALUE


def test_a_generator_is_the_only_source_of_randomness() -> None:
    probs = torch.rand(50, 7)
    state = torch.get_rng_state()
    one, two = (draw(probs, torch.Generator().manual_seed(seed)) for seed in (5, 5))
    assert torch.equal(one, two)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(one, draw(probs, torch.Generator().manual_seed(6)))
    draw(probs, None)
    assert not torch.equal(torch.get_rng_state(), state)
