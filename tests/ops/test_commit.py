"""Folding a path into the state, as a function and in place on a pool."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import oracle
from parents import chain, widths
from tolerances import COMMITTED_STATE_BFLOAT16_INPUTS, FLOAT32, FLOAT64, FLOAT64_PAIR, relative_error
from treewy import ops
from treewy.ops import PADDING
from treewy.testing import OpCase, op_cases

NAN = float("nan")


class CommitInputs(NamedTuple):
    committed_state: Tensor
    pseudo_value: Tensor
    key: Tensor
    log_decay: Tensor
    parents: Tensor
    accepted_node: Tensor


def commit_inputs(case: OpCase, accepted: list[int], dtype: torch.dtype = torch.float64) -> CommitInputs:
    inputs = case.solve_inputs(dtype)
    key = torch.nn.functional.normalize(inputs.key, dim=-1)
    state, node = inputs.committed_state, torch.tensor(accepted)
    return CommitInputs(state, inputs.value, key, inputs.log_decay, inputs.parents, node)


def draw_accepted(data: st.DataObject, case: OpCase) -> list[int]:
    """Any node of each row, padding too, or none."""
    return [data.draw(st.integers(-1, len(case.parents[0]) - 1)) for _ in case.parents]


@given(op_cases(max_prefix=0), st.data())
@settings(max_examples=40, deadline=None)
def test_equals_writing_the_path_one_node_at_a_time(case: OpCase, data: st.DataObject) -> None:
    accepted = draw_accepted(data, case)
    for dtype, bound in ((torch.float64, FLOAT64), (torch.float32, FLOAT32)):
        inputs = commit_inputs(case, accepted, dtype)
        assert relative_error(ops.tree_wy_commit(*inputs), oracle.commit(*inputs)) <= bound


@pytest.mark.parametrize("parents", [chain(64), widths(3, 3, 3), widths(2, 2)], ids=["chain", "tree", "case"])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, FLOAT64), (torch.float32, FLOAT32)], ids=["float64", "float32"]
)
def test_solve_then_commit_gives_the_state_of_the_recurrence(
    parents: tuple[int, ...], dtype: torch.dtype, bound: float
) -> None:
    inputs = OpCase((parents, parents), key_dim=16).solve_inputs(dtype)
    states = oracle.solve(*inputs)[4]
    _, pseudo_value, key, _ = ops.tree_wy_solve(*inputs)
    last = len(parents) - 1
    for nodes in ([last, 0], [last // 2, last]):
        committed = ops.tree_wy_commit(
            inputs.committed_state, pseudo_value, key, inputs.log_decay, inputs.parents, torch.tensor(nodes)
        )
        expected = torch.stack([states[row][node] for row, node in enumerate(nodes)])
        assert relative_error(committed, expected) <= bound


def test_gates_of_every_size_in_one_path() -> None:
    small = -torch.logspace(-6, 0, 34, dtype=torch.float64)
    gates = torch.cat([torch.full((30,), -30.0, dtype=torch.float64), small])
    inputs = commit_inputs(OpCase((chain(64),)), [63])
    inputs = inputs._replace(log_decay=gates[None, :, None].expand_as(inputs.log_decay))
    assert relative_error(ops.tree_wy_commit(*inputs), oracle.commit(*inputs)) <= FLOAT64
    inputs = CommitInputs(*(x.float() if x.is_floating_point() else x for x in inputs))
    assert relative_error(ops.tree_wy_commit(*inputs), oracle.commit(*inputs)) <= FLOAT32


def test_two_commits_equal_one() -> None:
    inputs = commit_inputs(OpCase((chain(9),)), [8])
    once = ops.tree_wy_commit(*inputs)
    for cut in range(1, 9):
        part = [x[:, :cut] for x in inputs[1:5]]
        rest = [x[:, cut:] for x in inputs[1:4]]
        state = ops.tree_wy_commit(inputs.committed_state, *part, torch.tensor([cut - 1]))
        twice = ops.tree_wy_commit(state, *rest, torch.tensor([chain(9 - cut)]), torch.tensor([8 - cut]))
        assert relative_error(twice, once) <= FLOAT64_PAIR


def test_only_the_accepted_path_matters() -> None:
    inputs = commit_inputs(OpCase((widths(2, 2),)), [6], torch.float32)
    expected = ops.tree_wy_commit(*inputs)
    off_path = [1, 3, 4, 5]
    poisoned = [x.index_fill(1, torch.tensor(off_path), NAN) for x in inputs[1:4]]
    assert torch.equal(ops.tree_wy_commit(inputs[0], *poisoned, *inputs[4:]), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_that_accepts_nothing_keeps_its_state_bit_for_bit(dtype: torch.dtype) -> None:
    inputs = commit_inputs(OpCase((chain(4), chain(4), (-1, PADDING, 0, 2))), [-1, 2, 1], torch.float32)
    state = inputs.committed_state.to(dtype)
    state[0, 0, 0, :2] = torch.tensor([-0.0, NAN], dtype=dtype)
    poisoned = [x.clone() for x in inputs[1:4]]
    for x in poisoned:
        x[0] = NAN
        x[2, 1] = NAN
    result = ops.tree_wy_commit(state, *poisoned, *inputs[4:])
    assert result.dtype == dtype
    assert result.data_ptr() != state.data_ptr()
    assert result[0].view(torch.uint8).equal(state[0].view(torch.uint8))
    assert result[2].view(torch.uint8).equal(state[2].view(torch.uint8))
    assert result[1].isfinite().all()
    assert not torch.equal(result[1], state[1])


def test_the_state_error_after_a_commit_of_bfloat16_inputs_is_that_of_float32() -> None:
    inputs = OpCase((widths(2, 2), chain(7)), key_dim=64, value_dim=32).solve_inputs(torch.bfloat16)
    inputs = inputs._replace(committed_state=inputs.committed_state.float(), log_decay=inputs.log_decay.float())
    expected = oracle.solve(*inputs)[4]
    _, pseudo_value, key, _ = ops.tree_wy_solve(*inputs)
    rest = (key, inputs.log_decay, inputs.parents, torch.tensor([6, 6]))
    state = ops.tree_wy_commit(inputs.committed_state, pseudo_value, *rest)
    assert relative_error(state, torch.stack([expected[0][6], expected[1][6]])) <= COMMITTED_STATE_BFLOAT16_INPUTS
    # The bound is sharp enough to see pseudo-values that were kept in bfloat16.
    rounded = ops.tree_wy_commit(inputs.committed_state, pseudo_value.bfloat16(), *rest)
    assert relative_error(rounded, torch.stack([expected[0][6], expected[1][6]])) > COMMITTED_STATE_BFLOAT16_INPUTS


@given(op_cases(max_prefix=0), st.data())
@settings(max_examples=40, deadline=None)
def test_in_place_writes_the_slots_of_the_rows_that_commit_and_no_other(case: OpCase, data: st.DataObject) -> None:
    inputs = commit_inputs(case, draw_accepted(data, case), torch.float32)
    batch = len(case.parents)
    num_slots = batch + data.draw(st.integers(0, 4))
    slots = [s if data.draw(st.booleans()) else -1 for s in data.draw(st.permutations(range(num_slots)))[:batch]]
    pool = torch.randn(num_slots, *inputs.committed_state.shape[1:], generator=torch.Generator().manual_seed(0))
    expected = pool.clone()
    states = ops.tree_wy_commit(pool[[max(slot, 0) for slot in slots]], *inputs[1:])
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected[slot] = states[row]
    nodes = [x.clone() for x in inputs[1:4]]
    for row, slot in enumerate(slots):
        if slot < 0 or inputs.accepted_node[row] < 0:
            for x in nodes:
                x[row] = NAN
    assert ops.tree_wy_commit_(pool, torch.tensor(slots), *nodes, *inputs[4:]) is None
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("slots", [[0, -1, -1], [-1, 0, -1], [-1, -1, 0], [1, -1, 2]], ids=str)
def test_rows_without_a_slot_do_not_alias_slot_0(slots: list[int]) -> None:
    inputs = commit_inputs(OpCase((chain(3),) * 3), [2, 2, 2], torch.float32)
    pool = inputs.committed_state.clone()
    ops.tree_wy_commit_(pool, torch.tensor(slots), *inputs[1:])
    for slot in range(3):
        if slot not in slots:
            assert torch.equal(pool[slot], inputs.committed_state[slot])
            continue
        row = slice(slots.index(slot), slots.index(slot) + 1)
        alone = ops.tree_wy_commit(inputs.committed_state[slot : slot + 1], *(x[row] for x in inputs[1:]))
        assert relative_error(pool[slot], alone[0]) <= FLOAT32


def test_a_pool_where_nothing_commits_stays_bit_for_bit() -> None:
    inputs = commit_inputs(OpCase((chain(3),) * 2), [-1, 2], torch.float32)
    pool = inputs.committed_state.clone()
    pool[0, 0, 0, :2] = torch.tensor([-0.0, NAN])
    before = pool.clone()
    ops.tree_wy_commit_(pool, torch.tensor([1, -1]), *(x * NAN for x in inputs[1:4]), *inputs[4:])
    assert pool.view(torch.uint8).equal(before.view(torch.uint8))
