"""The kernels of the solve and the commit, interpreted, against the literal recurrence.

Results and scratch are full of NaN before each launch. One launch solves few and small trees, and those of more than 64
nodes; the others take a launch for tables and one for the states.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="kernels need the triton package")

import oracle
from equal_keys import equal_keys, in_16_bits
from interpreted import run_interpreted
from parents import chain, widths
from tolerances import (
    FLOAT32,
    KERNEL_AMPLIFIED,
    KERNEL_HALVES,
    KERNEL_OVER_REFERENCE,
    relative_error,
)
from treewy import ops
from treewy.ops import PADDING
from treewy.testing import OpCase, SolveInputs, op_cases

NODE_ARGUMENTS = ("value", "query", "key", "log_decay", "beta")
SMALL = {"key_heads": 1, "value_heads": 2}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_tree(num_nodes: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(int(torch.randint(max(-1, i - 5), i, (), generator=generator)) for i in range(num_nodes))


CASES = {
    "one node": OpCase(((-1,),)),
    "tree and padding": OpCase((widths(2, 2), (*chain(5), PADDING, 4), (PADDING,) * 7)),
    "tree of 37": OpCase((random_tree(37, 0),), key_dim=20, **SMALL),
    "chain of 70": OpCase((chain(70),), **SMALL),
    "sparse prefix": OpCase(
        (widths(2, 2), (*chain(5), PADDING, 4), widths(6)),
        prefix_parents=(-1, 0, 0, 1),
        attach=((1,) * 7, (3,) * 7, (-1,) * 7),
    ),
    "prefix of 18": OpCase(
        (widths(3, 2), widths(3, 2)), prefix_parents=chain(18), attach=((17,) * 10, (4,) * 10), **SMALL
    ),
    "prefix of 34, one launch": OpCase((chain(3),), prefix_parents=chain(34), attach=((33,) * 3,), **SMALL),
    "prefix of 18, tables": OpCase(
        (random_tree(20, 1),), prefix_parents=chain(18), attach=((16,) * 20,), key_dim=5, **SMALL
    ),
    "22 rows of 3 heads": OpCase((widths(1, 1),) * 21 + ((PADDING, -1, 1),), key_heads=1, value_heads=3),
    "17 by 40": OpCase((widths(2, 2),), key_dim=17, value_dim=40, **SMALL),
}


def to_dtype(inputs: SolveInputs, dtype: torch.dtype) -> SolveInputs:
    """Round what a model computes in low precision; states, gates and known rows stay in float32."""
    return inputs._replace(**{name: getattr(inputs, name).to(dtype) for name in ("value", "query", "key", "beta")})


def poisoned(inputs: SolveInputs) -> SolveInputs:
    """Fill with NaN what a solve has no business to read."""
    absent, unused = inputs.parents == PADDING, ~inputs.prefix_mask.any(1)
    changed = {name: getattr(inputs, name).clone() for name in NODE_ARGUMENTS}
    for x in changed.values():
        x[absent] = torch.nan
    for name in ("prefix_pseudo_value", "prefix_key", "prefix_log_decay"):
        changed[name] = getattr(inputs, name).clone()
        changed[name][unused] = torch.nan
    changed["committed_state"] = inputs.committed_state.clone()
    changed["committed_state"][absent.all(1)] = torch.nan
    return inputs._replace(**changed)


def solve(inputs: SolveInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return run_interpreted(ops.tree_wy_solve, *inputs)


def assert_close_to_oracle(inputs: SolveInputs) -> None:
    """Of a clean solve, whatever else the inputs hold."""
    exact = oracle.solve(*inputs)
    output, *rest = solve(poisoned(inputs))
    low_precision = inputs.value.dtype != torch.float32
    reference = relative_error(ops.tree_wy_solve(*inputs)[0], exact[0])
    assert output.dtype == inputs.value.dtype
    assert relative_error(output, exact[0]) <= KERNEL_OVER_REFERENCE * reference + FLOAT32
    for actual, expected, bound in zip(
        rest, exact[1:4], (KERNEL_HALVES if low_precision else FLOAT32, FLOAT32, FLOAT32), strict=True
    ):
        assert actual.dtype == torch.float32
        assert relative_error(actual, expected) <= bound
    absent = inputs.parents == PADDING
    assert all((x[absent] == 0).all() for x in (output, *rest))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_recurrence_whatever_padding_holds(name: str, dtype: torch.dtype) -> None:
    assert_close_to_oracle(to_dtype(CASES[name].solve_inputs(torch.float32), dtype))


@given(op_cases(max_batch=2, max_nodes=9))
@settings(max_examples=8, deadline=None)
def test_equals_the_recurrence(case: OpCase) -> None:
    assert_close_to_oracle(case.solve_inputs(torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nodes", [7, 18])
def test_keys_that_are_not_normalised(nodes: int, dtype: torch.dtype) -> None:
    inputs = OpCase((random_tree(nodes, 2),), **SMALL).solve_inputs(torch.float32)
    unit = torch.nn.functional.normalize(inputs.key, dim=-1)
    assert_close_to_oracle(to_dtype(inputs._replace(key=unit, qk_l2norm=False), dtype))


@pytest.mark.parametrize("nodes", [7, 18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_whose_norm_is_near_the_greatest_number_are_normalised(dtype: torch.dtype, nodes: int) -> None:
    inputs = OpCase((random_tree(nodes, 3),), **SMALL).solve_inputs(torch.float32)
    long = {name: torch.nn.functional.normalize(getattr(inputs, name), dim=-1) * 1e19 for name in ("query", "key")}
    assert_close_to_oracle(to_dtype(inputs._replace(**long), dtype))


@pytest.mark.parametrize("nodes", [3, 18])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_greatest_numbers_of_a_state_that_no_key_reads_make_no_nan(dtype: torch.dtype, nodes: int) -> None:
    inputs = to_dtype(OpCase((chain(nodes),), **SMALL).solve_inputs(torch.float32), dtype)
    state = inputs.committed_state.clone()
    state[:, :, 2] = torch.finfo(torch.float32).max
    inputs.key[..., 2], inputs.query[..., 2] = 0.0, 0.0
    clean = inputs._replace(committed_state=state.index_fill(2, torch.tensor(2), 0.0))
    for a, b in zip(solve(inputs._replace(committed_state=state)), solve(clean), strict=True):
        assert torch.equal(a, b)


GATES = {
    "-30 and -1e-6": [-30.0, -1e-6],
    "-inf": [-torch.inf, -0.5, -0.1],
    "-inf and -1e-6": [-1e-6, -1e-6, -torch.inf],
}


@pytest.mark.parametrize("nodes", [9, 36])
@pytest.mark.parametrize("gates", GATES)
def test_gates_of_any_size_on_one_path(gates: str, nodes: int) -> None:
    inputs = OpCase((chain(nodes),), **SMALL).solve_inputs(torch.float32)
    gate = torch.tensor(GATES[gates]).repeat(nodes)[:nodes]
    inputs = inputs._replace(log_decay=gate[None, :, None].expand_as(inputs.log_decay).contiguous())
    exact = oracle.solve(*inputs)
    *results, path_log_decay = solve(inputs)
    for actual, expected in zip(results, exact, strict=False):
        assert relative_error(actual, expected) <= FLOAT32
    # A gate is taken as -1000 at least: its exponential is 0 either way.
    assert relative_error(path_log_decay.clamp(min=-1000.0), exact[3].clamp(min=-1000.0)) <= FLOAT32


@pytest.mark.parametrize("distance", [1e-1, 1e-3, 0.0], ids=lambda x: f"distance={x}")
def test_near_identical_keys_amplify_rounding_no_more_than_the_recurrence(distance: float) -> None:
    case = OpCase((chain(64),), key_dim=128, value_dim=16, seed=5, **SMALL)
    inputs = equal_keys(case.solve_inputs(torch.float32), distance, 2.0)
    exact, recurrence = oracle.solve(*inputs), oracle.solve(*inputs, dtype=torch.float32)
    for actual, expected, own in zip(solve(inputs), exact, recurrence, strict=False):
        assert relative_error(actual, expected) <= KERNEL_AMPLIFIED * relative_error(own, expected) + FLOAT32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 17], ids=["one launch", "tables"])
@in_16_bits
def test_equal_keys_of_16_bits_lose_no_more_than_halves(
    distance: float, beta: float, allowed: float, rows: int, dtype: torch.dtype
) -> None:
    """The inverse of a block has great terms there that cancel."""
    case = OpCase((chain(16),) * rows, key_dim=64, value_dim=16, key_heads=2, value_heads=4, seed=5)
    inputs = to_dtype(equal_keys(case.solve_inputs(torch.float32), distance, beta), dtype)
    assert relative_error(solve(inputs)[1], oracle.solve(*inputs)[1]) <= allowed


@pytest.mark.parametrize("nodes", [7, 18])
def test_a_row_has_the_bits_that_it_has_alone_and_again(nodes: int) -> None:
    trees = (random_tree(nodes, 4), (*chain(nodes - 2), PADDING, -1), chain(nodes))
    prefix = {"prefix_parents": (-1, 0, 0, 1), "attach": ((1,) * nodes, (3,) * nodes, (-1,) * nodes)}
    inputs = to_dtype(OpCase(trees, **prefix, **SMALL).solve_inputs(torch.float32), torch.bfloat16)
    whole = solve(inputs)
    assert all(torch.equal(a, b) for a, b in zip(solve(inputs), whole, strict=True))
    for row in range(3):
        rows = slice(row, row + 1)
        alone = SolveInputs(*(x[rows] if isinstance(x, Tensor) else x for x in inputs))
        assert all(torch.equal(a, b[rows]) for a, b in zip(solve(alone), whole, strict=True))


def test_rows_may_be_slices_of_one_projection() -> None:
    inputs = OpCase((widths(2, 2),) * 2, key_dim=6, value_dim=6).solve_inputs(torch.float32)
    parts = (inputs.query, inputs.key, inputs.value)
    widths_of_parts = [x[0, 0].numel() for x in parts]
    query, key, value = torch.cat([x.flatten(2) for x in parts], dim=-1).split(widths_of_parts, dim=-1)
    views = inputs._replace(
        query=query.unflatten(-1, (2, 6)), key=key.unflatten(-1, (2, 6)), value=value.unflatten(-1, (6, 6))
    )
    assert not views.value.is_contiguous()
    views = views._replace(parents=views.parents[:1].int().expand(2, -1))
    assert all(torch.equal(a, b) for a, b in zip(solve(views), solve(inputs), strict=True))


COMMITS = {
    "one node": (OpCase(((-1,),)), (0,)),
    "rows that accept nothing, padding, something": (
        OpCase((widths(2, 2), (-1, PADDING, 0, 2, PADDING, 3, 5), chain(7))),
        (-1, 1, 5),
    ),
    "tree of 37": (OpCase((random_tree(37, 5),) * 2, key_dim=20, value_dim=40), (36, 20)),
    "chain of 70": (OpCase((chain(70),), **SMALL), (69,)),
    "128 nodes": (OpCase((chain(128),), **SMALL), (127,)),
}


def commit_inputs(name: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """State, pseudo-values, keys, log decays, parents and accepted nodes, with NaN off the accepted paths."""
    case, accepted = COMMITS[name]
    inputs = case.solve_inputs(torch.float32)
    node = torch.tensor(accepted)
    off_path = torch.ones_like(inputs.parents, dtype=torch.bool)
    for row, parents in enumerate(case.parents):
        off_path[row, oracle.path(list(parents), accepted[row])] = False
    key = torch.nn.functional.normalize(inputs.key, dim=-1).to(dtype)
    rows = [x.clone() for x in (inputs.value, key, inputs.log_decay)]
    for x in rows:
        x[off_path] = torch.nan
    return inputs.committed_state, *rows, inputs.parents, node


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", COMMITS)
def test_a_commit_equals_writing_the_path_one_node_at_a_time(name: str, dtype: torch.dtype) -> None:
    inputs = commit_inputs(name, dtype)
    inputs[0][inputs[5] < 0] = torch.nan
    expected = oracle.commit(*inputs)
    result = run_interpreted(ops.tree_wy_commit, *inputs)
    for row, node in enumerate(inputs[5].tolist()):
        if oracle.path(inputs[4][row].tolist(), node):
            assert relative_error(result[row], expected[row]) <= FLOAT32
        else:
            assert same_bits(result[row], inputs[0][row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_commit_rounds_to_the_dtype_of_the_state_once(dtype: torch.dtype) -> None:
    state, *rest = commit_inputs("rows that accept nothing, padding, something", torch.float32)
    state = state.to(dtype)
    result = run_interpreted(ops.tree_wy_commit, state, *rest)
    assert result.dtype == dtype
    assert relative_error(result, ops.tree_wy_commit(state, *rest)) <= torch.finfo(dtype).eps
    assert same_bits(result[:2], state[:2])


@pytest.mark.parametrize("slots", [[3, 0, 4], [-1, 2, 1], [4, -1, -1], [0, 1, -1]], ids=str)
def test_a_commit_in_place_writes_the_slots_of_rows_that_commit_and_no_other(slots: list[int]) -> None:
    state, *rest = commit_inputs("rows that accept nothing, padding, something", torch.float32)
    rest[-1][0] = 6  # a row more that commits
    rest[:3] = [x.nan_to_num(nan=0.5) for x in rest[:3]]
    pool = torch.full((5, *state.shape[1:]), torch.nan)
    pool[[slot for slot in slots if slot >= 0]] = state[[row for row, slot in enumerate(slots) if slot >= 0]]
    before, expected = pool.clone(), run_interpreted(ops.tree_wy_commit, state, *rest)
    assert run_interpreted(ops.tree_wy_commit_, pool, torch.tensor(slots), *rest) is None
    for slot in range(5):
        right = expected[slots.index(slot)] if slot in slots else before[slot]
        assert same_bits(pool[slot], right)


@given(op_cases(max_prefix=0, max_batch=2, max_nodes=9), st.data())
@settings(max_examples=8, deadline=None)
def test_a_commit_of_any_tree_equals_that_of_the_reference(case: OpCase, data: st.DataObject) -> None:
    inputs = case.solve_inputs(torch.float32)
    accepted = torch.tensor([data.draw(st.integers(-1, len(case.parents[0]) - 1)) for _ in case.parents])
    key = torch.nn.functional.normalize(inputs.key, dim=-1)
    written = (inputs.value, key, inputs.log_decay, inputs.parents, accepted)
    result = run_interpreted(ops.tree_wy_commit, inputs.committed_state, *written)
    assert relative_error(result, oracle.commit(inputs.committed_state, *written)) <= FLOAT32


@pytest.mark.parametrize("size", ["nodes", "width"])
def test_what_the_kernels_cannot_take_is_refused(size: str) -> None:
    case = OpCase((chain(129),), **SMALL) if size == "nodes" else OpCase((chain(2),), value_dim=257, **SMALL)
    message = "129 nodes, the kernels take up to 128; split" if size == "nodes" else "7 and 257, the kernels take up to"
    inputs = case.solve_inputs(torch.float32)
    with pytest.raises(ValueError, match=f"value has .*{message}"):
        solve(inputs)
    written = (inputs.value, inputs.key, inputs.log_decay, inputs.parents, torch.tensor([1]))
    pool = inputs.committed_state.clone()
    for call in (
        lambda: run_interpreted(ops.tree_wy_commit, inputs.committed_state, *written),
        lambda: run_interpreted(ops.tree_wy_commit_, pool, torch.tensor([0]), *written),
    ):
        with pytest.raises(ValueError, match=f"pseudo_value has .*{message}"):
            call()
    assert torch.equal(pool, inputs.committed_state)
