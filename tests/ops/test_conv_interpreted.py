"""The kernels of the convolution and of the two small commits, interpreted in float32, against the oracle."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="kernels need the triton package")

import oracle
from interpreted import run_interpreted
from parents import chain, widths
from store_commits import Accepted, accepted, conv_commit_inputs, kv_commit_inputs, same_bits
from tolerances import FLOAT32, relative_error
from treewy import ops
from treewy.ops import PADDING
from treewy.testing import OpCase, op_cases


@given(op_cases(max_prefix=0), st.data())
@settings(max_examples=25, deadline=None)
def test_the_convolution_equals_that_of_each_path_whatever_padding_holds(case: OpCase, data: st.DataObject) -> None:
    taps, window = data.draw(st.integers(1, 5), label="taps"), data.draw(st.integers(0, 6), label="window")
    inputs = case.conv_inputs(torch.float32, taps=taps, window=window, bias=data.draw(st.booleans(), label="bias"))
    inputs = inputs._replace(activation=data.draw(st.sampled_from(["silu", ""])))
    inputs.x[inputs.parents == PADDING] = torch.nan
    assert relative_error(run_interpreted(ops.tree_conv, *inputs), oracle.conv(*inputs)) <= FLOAT32


@pytest.mark.parametrize("taps", [4, 8])
@pytest.mark.parametrize("parents", [widths(1, 2), chain(40), widths(3, 3, 3)], ids=["4", "chain of 40", "40"])
def test_several_programs_share_nodes_and_channels(parents: tuple[int, ...], taps: int) -> None:
    inputs = OpCase((parents,) * 2).conv_inputs(torch.float32, taps=taps, channels=150)
    assert relative_error(run_interpreted(ops.tree_conv, *inputs), oracle.conv(*inputs)) <= FLOAT32


def test_columns_older_than_the_kernel_are_not_read() -> None:
    inputs = OpCase((widths(2, 2),)).conv_inputs(torch.float32, window=6)
    inputs.window[:, :, :3] = torch.nan
    assert run_interpreted(ops.tree_conv, *inputs).isfinite().all()


def test_inputs_of_the_convolution_may_be_views() -> None:
    inputs = OpCase((widths(2, 2),) * 2).conv_inputs(torch.float32)
    nodes = torch.cat([inputs.window, inputs.x.transpose(1, 2)], dim=-1)  # side by side, as Hugging Face has them
    side_by_side = inputs._replace(x=nodes[:, :, 4:].transpose(1, 2), window=nodes[:, :, :4])
    wide = inputs._replace(x=torch.cat([inputs.x, inputs.x, inputs.x], dim=-1)[:, :, 5:10])
    shared = inputs._replace(parents=inputs.parents[:1].int().expand(2, -1))
    for views in (side_by_side, wide, shared):
        assert same_bits(run_interpreted(ops.tree_conv, *views), run_interpreted(ops.tree_conv, *inputs))


@given(accepted(), st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_windows_advance_along_the_path_and_nothing_else_does(case: Accepted, window: int) -> None:
    inputs = conv_commit_inputs(case, window=window)
    expected = oracle.conv_commit(*inputs)
    run_interpreted(ops.tree_conv_commit_, *inputs)
    assert same_bits(inputs.window_pool, expected)


def test_windows_of_many_channels_in_a_pool_with_gaps() -> None:
    inputs = conv_commit_inputs(Accepted(OpCase((widths(2, 2), chain(7))), (6, 3), (2, 0), 4), channels=300)
    expected = oracle.conv_commit(*inputs)
    pool = inputs.window_pool.new_zeros(3, 4, 300, 9)[..., 2:6].copy_(inputs.window_pool)
    run_interpreted(ops.tree_conv_commit_, *inputs._replace(window_pool=pool))
    assert same_bits(pool, expected)


@given(accepted())
@settings(max_examples=25, deadline=None)
def test_keys_and_values_of_the_path_move_and_nothing_else_does(case: Accepted) -> None:
    inputs = kv_commit_inputs(case)
    expected = oracle.kv_commit(inputs.key_pool, *inputs[2:]), oracle.kv_commit(inputs.value_pool, *inputs[2:])
    run_interpreted(ops.tree_kv_commit_, *inputs)
    assert same_bits(inputs.key_pool, expected[0])
    assert same_bits(inputs.value_pool, expected[1])


@pytest.mark.parametrize("head_dim", [64, 96, 192])
def test_heads_of_any_width_in_pools_of_different_strides(head_dim: int) -> None:
    case = Accepted(OpCase((widths(3, 3, 3), tuple(i - 2 if i > 1 else -1 for i in range(40)))), (39, 39), (2, 0), 3)
    inputs = kv_commit_inputs(case, head_dim=head_dim)
    expected = oracle.kv_commit(inputs.key_pool, *inputs[2:]), oracle.kv_commit(inputs.value_pool, *inputs[2:])
    column_first = inputs.key_pool.transpose(2, 3).contiguous().transpose(2, 3)
    run_interpreted(ops.tree_kv_commit_, *inputs._replace(key_pool=column_first))
    assert same_bits(column_first, expected[0])
    assert same_bits(inputs.value_pool, expected[1])
