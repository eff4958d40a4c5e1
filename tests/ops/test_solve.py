"""The closed form against the literal recurrence, and what a tree may and may not depend on."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import oracle
from parents import chain, widths
from tolerances import AMPLIFIED, BFLOAT16_ROUNDING, FLOAT32, FLOAT64, FLOAT64_PAIR, relative_error
from treewy import ops
from treewy.ops import PADDING
from treewy.testing import OpCase, SolveInputs, op_cases

NAN = float("nan")
NODE_ARGUMENTS = ("value", "query", "key", "log_decay", "beta")


def to_dtype(inputs: SolveInputs, dtype: torch.dtype) -> SolveInputs:
    return SolveInputs(*(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs))


def assert_close_to_oracle(inputs: SolveInputs, bound: float) -> None:
    for actual, expected in zip(ops.tree_wy_solve(*inputs), oracle.solve(*inputs), strict=False):
        assert relative_error(actual, expected) <= bound


def nodes_only(inputs: SolveInputs, row: slice, nodes: list[int], parents: Tensor) -> SolveInputs:
    """The same call on some nodes of some rows, with parents of their own."""
    picked = {name: getattr(inputs, name)[row][:, nodes] for name in (*NODE_ARGUMENTS, "prefix_mask")}
    rest = ("committed_state", "prefix_pseudo_value", "prefix_key", "prefix_log_decay")
    return inputs._replace(**picked, **{name: getattr(inputs, name)[row] for name in rest}, parents=parents)


@given(op_cases())
@settings(max_examples=30, deadline=None)
def test_equals_the_recurrence_in_float64_and_float32(case: OpCase) -> None:
    inputs = case.solve_inputs()
    assert_close_to_oracle(inputs, FLOAT64)
    assert_close_to_oracle(to_dtype(inputs, torch.float32), FLOAT32)


def random_tree(num_nodes: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(int(torch.randint(max(-1, i - 5), i, (), generator=generator)) for i in range(num_nodes))


def gates_of_every_size(inputs: SolveInputs) -> SolveInputs:
    """Gates from -1e-6 to -30 in one path, the great ones first: where differences of cumulative sums lose digits."""
    small = -torch.logspace(-6, 0, inputs.log_decay.shape[1] - 30, dtype=inputs.log_decay.dtype)
    gates = torch.cat([torch.full((30,), -30.0, dtype=small.dtype), small])
    return inputs._replace(log_decay=gates[None, :, None].expand_as(inputs.log_decay))


HARD_CASES = {
    "tree of 64": lambda: OpCase((random_tree(64, 0), random_tree(64, 1))).solve_inputs(),
    "tree of 64, wide heads": lambda: OpCase((random_tree(64, 2),), key_dim=128, value_dim=64).solve_inputs(),
    "chain of 64": lambda: OpCase((chain(64),), key_dim=33).solve_inputs(),
    "write strengths up to 2": lambda: OpCase((chain(64), random_tree(64, 4))).solve_inputs(max_beta=2.0),
    "64 identical keys": lambda: (x := OpCase((chain(64),), key_dim=16).solve_inputs())._replace(
        key=x.key[:, :1].expand_as(x.key),
        beta=torch.ones_like(x.beta),
        log_decay=torch.zeros_like(x.log_decay),
    ),
    "gates from -1e-6 to -30": lambda: gates_of_every_size(OpCase((chain(64),)).solve_inputs()),
    "keys of norm 1e-3": lambda: (x := OpCase((widths(2, 2, 2),), key_dim=128).solve_inputs())._replace(
        key=1e-3 * torch.nn.functional.normalize(x.key, dim=-1)
    ),
    "keys of zero": lambda: (x := OpCase((widths(2, 2, 2),), key_dim=128).solve_inputs())._replace(
        key=torch.zeros_like(x.key)
    ),
    "chain of 8, gates of -13": lambda: (x := OpCase((chain(8),)).solve_inputs())._replace(
        log_decay=torch.full_like(x.log_decay, -13.0)
    ),
    "no normalisation": lambda: (x := OpCase((widths(3, 2),)).solve_inputs())._replace(
        key=torch.nn.functional.normalize(x.key, dim=-1), qk_l2norm=False
    ),
    "dense prefix of 12": lambda: OpCase(
        (widths(3, 3),) * 2, prefix_parents=chain(12), attach=((11,) * 13, (4,) * 13)
    ).solve_inputs(),
}


@pytest.mark.parametrize("name", HARD_CASES)
def test_equals_the_recurrence_on_hard_inputs(name: str) -> None:
    """Cases D20, D34 and D40: lattice#716, flash-linear-attention#537, imp#28. Underflow, equal keys and short keys."""
    inputs = HARD_CASES[name]()
    assert_close_to_oracle(inputs, FLOAT64)
    assert_close_to_oracle(to_dtype(inputs, torch.float32), FLOAT32)


