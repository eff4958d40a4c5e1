"""Moving the keys and values of the accepted paths next to the committed ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from parents import chain, widths
from store_commits import Accepted, accepted, kv_commit_inputs, same_bits
from treewy import ops
from treewy.ops import PADDING
from treewy.testing import OpCase


@given(accepted(), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=60, deadline=None)
def test_moves_the_path_and_nothing_else(case: Accepted, dtype: torch.dtype) -> None:
    inputs = kv_commit_inputs(case, dtype)
    rest = inputs[2:]
    expected = oracle.kv_commit(inputs.key_pool, *rest), oracle.kv_commit(inputs.value_pool, *rest)
    assert ops.tree_kv_commit_(*inputs) is None
    assert same_bits(inputs.key_pool, expected[0])
    assert same_bits(inputs.value_pool, expected[1])


def test_each_node_of_the_path_moves_to_a_place_that_the_next_one_leaves() -> None:
    """Written from the last to the first, node 3 would be lost: node 4 goes to its place."""
    parents = (-1, -1, 1, 2, 3)
    inputs = kv_commit_inputs(Accepted(OpCase((parents,)), (4,), (0,), 1))
    before = inputs.key_pool.clone()
    ops.tree_kv_commit_(*inputs)
    assert same_bits(inputs.key_pool[:, :, :, :4], before[:, :, :, 1:])
    assert same_bits(inputs.key_pool[:, :, :, 4], before[:, :, :, 4])


def test_an_accepted_chain_is_in_its_place_already() -> None:
    inputs = kv_commit_inputs(Accepted(OpCase((chain(7),)), (4,), (0,), 1))
    before = inputs.key_pool.clone()
    ops.tree_kv_commit_(*inputs)
    assert same_bits(inputs.key_pool, before)


@pytest.mark.parametrize("start", [-5, 1_000_000], ids=["below", "beyond"])
def test_a_row_without_a_slot_may_start_anywhere(start: int) -> None:
    case = Accepted(OpCase((widths(2, 2), (-1, PADDING, 0, 2, 3, 4, 5), widths(2, 2))), (6, 6, -1), (-1, 1, 0), 3)
    inputs = kv_commit_inputs(case)
    expected = oracle.kv_commit(inputs.key_pool, *inputs[2:])
    anywhere = inputs._replace(start=torch.tensor([start, 1, start]))
    ops.tree_kv_commit_(*anywhere)
    assert same_bits(inputs.key_pool, expected)


@pytest.mark.parametrize("slots", [(-1, -1), (-1, 1)], ids=["no slot", "no node"])
def test_pools_where_nothing_commits_stay_bit_for_bit(slots: tuple[int, ...]) -> None:
    inputs = kv_commit_inputs(Accepted(OpCase((widths(2, 2),) * 2), (6, -1), slots, 2))
    inputs.key_pool[:, 0, 0, 0, :2] = torch.tensor([-0.0, torch.nan])
    before = inputs.key_pool.clone(), inputs.value_pool.clone()
    ops.tree_kv_commit_(*inputs)
    assert same_bits(inputs.key_pool, before[0])
    assert same_bits(inputs.value_pool, before[1])
