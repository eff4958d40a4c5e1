"""`tree_sample` against a literal walk with equal random numbers, and its paths against the target's distribution."""

import pytest
import torch
from torch import Tensor

from distributions import p_value, total_variation
from sampled_trees import SampledTrees, drawn_trees, walk
from tolerances import CHI_SQUARE_P_VALUE, TOTAL_VARIATION_OF_200_000_DRAWS
from treewy import ops
from treewy.ops import PADDING
from treewy.ops._sample import SAMPLINGS

TOPOLOGIES = {
    "chain": (-1, 0, 1, 2),
    "(2, 2)": (-1, 0, 0, 1, 1, 2, 2),
    "three children": (-1, 0, 0, 0),
    "late parents": (-1, 0, 1, 0, 3, 3, 1),
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_rows_follow_a_literal_walk(sampling: str) -> None:
    """Of many trees, padding nodes and rows of padding among them, with probabilities that are 0."""
    seen = set()
    for seed in range(150):
        trees = drawn_trees(sampling, vocab_size=3 + seed % 9, seed=seed)
        node, token = ops.tree_sample(*trees)
        assert [node.tolist(), token.tolist()] == [list(x) for x in zip(*map(walk, trees.rows()), strict=True)]
        seen |= {*node.tolist()}
    assert seen >= {-1, 0, 1, 2, 3, 4, 5}


def paths(parents: tuple[int, ...], sampling: str, number: int) -> tuple[Tensor, Tensor]:
    """Texts of two tokens [R] of a vocabulary of four, as numbers, and the distribution [16] that they should have.

    Distributions after a node depend on its token.
    """
    generator = torch.Generator().manual_seed(4)
    target, draft = (torch.randn(2, 5, 4, generator=generator).softmax(dim=-1)).unbind()
    size = len(parents)
    text = torch.zeros(number, size, dtype=torch.int64)  # of each node: 0 for the root, then 1 + its token
    tokens = torch.zeros(number, size, dtype=torch.int64)
    own = sorted({*parents} - {-1})
    for parent in own:
        children = [child for child in range(size) if parents[child] == parent]
        q = draft[text[:, parent]].clone()
        for child in children:
            if sampling == "top":
                tokens[:, child] = q.argmax(dim=1)
            else:
                tokens[:, child] = q.multinomial(1, generator=generator)[:, 0]
            if sampling != "with_replacement":
                q = q.scatter(1, tokens[:, child : child + 1], 0.0)
            text[:, child] = 1 + tokens[:, child]
    noise = torch.rand(number, size, generator=generator), torch.empty(number, 4).exponential_(generator=generator)
    index = torch.tensor([own.index(node) if node in own else 0 for node in range(size)]).expand(number, -1)
    q = draft[text[:, own]] if sampling != "top" else torch.zeros(number, 0, 4)
    node, last = ops.tree_sample(
        target[text], tokens, torch.tensor(parents).expand(number, -1), q, index, *noise, sampling
    )
    depth = ops.depths(torch.tensor([parents]))[0][node]
    path, _ = ops.path_to_node(torch.tensor(parents).expand(number, -1), node)
    emitted = torch.where(depth >= 1, tokens.gather(1, path[:, 1:2].clamp(min=0))[:, 0], last)
    second = torch.where(depth >= 2, tokens.gather(1, path[:, 2:3].clamp(min=0))[:, 0], last)
    others = target[1 + emitted].multinomial(1, generator=generator)[:, 0]  # of the next round
    second = torch.where(depth >= 1, second, others)
    assert 0.05 < float((depth > 0).float().mean()) < 0.99
    return 4 * emitted + second, (target[0][:, None] * target[1:]).flatten()


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_200_000_paths_have_the_target_distribution(sampling: str, topology: str) -> None:
    cells, expected = paths(TOPOLOGIES[topology], sampling, 200_000)
    assert total_variation(cells, expected) < TOTAL_VARIATION_OF_200_000_DRAWS
    by_text = {(cell,): probability for cell, probability in enumerate(expected.tolist())}
    assert p_value(((cell,) for cell in cells.tolist()), by_text) > CHI_SQUARE_P_VALUE


def one_child(p: Tensor, q: Tensor, uniform: float, sampling: str) -> tuple[int, int]:
    """The node and token for a child with token 0 and distributions [V], all random numbers else equal."""
    probs = p.expand(1, 2, -1)
    drafts = q[None, None] if sampling != "top" else q[None, None, :][:, :0]
    tree = torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[-1, 0]])
    index, exponential = torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, len(p))
    node, token = ops.tree_sample(probs, *tree, drafts, index, torch.tensor([[0.0, uniform]]), exponential, sampling)
    return int(node), int(token)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_child_is_accepted_below_the_ratio_and_what_is_left_is_drawn_above_it(sampling: str) -> None:
    p, q = torch.tensor([0.4, 0.35, 0.25]), torch.tensor([0.5, 0.4, 0.1])
    ratio = 0.4 if sampling == "top" else 0.8
    assert one_child(p, q, ratio - 1e-4, sampling)[0] == 1
    assert one_child(p, q, ratio + 1e-4, sampling) == (0, 1 if sampling == "top" else 2)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_child_behind_which_nothing_would_be_left_is_accepted(sampling: str) -> None:
    """The target's probability may be a rounding below the draft's, and the random number the greatest there is."""
    p, q = torch.tensor([1 - 2.0**-23, 0.0]), torch.tensor([1.0, 0.0])
    assert one_child(p, q, 1 - 2.0**-24, sampling) == (1, 0)


def test_what_is_no_number_gives_indices_within_bounds() -> None:
    trees = drawn_trees("without_replacement", vocab_size=5, seed=0)
    node, token = ops.tree_sample(torch.full_like(trees.probs, torch.nan), *trees[1:])
    assert bool(((node >= -1) & (node < trees.parents.shape[1]) & (token >= 0) & (token < 5)).all())


def test_rows_of_padding_emit_nothing() -> None:
    trees = drawn_trees("with_replacement", vocab_size=5, seed=1)
    node, token = ops.tree_sample(*trees._replace(parents=torch.full_like(trees.parents, PADDING)))
    assert (node == -1).all()
    assert (token == 0).all()


def test_the_dtype_is_that_of_the_probabilities() -> None:
    trees: SampledTrees = drawn_trees("with_replacement", vocab_size=5, seed=1)
    with pytest.raises(ValueError, match=r"uniform has dtype torch.float64, expected that of probs, torch.float32"):
        ops.tree_sample(*trees._replace(uniform=trees.uniform.double()))
    with pytest.raises(ValueError, match=r"sampling is 'greedy', expected one of top, with_replacement"):
        ops.tree_sample(*trees._replace(sampling="greedy"))
    with pytest.raises(ValueError, match=r"draft_probs has none, but sampling 'with_replacement' needs them"):
        ops.tree_sample(*trees._replace(draft_probs=trees.draft_probs[:, :0]))