@pytest.mark.parametrize("distance", [1e-1, 1e-3, 0.0], ids=lambda x: f"distance={x}")
def test_near_identical_keys_amplify_rounding_no_more_than_the_recurrence(distance: float) -> None:
    for seed in (0, 5, 15):  # of 24, where inner products in float32 cost most: 20 times the recurrence's error at 5
        inputs = OpCase((chain(64),), key_dim=128, seed=seed).solve_inputs(torch.float32)
        inputs = inputs._replace(
            key=inputs.key[:, :1] + distance * inputs.key,
            beta=torch.full_like(inputs.beta, 2.0),
            log_decay=torch.full_like(inputs.log_decay, -1e-4),
        )
        exact, recurrence = oracle.solve(*inputs), oracle.solve(*inputs, dtype=torch.float32)
        for actual, expected, own in zip(ops.tree_wy_solve(*inputs), exact, recurrence, strict=False):
            assert relative_error(actual, expected) <= AMPLIFIED * relative_error(own, expected) + FLOAT32


def test_each_path_equals_that_path_alone() -> None:
    case = OpCase((widths(2, 2, 1),), prefix_parents=(-1, 0, 0), attach=((1,) * 11,))
    inputs = case.solve_inputs()
    whole = ops.tree_wy_solve(*inputs)
    for node in range(11):
        nodes = oracle.path(list(case.parents[0]), node)
        alone = ops.tree_wy_solve(*nodes_only(inputs, slice(None), nodes, torch.tensor([chain(len(nodes))])))
        for part, full in zip(alone, whole, strict=True):
            assert relative_error(part[:, -1], full[:, node]) <= FLOAT64_PAIR


def test_a_chain_equals_one_call_a_node() -> None:
    inputs = OpCase((chain(9), chain(9))).solve_inputs()
    outputs, pseudo_values, _, path_log_decay = ops.tree_wy_solve(*inputs)
    state = inputs.committed_state
    for node in range(9):
        one = nodes_only(inputs, slice(None), [node], torch.tensor([[-1], [-1]]))._replace(committed_state=state)
        output, pseudo_value, key, log_decay = ops.tree_wy_solve(*one)
        assert relative_error(output, outputs[:, [node]]) <= FLOAT64_PAIR
        assert relative_error(pseudo_value, pseudo_values[:, [node]]) <= FLOAT64_PAIR
        state = ops.tree_wy_commit(state, pseudo_value, key, log_decay, one.parents, torch.tensor([0, 0]))
    assert relative_error(path_log_decay, inputs.log_decay.cumsum(1)) <= FLOAT64


@given(op_cases(padding=False), st.data())
@settings(max_examples=25, deadline=None)
def test_changing_a_node_changes_nothing_but_its_descendants(case: OpCase, data: st.DataObject) -> None:
    inputs = case.solve_inputs(torch.float32)
    node = data.draw(st.integers(0, len(case.parents[0]) - 1))
    changed = inputs._replace(
        **{name: getattr(inputs, name).index_fill(1, torch.tensor(node), -0.75) for name in NODE_ARGUMENTS}
    )
    unrelated = ~ops.ancestor_mask(inputs.parents)[:, :, node]
    for before, after in zip(ops.tree_wy_solve(*inputs), ops.tree_wy_solve(*changed), strict=True):
        assert torch.equal(before[unrelated], after[unrelated])
        assert not torch.equal(before[:, node], after[:, node])


