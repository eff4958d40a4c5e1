"""The convolution along the paths of a tree."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from parents import chain, widths
from tolerances import BFLOAT16_ACTIVATED_PAIR, BFLOAT16_PAIR, FLOAT32, FLOAT64, relative_error
from treewy import ops
from treewy.ops import PADDING
from treewy.testing import ConvInputs, OpCase, op_cases


@given(op_cases(max_prefix=0), st.data())
@settings(max_examples=50, deadline=None)
def test_equals_the_convolution_of_each_path(case: OpCase, data: st.DataObject) -> None:
    options = {
        "taps": data.draw(st.integers(1, 5), label="taps"),
        "window": data.draw(st.integers(0, 6), label="window"),
        "bias": data.draw(st.booleans(), label="bias"),
    }
    activation = data.draw(st.sampled_from(["silu", ""]))
    for dtype, bound in ((torch.float64, FLOAT64), (torch.float32, FLOAT32)):
        inputs = case.conv_inputs(dtype, **options)._replace(activation=activation)
        result = ops.tree_conv(*inputs)
        assert result.dtype == dtype
        assert relative_error(result, oracle.conv(*inputs)) <= bound


def sequential(inputs: ConvInputs) -> torch.Tensor:
    """The convolution of a chain as Hugging Face writes it, in the dtype of the inputs."""
    entries = torch.cat([inputs.window, inputs.x.transpose(1, 2)], dim=2)
    bias = inputs.bias if inputs.bias.shape[0] else None
    result = torch.nn.functional.conv1d(entries, inputs.weight[:, None], bias, groups=entries.shape[1])
    result = result[:, :, -inputs.x.shape[1] :].transpose(1, 2)
    return torch.nn.functional.silu(result) if inputs.activation == "silu" else result


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "activation", "bound"),
    [
        (torch.float32, "silu", FLOAT32),
        (torch.bfloat16, "", BFLOAT16_PAIR),
        (torch.bfloat16, "silu", BFLOAT16_ACTIVATED_PAIR),
    ],
    ids=["float32, silu", "bfloat16", "bfloat16, silu"],
)
def test_a_chain_rounds_like_conv1d(dtype: torch.dtype, activation: str, bound: float, bias: bool) -> None:
    case = OpCase((chain(32),) * 2)
    inputs = case.conv_inputs(dtype, bias=bias, channels=24)._replace(activation=activation)
    assert relative_error(ops.tree_conv(*inputs), sequential(inputs)) <= bound


def test_the_activation_acts_on_the_rounded_sum() -> None:
    inputs = OpCase((widths(2, 2),)).conv_inputs(torch.bfloat16)
    plain = ops.tree_conv(*inputs._replace(activation=""))
    assert torch.equal(ops.tree_conv(*inputs), torch.nn.functional.silu(plain))


def test_missing_columns_are_zero() -> None:
    inputs = OpCase((widths(2, 2),)).conv_inputs(window=0)
    filled = inputs._replace(window=inputs.x.new_zeros(1, 5, 6))
    assert torch.equal(ops.tree_conv(*inputs), ops.tree_conv(*filled))


def test_columns_older_than_the_kernel_are_not_read() -> None:
    inputs = OpCase((widths(2, 2),)).conv_inputs(window=6)
    older = inputs.window.clone()
    older[:, :, :3] = float("nan")
    assert torch.equal(ops.tree_conv(*inputs), ops.tree_conv(*inputs._replace(window=older)))


@given(op_cases(max_prefix=0, padding=False), st.data())
@settings(max_examples=25, deadline=None)
def test_changing_a_node_changes_nothing_but_its_descendants(case: OpCase, data: st.DataObject) -> None:
    inputs = case.conv_inputs(torch.float32)
    node = data.draw(st.integers(0, len(case.parents[0]) - 1))
    changed = inputs._replace(x=inputs.x.index_fill(1, torch.tensor(node), -0.75))
    unrelated = ~ops.ancestor_mask(inputs.parents)[:, :, node]
    before, after = ops.tree_conv(*inputs), ops.tree_conv(*changed)
    assert torch.equal(before[unrelated], after[unrelated])
    assert not torch.equal(before[:, node], after[:, node])


@given(op_cases(max_prefix=0))
@settings(max_examples=25, deadline=None)
def test_padding_is_inert_whatever_it_holds(case: OpCase) -> None:
    inputs = case.conv_inputs(torch.float32)
    absent = inputs.parents == PADDING
    x, window = inputs.x.clone(), inputs.window.clone()
    x[absent], window[absent.all(1)] = float("nan"), float("inf")
    result = ops.tree_conv(*inputs._replace(x=x, window=window))
    assert torch.equal(result, ops.tree_conv(*inputs))
    assert (result[absent] == 0).all()
