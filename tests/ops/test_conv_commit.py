"""Advancing the convolution windows of a pool along the accepted paths."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from parents import chain, widths
from store_commits import Accepted, accepted, conv_commit_inputs, same_bits
from tolerances import FLOAT64_PAIR, relative_error
from treewy import ops
from treewy.testing import OpCase

NAN = float("nan")


@given(accepted(), st.integers(1, 6), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
@settings(max_examples=60, deadline=None)
def test_appends_the_path_and_writes_no_slot_but_those_of_the_rows_that_commit(
    case: Accepted, window: int, dtype: torch.dtype
) -> None:
    inputs = conv_commit_inputs(case, dtype, window=window)
    expected = oracle.conv_commit(*inputs)
    assert ops.tree_conv_commit_(*inputs) is None
    assert same_bits(inputs.window_pool, expected)


@pytest.mark.parametrize("window", [3, 4, 6])
def test_the_next_tree_sees_what_its_own_nodes_would_have_seen(window: int) -> None:
    """Convolving below the accepted node equals convolving a tree against the new window."""
    first, then = (-1, 0, 0, 2), (-1, 0, 0)
    joined = (*first, *(3 if parent == -1 else parent + 4 for parent in then))
    conv = OpCase((joined,)).conv_inputs(window=window)
    pool = conv.window.clone()[None]
    parents, accepted_node = torch.tensor([first]), torch.tensor([3])
    ops.tree_conv_commit_(pool, torch.tensor([0]), conv.x[None, :, :4], parents, accepted_node)
    after = conv._replace(x=conv.x[:, 4:], window=pool[0], parents=torch.tensor([then]))
    assert relative_error(ops.tree_conv(*after), ops.tree_conv(*conv)[:, 4:]) <= FLOAT64_PAIR


def test_columns_take_the_dtype_of_the_pool() -> None:
    inputs = conv_commit_inputs(Accepted(OpCase((chain(6),)), (2,), (0,), 1), torch.bfloat16)
    wide = inputs._replace(window_pool=inputs.window_pool.float())
    ops.tree_conv_commit_(*inputs)
    ops.tree_conv_commit_(*wide)
    assert same_bits(wide.window_pool, inputs.window_pool.float())


@pytest.mark.parametrize("slots", [(0, -1, -1), (-1, 0, -1), (-1, -1, 0), (1, -1, 2)], ids=str)
def test_rows_without_a_slot_do_not_alias_slot_0(slots: tuple[int, ...]) -> None:
    inputs = conv_commit_inputs(Accepted(OpCase((widths(2, 2),) * 3), (6, 6, 3), slots, 3))
    expected = oracle.conv_commit(*inputs)
    ops.tree_conv_commit_(*inputs)
    assert same_bits(inputs.window_pool, expected)


def test_a_pool_where_nothing_commits_stays_bit_for_bit() -> None:
    inputs = conv_commit_inputs(Accepted(OpCase((chain(3),) * 2), (-1, 2), (1, -1), 2))
    inputs.window_pool[:, 0, 0, :2] = torch.tensor([-0.0, NAN])
    before = inputs.window_pool.clone()
    ops.tree_conv_commit_(*inputs)
    assert same_bits(inputs.window_pool, before)