def test_siblings_may_come_in_any_order() -> None:
    # Breadth first, and the same tree with siblings reversed.
    parents, order = widths(2, 2), [0, 2, 1, 6, 5, 4, 3]
    place = {node: index for index, node in enumerate(order)}
    reordered = torch.tensor([[place[parents[node]] if parents[node] >= 0 else -1 for node in order]])
    inputs = OpCase((parents,)).solve_inputs()
    whole = ops.tree_wy_solve(*inputs)
    for a, b in zip(ops.tree_wy_solve(*nodes_only(inputs, slice(None), order, reordered)), whole, strict=True):
        assert relative_error(a, b[:, order]) <= FLOAT64_PAIR


@given(op_cases())
@settings(max_examples=15, deadline=None)
def test_each_batch_row_equals_that_row_alone(case: OpCase) -> None:
    inputs = case.solve_inputs()
    whole = ops.tree_wy_solve(*inputs)
    for row in range(len(case.parents)):
        rows = slice(row, row + 1)
        alone = SolveInputs(*(x[rows] if isinstance(x, Tensor) else x for x in inputs))
        for part, full in zip(ops.tree_wy_solve(*alone), whole, strict=True):
            assert relative_error(part, full[rows]) <= FLOAT64_PAIR


@given(op_cases())
@settings(max_examples=30, deadline=None)
def test_padding_is_inert_whatever_it_holds(case: OpCase) -> None:
    inputs = case.solve_inputs(torch.float32)
    absent = inputs.parents == PADDING
    unused = ~inputs.prefix_mask.any(1)
    poisoned = {name: getattr(inputs, name).clone() for name in NODE_ARGUMENTS}
    for number, name in enumerate(NODE_ARGUMENTS):
        poisoned[name][absent] = NAN if number % 2 else float("inf")
    for name in ("prefix_pseudo_value", "prefix_key", "prefix_log_decay", "committed_state"):
        poisoned[name] = getattr(inputs, name).clone()
        poisoned[name][absent.all(1) if name == "committed_state" else unused] = NAN
    poisoned["prefix_mask"] = inputs.prefix_mask | absent[:, :, None] & ~unused[:, None]
    for clean, result in zip(ops.tree_wy_solve(*inputs), ops.tree_wy_solve(*inputs._replace(**poisoned)), strict=True):
        assert torch.equal(clean, result)
        assert (result[absent] == 0).all()


def test_a_padded_tree_equals_the_tree() -> None:
    inputs = OpCase((widths(2, 2),)).solve_inputs()
    padded = nodes_only(inputs, slice(None), [*range(7), *[0] * 5], torch.tensor([widths(2, 2) + (PADDING,) * 5]))
    for a, b in zip(ops.tree_wy_solve(*inputs), ops.tree_wy_solve(*padded), strict=True):
        assert relative_error(b[:, :7], a) <= FLOAT64_PAIR


