"""Attention from the nodes of a tree to a prefix and to their own paths."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import oracle
from parents import widths
from tolerances import BFLOAT16_ROUNDING, FLOAT32, FLOAT64, FLOAT64_PAIR, relative_error
from treewy import ops
from treewy.ops import PADDING
from treewy.testing import AttentionInputs, OpCase, op_cases

WINDOWS = st.sampled_from([0, 1, 2, 3, 5, 8, 11, 14, 2**31, 2**63 - 1])
"""None; one token, less than trees are deep, about what a prefix has, more than there is, and than 32 bits hold."""


@given(op_cases(max_prefix=0), st.sampled_from([0, 1, 11]), WINDOWS)
@settings(max_examples=80, deadline=None)
def test_equals_attention_over_each_path(case: OpCase, cache_length: int, window: int) -> None:
    for dtype, bound in ((torch.float64, FLOAT64), (torch.float32, FLOAT32)):
        inputs = case.attention_inputs(dtype, cache_length=cache_length, window=window)
        result = ops.tree_attention(*inputs)
        assert result.dtype == dtype
        assert relative_error(result, oracle.attention(*inputs)) <= bound


def test_low_precision_inputs_lose_only_the_rounding_of_the_output() -> None:
    inputs = OpCase((widths(2, 2),) * 2).attention_inputs(torch.bfloat16)
    assert relative_error(ops.tree_attention(*inputs), oracle.attention(*inputs)) <= BFLOAT16_ROUNDING + FLOAT32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_columns_outside_the_prefix_do_not_matter_while_finite(dtype: torch.dtype) -> None:
    inputs = OpCase((widths(2, 2),) * 3, seed=5).attention_inputs(dtype)
    largest = torch.finfo(dtype).max
    outside = inputs.key_cache == 1e4 if dtype == torch.float32 else inputs.key_cache > 1e3
    filled = inputs._replace(
        key_cache=inputs.key_cache.masked_fill(outside, largest),
        value_cache=inputs.value_cache.masked_fill(outside, -largest),
    )
    assert outside.any()
    assert torch.equal(ops.tree_attention(*inputs), ops.tree_attention(*filled))


@given(op_cases(max_prefix=0, padding=False), WINDOWS, st.data())
@settings(max_examples=40, deadline=None)
def test_changing_a_node_changes_nothing_but_its_descendants(case: OpCase, window: int, data: st.DataObject) -> None:
    """Of these as many generations as the window has."""
    inputs = case.attention_inputs(torch.float32, window=window)
    node = data.draw(st.integers(0, len(case.parents[0]) - 1))
    changed = inputs._replace(
        **{name: getattr(inputs, name).index_fill(1, torch.tensor(node), -0.75) for name in ("query", "key", "value")}
    )
    depth = ops.depths(inputs.parents)
    unrelated = ~ops.ancestor_mask(inputs.parents)[:, :, node]
    if window:
        unrelated |= depth - depth[:, node, None] >= window
    before, after = ops.tree_attention(*inputs), ops.tree_attention(*changed)
    assert torch.equal(before[unrelated], after[unrelated])
    assert not torch.equal(before[:, node], after[:, node])


@given(op_cases(max_prefix=0), WINDOWS, st.integers(0, 10))
@settings(max_examples=40, deadline=None)
def test_changing_a_column_changes_no_bit_where_it_is_not_seen(case: OpCase, window: int, column: int) -> None:
    inputs = case.attention_inputs(torch.float32, window=window)
    changed = inputs._replace(
        **{
            name: getattr(inputs, name).index_fill(2, torch.tensor(column), -0.75)
            for name in ("key_cache", "value_cache")
        }
    )
    depth, stop = ops.depths(inputs.parents), (inputs.prefix_start + inputs.prefix_length)[:, None]
    seen = (column >= inputs.prefix_start[:, None]) & (column < stop) & (depth >= 0)
    if window:
        seen &= stop + depth - column < window
    before, after = ops.tree_attention(*inputs), ops.tree_attention(*changed)
    assert torch.equal(before[~seen], after[~seen])
    assert (before != after).flatten(2).any(-1)[seen].all()


@given(op_cases(max_prefix=0))
@settings(max_examples=15, deadline=None)
def test_a_window_of_the_longest_text_gives_the_bits_without_one(case: OpCase) -> None:
    inputs = case.attention_inputs(torch.float32)
    longest = int((inputs.prefix_length[:, None] + ops.depths(inputs.parents)).max()) + 1
    expected = ops.tree_attention(*inputs)
    for window in (longest, longest + 1):
        assert torch.equal(ops.tree_attention(*inputs._replace(window=max(window, 1))), expected)


@given(op_cases(max_prefix=0), WINDOWS)
@settings(max_examples=25, deadline=None)
def test_padding_is_inert_whatever_it_holds(case: OpCase, window: int) -> None:
    inputs = case.attention_inputs(torch.float32, window=window)
    absent = inputs.parents == PADDING
    poisoned = {name: getattr(inputs, name).clone() for name in ("query", "key", "value")}
    for x in poisoned.values():
        x[absent] = float("nan")
    result = ops.tree_attention(*inputs._replace(**poisoned))
    assert torch.equal(result, ops.tree_attention(*inputs))
    assert (result[absent] == 0).all()


@given(op_cases(max_prefix=0), WINDOWS)
@settings(max_examples=15, deadline=None)
def test_each_batch_row_equals_that_row_alone(case: OpCase, window: int) -> None:
    inputs = case.attention_inputs(window=window)
    whole = ops.tree_attention(*inputs)
    for row in range(len(case.parents)):
        rows = slice(row, row + 1)
        alone = AttentionInputs(*(x[rows] if isinstance(x, Tensor) else x for x in inputs))
        assert relative_error(ops.tree_attention(*alone), whole[rows]) <= FLOAT64_PAIR


@pytest.mark.parametrize("window", [0, 4])
def test_moving_the_prefix_within_the_cache_changes_nothing(window: int) -> None:
    inputs = (
        OpCase((widths(2, 2),))
        .attention_inputs(window=window)
        ._replace(prefix_start=torch.tensor([0]), prefix_length=torch.tensor([6]))
    )
    moved = inputs._replace(
        key_cache=inputs.key_cache.roll(5, 2), value_cache=inputs.value_cache.roll(5, 2), prefix_start=torch.tensor([5])
    )
    assert relative_error(ops.tree_attention(*moved), ops.tree_attention(*inputs)) <= FLOAT64_PAIR
