"""The states of all nodes against the literal recurrence, and what they may and may not depend on."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import oracle
from parents import chain, widths
from snapshots import SnapshotInputs, expected, snapshot_inputs
from tolerances import AMPLIFIED, BFLOAT16_ROUNDING, FLOAT32, FLOAT64, FLOAT64_PAIR, relative_error
from treewy import ops
from treewy.ops import PADDING
from treewy.testing import OpCase, op_cases

NAN = float("nan")
TREE = OpCase((widths(2, 2), (*chain(5), PADDING, 4), widths(6)))


def assert_close_to_oracle(inputs: SnapshotInputs, bound: float) -> None:
    for actual, exact in zip(ops.tree_snapshots(*inputs), expected(inputs), strict=True):
        assert relative_error(actual, exact) <= bound


@given(op_cases(), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_equals_the_recurrence_in_float64_and_float32(case: OpCase, num_earlier: int) -> None:
    inputs = snapshot_inputs(case, num_earlier=num_earlier)
    assert_close_to_oracle(inputs, FLOAT64)
    assert_close_to_oracle(inputs.to(torch.float32, torch.float32), FLOAT32)


def test_write_strengths_of_two_amplify_rounding_no_more_than_the_recurrence() -> None:
    inputs = snapshot_inputs(OpCase((chain(64),), key_dim=128), torch.float32)
    inputs = inputs._replace(
        key=inputs.key[:, :1] + 1e-3 * inputs.key,
        beta=torch.full_like(inputs.beta, 2.0),
        log_decay=torch.full_like(inputs.log_decay, -1e-4),
    )
    exact, recurrence = expected(inputs), expected(inputs, torch.float32)
    for actual, true, own in zip(ops.tree_snapshots(*inputs), exact, recurrence, strict=True):
        assert relative_error(actual, true) <= AMPLIFIED * relative_error(own, true) + FLOAT32


def test_gives_the_output_of_the_solve_and_the_state_of_its_commit() -> None:
    solve = TREE.solve_inputs()
    output, states = ops.tree_snapshots(*snapshot_inputs(TREE))
    solved, pseudo_value, key, _ = ops.tree_wy_solve(*solve)
    assert relative_error(output, solved) <= FLOAT64_PAIR
    node = torch.tensor([6, 4, 3])
    state = ops.tree_wy_commit(solve.committed_state, pseudo_value, key, solve.log_decay, solve.parents, node)
    assert relative_error(states[torch.arange(3), node], state) <= FLOAT64_PAIR


def test_a_tree_grown_in_parts_has_the_bits_of_the_tree_at_once() -> None:
    inputs = snapshot_inputs(OpCase((widths(3, 2, 2), (-1, -1, 0, 0, 1, 1, 1, *range(6, 20), PADDING))), torch.float32)
    output, states = ops.tree_snapshots(*inputs)
    grown = states[:, :0]
    for first, last in ((0, 1), (1, 4), (4, 15), (15, 22)):  # any cut does: parents precede children
        nodes = list(range(first, last))
        part = inputs.nodes(nodes, inputs.parents[:, nodes], grown)
        part_output, part_states = ops.tree_snapshots(*part)
        assert torch.equal(part_output, output[:, nodes])
        grown = torch.cat([grown, part_states], dim=1)
    assert torch.equal(grown, states)


def test_a_path_has_the_same_bits_in_every_tree_whatever_the_states_are_rounded_to() -> None:
    inputs = snapshot_inputs(OpCase((widths(2, 2, 1),)), torch.float32).to(torch.bfloat16, torch.bfloat16)
    output, states = ops.tree_snapshots(*inputs)
    for node in range(11):
        nodes = oracle.path(inputs.parents[0].tolist(), node)
        alone = inputs.nodes(nodes, torch.tensor([chain(len(nodes))]), inputs.earlier_states)
        path_output, path_states = ops.tree_snapshots(*alone)
        assert torch.equal(path_output[:, -1], output[:, node])
        assert torch.equal(path_states[:, -1], states[:, node])


@given(op_cases(), st.integers(0, 3))
@settings(max_examples=15, deadline=None)
def test_each_batch_row_equals_that_row_alone(case: OpCase, num_earlier: int) -> None:
    inputs = snapshot_inputs(case, num_earlier=num_earlier)
    whole = ops.tree_snapshots(*inputs)
    for row in range(len(case.parents)):
        rows = slice(row, row + 1)
        for part, full in zip(ops.tree_snapshots(*inputs.rows(rows)), whole, strict=True):
            assert relative_error(part, full[rows]) <= FLOAT64_PAIR


@given(op_cases(), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_padding_is_inert_whatever_it_holds(case: OpCase, num_earlier: int) -> None:
    inputs = snapshot_inputs(case, torch.float32, num_earlier=num_earlier)
    absent = inputs.parents == PADDING
    poisoned = inputs._replace(**{name: getattr(inputs, name).clone() for name in inputs._fields[:6]})
    for number, x in enumerate(poisoned[:5]):
        x[absent] = NAN if number % 2 else float("inf")
    poisoned.committed_state[absent.all(1)] = NAN
    for clean, result in zip(ops.tree_snapshots(*inputs), ops.tree_snapshots(*poisoned), strict=True):
        assert torch.equal(clean, result)
        assert (result[absent] == 0).all()


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_inputs_lose_only_the_rounding_of_what_is_stored(
    dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    inputs = snapshot_inputs(OpCase((widths(2, 2, 2),))).to(dtype, state_dtype)
    output, states = ops.tree_snapshots(*inputs)
    assert (output.dtype, states.dtype) == (dtype, state_dtype)
    if state_dtype == torch.float32:
        exact_output, exact_states = expected(inputs)
        assert relative_error(output, exact_output) <= BFLOAT16_ROUNDING + FLOAT32
        assert relative_error(states, exact_states) <= FLOAT32
    else:  # from the stored states each node takes one exact step and rounds
        for node, parent in enumerate(inputs.parents[0].tolist()):
            before = inputs.committed_state if parent < 0 else states[:, parent]
            step = inputs.nodes([node], torch.tensor([[-1]]), states[:, :0])._replace(committed_state=before)
            exact_output, exact_states = expected(step)
            assert relative_error(output[:, [node]], exact_output) <= BFLOAT16_ROUNDING + FLOAT32
            assert relative_error(states[:, [node]], exact_states) <= BFLOAT16_ROUNDING + FLOAT32


def test_the_inputs_are_left_as_they_are() -> None:
    inputs = snapshot_inputs(TREE, num_earlier=2)
    copies = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
    ops.tree_snapshots(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True) if isinstance(a, Tensor))


@pytest.mark.parametrize("num_earlier", [0, 2])
def test_the_states_keep_nothing_else_alive(num_earlier: int) -> None:
    inputs = snapshot_inputs(OpCase((widths(2, 2),)), torch.float32, num_earlier=num_earlier)
    _, states = ops.tree_snapshots(*inputs)
    assert states.untyped_storage().nbytes() == states.nbytes
    torch.library.opcheck(torch.ops.treewy.tree_snapshots.default, tuple(inputs), test_utils="test_faketensor")


def test_earlier_states_have_the_dtype_of_the_committed_state() -> None:
    inputs = snapshot_inputs(TREE, torch.float32, num_earlier=2)
    message = r"earlier_states has dtype torch.bfloat16, expected that of committed_state, torch.float32"
    with pytest.raises(ValueError, match=message):
        ops.tree_snapshots(*inputs._replace(earlier_states=inputs.earlier_states.bfloat16()))