def test_value_heads_use_the_key_head_of_their_group() -> None:
    """Case D30: llama.cpp#15507. The value heads of a key head were taken tiled instead of interleaved."""
    inputs = OpCase((widths(2, 2),), key_heads=2, value_heads=6).solve_inputs()
    outputs, pseudo_values, _, _ = ops.tree_wy_solve(*inputs)
    for head in range(6):
        one, group = slice(head, head + 1), slice(head // 3, head // 3 + 1)
        alone = inputs._replace(
            value=inputs.value[:, :, one],
            query=inputs.query[:, :, group],
            key=inputs.key[:, :, group],
            log_decay=inputs.log_decay[:, :, one],
            beta=inputs.beta[:, :, one],
            committed_state=inputs.committed_state[:, one],
            prefix_pseudo_value=inputs.prefix_pseudo_value[:, :, one],
            prefix_key=inputs.prefix_key[:, :, group],
            prefix_log_decay=inputs.prefix_log_decay[:, :, one],
        )
        output, pseudo_value, _, _ = ops.tree_wy_solve(*alone)
        assert relative_error(output, outputs[:, :, one]) <= FLOAT64_PAIR
        assert relative_error(pseudo_value, pseudo_values[:, :, one]) <= FLOAT64_PAIR


def test_a_tree_grown_level_by_level_equals_the_tree_at_once() -> None:
    case = OpCase((widths(3, 2, 2), (-1, -1, 0, 0, 1, 1, 1, 2, 4, 4, *range(8, 20), 3, PADDING)[:22]))
    inputs = case.solve_inputs()
    whole = ops.tree_wy_solve(*inputs)
    ancestors = ops.ancestor_mask(inputs.parents)
    num_nodes = inputs.parents.shape[1]
    grown = [torch.zeros_like(x) for x in whole]
    step = 3  # any cut does: parents precede children
    for first in range(0, num_nodes, step):
        nodes = list(range(first, min(first + step, num_nodes)))
        inner = torch.where(inputs.parents[:, nodes] >= first, inputs.parents[:, nodes] - first, -1)
        inner = torch.where(inputs.parents[:, nodes] == PADDING, PADDING, inner)
        level = nodes_only(inputs, slice(None), nodes, inner)._replace(
            prefix_pseudo_value=grown[1][:, :first],
            prefix_key=grown[2][:, :first],
            prefix_log_decay=inputs.log_decay[:, :first],
            prefix_mask=ancestors[:, nodes, :first],
        )
        for result, part in zip(grown, ops.tree_wy_solve(*level), strict=True):
            result[:, nodes] = part
    for a, b in zip(grown, whole, strict=True):
        assert relative_error(a, b) <= FLOAT64_PAIR


def test_deferring_the_commit_equals_committing_at_once() -> None:
    first = OpCase((widths(2, 2), chain(7)), seed=1).solve_inputs()
    second = OpCase((widths(3, 1), widths(1, 5)), seed=2).solve_inputs()
    accepted = torch.tensor([6, 3])
    _, pseudo_value, key, _ = ops.tree_wy_solve(*first)
    state = ops.tree_wy_commit(first.committed_state, pseudo_value, key, first.log_decay, first.parents, accepted)
    immediate = ops.tree_wy_solve(*second._replace(committed_state=state))
    nodes, length = ops.path_to_node(first.parents, accepted)
    kept = nodes.clamp(min=0)[:, :, None]
    deferred = ops.tree_wy_solve(
        *second._replace(
            committed_state=first.committed_state,
            prefix_pseudo_value=pseudo_value.gather(1, kept[..., None].expand_as(pseudo_value)),
            prefix_key=key.gather(1, kept[..., None].expand_as(key)),
            prefix_log_decay=first.log_decay.gather(1, kept.expand_as(first.log_decay)),
            prefix_mask=(torch.arange(7) < length[:, None])[:, None].expand(2, 7, 7),
        )
    )
    for a, b in zip(deferred[:3], immediate[:3], strict=True):
        assert relative_error(a, b) <= FLOAT64_PAIR
    folded = first.log_decay.gather(1, kept.expand_as(first.log_decay)) * (nodes >= 0)[:, :, None]
    assert relative_error(deferred[3], immediate[3] + folded.sum(1, keepdim=True)) <= FLOAT64_PAIR


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_inputs_lose_only_the_rounding_of_the_output(dtype: torch.dtype) -> None:
    inputs = to_dtype(OpCase((random_tree(30, 3),)).solve_inputs(), dtype)
    inputs = inputs._replace(committed_state=inputs.committed_state.float())
    results, expected = ops.tree_wy_solve(*inputs), oracle.solve(*inputs)
    assert [x.dtype for x in results] == [dtype, torch.float32, torch.float32, torch.float32]
    assert relative_error(results[0], expected[0]) <= BFLOAT16_ROUNDING + FLOAT32
    for actual, exact in zip(results[1:], expected[1:], strict=False):
        assert relative_error(actual, exact) <= FLOAT32


def test_the_inputs_are_left_as_they_are() -> None:
    inputs = OpCase((widths(2, 2),)).solve_inputs()
    copies = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
    ops.tree_wy_solve(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True) if isinstance(a, Tensor))
