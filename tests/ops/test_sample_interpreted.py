"""The kernel of `tree_sample`, interpreted, chooses what the reference chooses with equal random numbers."""

import pytest
import torch

pytest.importorskip("triton", reason="kernels need the triton package")

from interpreted import run_interpreted
from sampled_trees import drawn_trees
from treewy import ops
from treewy.ops import _sample
from treewy.ops._sample import SAMPLINGS


@pytest.mark.parametrize("block", [8, 4096])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_chooses_as_the_reference(sampling: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of vocabularies that fill a part of a block, one, and several."""
    monkeypatch.setattr(_sample, "_BLOCK", block)
    seen = set()
    for seed in range(20):
        trees = drawn_trees(sampling, vocab_size=(3, 8, 21, 64)[seed % 4], seed=seed)
        expected = ops.tree_sample(*trees)
        for ours, right in zip(run_interpreted(ops.tree_sample, *trees), expected, strict=True):
            assert torch.equal(ours, right)
        seen |= {*expected[0].tolist()}
    assert len(seen) > 4


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_child_behind_which_nothing_would_be_left_is_accepted(sampling: str) -> None:
    p, q = (torch.tensor([[[x, 0.0]]]) for x in (1 - 2.0**-23, 1.0))
    tree = torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[-1, 0]])
    rest = torch.zeros(1, 2, dtype=torch.int64), torch.full((1, 2), 1 - 2.0**-24), torch.ones(1, 2), sampling
    drafts = q[:, :0] if sampling == "top" else q
    node, token = run_interpreted(ops.tree_sample, p.expand(1, 2, 2), *tree, drafts, *rest)
    assert (int(node), int(token)) == (1, 0)


def test_what_is_no_number_gives_indices_within_bounds() -> None:
    for sampling in SAMPLINGS:
        trees = drawn_trees(sampling, vocab_size=5, seed=0)
        node, token = run_interpreted(ops.tree_sample, torch.full_like(trees.probs, torch.nan), *trees[1:])
        assert bool(((node >= -1) & (node < trees.parents.shape[1]) & (token >= 0) & (token < 5)).all())
