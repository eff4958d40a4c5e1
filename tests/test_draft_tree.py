"""`DraftTree`: what it accepts, what it makes of it, and what it says about the rest."""

from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from treewy import DraftTree

WIDTHS = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@st.composite
def forests(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [B, N], parents [B, N] and nodes a row [B]; behind its own nodes a row's parents are anything."""
    batch, size = draw(st.integers(1, 3)), draw(st.integers(0, 7))
    num_nodes = [draw(st.integers(0, size)) for _ in range(batch)]
    parents = [
        [draw(st.integers(-1, node - 1)) if node < count else draw(st.integers(-9, 9)) for node in range(size)]
        for count in num_nodes
    ]
    return torch.arange(batch * size).reshape(batch, size), ids(parents).reshape(batch, size), ids(num_nodes)


def ids(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def level_sizes(widths: Sequence[int]) -> list[int]:
    return [prod(widths[: depth + 1]) for depth in range(len(widths))]


def test_counts_that_are_no_tensor_are_refused() -> None:
    with pytest.raises(TypeError, match=r"num_nodes 1 must be a tensor.*torch\.tensor"):
        DraftTree(torch.tensor([[5]]), torch.tensor([-1]), num_nodes=1)  # type: ignore[arg-type]


# From widths.


@given(WIDTHS, st.integers(1, 3))
def test_every_node_of_a_depth_has_the_children_that_the_widths_say(widths: list[int], batch: int) -> None:
    size = sum(level_sizes(widths))
    tree = DraftTree.from_widths(widths, torch.zeros(batch, size).long())
    assert tree.parents.shape == (batch, size)
    assert torch.equal(tree.num_nodes, torch.full((batch,), size))
    parents = tree.parents[0].tolist()
    assert tree.parents.tolist() == [parents] * batch
    depth = {-1: 0}
    for node, parent in enumerate(parents):
        depth[node] = depth[parent] + 1
    for node in (-1, *range(size)):
        expected = widths[depth[node]] if depth[node] < len(widths) else 0
        assert parents.count(node) == expected


@given(WIDTHS)
def test_nodes_made_from_widths_stand_level_by_level_and_siblings_together(widths: list[int]) -> None:
    sizes = level_sizes(widths)
    parents = DraftTree.from_widths(widths, torch.zeros(1, sum(sizes)).long()).parents[0].tolist()
    assert parents == sorted(parents)
    starts = [-1, *(sum(sizes[:depth]) for depth in range(len(sizes)))]
    for depth, size in enumerate(sizes):
        level = parents[starts[depth + 1] : starts[depth + 1] + size]
        assert all(starts[depth] <= parent < starts[depth + 1] for parent in level) or depth == 0
        assert depth > 0 or level == [-1] * size


@given(st.integers(1, 8))
def test_widths_of_one_make_a_chain(length: int) -> None:
    tree = DraftTree.from_widths((1,) * length, torch.zeros(1, length).long())
    assert tree.parents.tolist() == [list(range(-1, length - 1))]


def test_the_example_of_the_design_has_39_nodes() -> None:
    assert DraftTree.from_widths((3, 3, 3), torch.zeros(2, 39).long()).parents.shape == (2, 39)


@pytest.mark.parametrize("widths", [(), (0,), (2, 0, 1), (3, -1), (2, 1.5), (2, "1")])
def test_widths_that_are_not_positive_integers_raise(widths: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"widths .* must be positive integers") as raised:
        DraftTree.from_widths(widths, torch.zeros(1, 2).long())
    assert str(widths) in str(raised.value)
    assert "(1, 1, 1) is a chain" in str(raised.value)


@pytest.mark.parametrize("shape", [(1, 3), (2, 5), (4,), (1, 4, 1)])
def test_tokens_that_do_not_fit_the_widths_raise(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"widths \(2, 1\) make 4 nodes, but token_ids is") as raised:
        DraftTree.from_widths((2, 1), torch.zeros(shape).long())
    assert str(list(shape)) in str(raised.value)


# From parents.


@given(forests())
def test_every_topological_forest_is_kept_as_given(forest: tuple[Tensor, Tensor, Tensor]) -> None:
    token_ids, parents, num_nodes = forest
    tree = DraftTree(token_ids, parents, num_nodes=num_nodes)
    assert torch.equal(tree.token_ids, token_ids)
    assert torch.equal(tree.parents, parents)
    assert torch.equal(tree.num_nodes, num_nodes)
    assert tree.draft_probs is None
    assert tree.sampling == "top"


@given(forests(), st.data())
def test_one_topology_stands_for_every_row(forest: tuple[Tensor, Tensor, Tensor], data: st.DataObject) -> None:
    token_ids, parents, _ = forest
    row = parents[0].clamp(min=-1).minimum(torch.arange(-1, parents.shape[1] - 1))
    tree = DraftTree(token_ids, row)
    assert torch.equal(tree.parents, row.expand_as(token_ids))
    assert torch.equal(tree.num_nodes, torch.full((len(token_ids),), len(row)))


@given(forests(), st.data())
def test_a_wrong_parent_raises_for_a_real_node_and_not_for_padding(
    forest: tuple[Tensor, Tensor, Tensor], data: st.DataObject
) -> None:
    token_ids, parents, num_nodes = forest
    if token_ids.numel() == 0:
        return
    row = data.draw(st.integers(0, token_ids.shape[0] - 1))
    node = data.draw(st.integers(0, token_ids.shape[1] - 1))
    wrong = data.draw(st.one_of(st.integers(-5, -2), st.integers(node, node + 5)))
    parents[row, node] = wrong
    if node >= num_nodes[row]:
        assert torch.equal(DraftTree(token_ids, parents, num_nodes=num_nodes).parents, parents)
        return
    with pytest.raises(ValueError, match=f"the parent of node {node} in row {row} is {wrong}; parents must be -1 or"):
        DraftTree(token_ids, parents, num_nodes=num_nodes)


def test_a_batch_without_drafts_is_a_tree() -> None:
    tree = DraftTree(torch.zeros(3, 0).long(), torch.zeros(0).long())
    assert tree.parents.shape == (3, 0)
    assert tree.num_nodes.tolist() == [0, 0, 0]


def test_a_tree_cannot_be_changed() -> None:
    tree = DraftTree(ids([[1]]), ids([-1]))
    with pytest.raises(FrozenInstanceError):
        tree.token_ids = ids([[2]])  # type: ignore[misc]


def test_distributions_are_those_of_the_parents_of_real_nodes_in_their_order() -> None:
    """Also where a padding node names a parent that no real node has."""
    parents = torch.tensor([[-1, -1, 1, 0], [-1, 0, 1, 2]])
    probs = torch.eye(4).expand(2, 4, 4)  # the distribution in row n of draft_probs is certain of token n
    tree = DraftTree(
        torch.zeros(2, 4).long(),
        parents,
        num_nodes=torch.tensor([3, 4]),
        draft_probs=probs,
        sampling="without_replacement",
    )
    for row, of_parents in enumerate([{-1: 0, 1: 1}, {-1: 0, 0: 1, 1: 2, 2: 3}]):
        for parent, expected in of_parents.items():
            after = tree.probs_after(torch.tensor([row]), torch.tensor([parent]))
            assert after.argmax(dim=1).tolist() == [expected]


def test_distributions_and_sampling_are_kept() -> None:
    probs = torch.full((1, 1, 4), 0.25)
    tree = DraftTree(ids([[1, 2]]), ids([-1, -1]), draft_probs=probs, sampling="without_replacement")
    assert tree.draft_probs is probs
    assert tree.sampling == "without_replacement"


TOKENS, PARENTS = ids([[1, 2, 3], [4, 5, 6]]), ids([-1, 0, 0])
INVALID: list[tuple[str, dict[str, Any], str]] = [
    ("tokens of one row without a batch", {"token_ids": TOKENS[0]}, r"token_ids must be \[B, N\], not \[3\]"),
    ("too few parents", {"parents": PARENTS[:2]}, r"parents \[2, 2\] must be \[N\] or \[B, N\] for token_ids \[2, 3\]"),
    ("parents of another batch", {"parents": PARENTS.expand(3, 3)}, r"parents \[3, 3\] must be .* token_ids \[2, 3\]"),
    ("parents without a dimension", {"parents": ids(-1)}, r"parents \[\] must be \[N\] or \[B, N\]"),
    ("one count for two rows", {"num_nodes": ids([3])}, r"num_nodes \[1\] must be \[2\], one count a row"),
    ("a count without a dimension", {"num_nodes": ids(3)}, r"num_nodes \[\] must be \[2\]"),
    ("too large a count", {"num_nodes": ids([3, 4])}, r"num_nodes \[3, 4\] must lie between 0 and the 3 nodes"),
    ("a negative count", {"num_nodes": ids([-1, 3])}, r"num_nodes \[-1, 3\] must lie between 0 and the 3 nodes"),
    ("tokens in int32", {"token_ids": TOKENS.int()}, r"token_ids must be int64, not torch.int32; call \.long\(\)"),
    ("parents in floating point", {"parents": PARENTS.float()}, r"parents must be int64, not torch.float32; call"),
    ("counts in int32", {"num_nodes": ids([3, 3]).int()}, r"num_nodes must be int64, not torch.int32; call"),
    ("an unknown sampling", {"sampling": "greedy"}, r"sampling 'greedy' must be 'top', 'with_replacement' or"),
    ("parents on another device", {"parents": PARENTS.to("meta")}, r"parents is on meta but token_ids is on cpu; move"),
    ("counts elsewhere", {"num_nodes": ids([3, 3]).to("meta")}, r"num_nodes is on meta but token_ids is on cpu; move"),
    (
        "a node before its parent",
        {"parents": ids([-1, 2, 0])},
        "the parent of node 1 in row 0 is 2; .*after its parent",
    ),
    ("a node that is its own parent", {"parents": ids([-1, 1, 0])}, "the parent of node 1 in row 0 is 1; .*earlier"),
    (
        "a parent of -2",
        {"parents": ids([[-1, 0, 0], [-1, 0, -2]])},
        "the parent of node 2 in row 1 is -2; .*must be -1",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), [case[1:] for case in INVALID], ids=[case[0] for case in INVALID])
def test_what_is_no_tree_raises(arguments: dict[str, Any], message: str) -> None:
    arguments = {"token_ids": TOKENS, "parents": PARENTS} | arguments
    with pytest.raises(ValueError, match=message):
        DraftTree(arguments.pop("token_ids"), arguments.pop("parents"), **arguments)
