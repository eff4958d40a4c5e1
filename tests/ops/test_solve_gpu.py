"""The kernels of solve and commit on a GPU, from poisoned memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
from equal_keys import equal_keys, in_16_bits
from gpu_solves import (
    BATCHES,
    DIMS,
    DTYPES,
    NODES,
    assert_commits,
    assert_solves,
    call_of,
    clone,
    drawn,
    gpu,
    in_float64,
    random_tree,
    same_bits,
)
from parents import chain
from tolerances import (
    AMPLIFIED,
    FLOAT32,
    relative_error,
)
from treewy import ops
from treewy.ops import PADDING
from treewy.testing import OpCase, SolveInputs

pytestmark = pytest.mark.gpu


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nodes", NODES)
def test_solve_then_commit_equal_the_recurrence(nodes: int, dtype: torch.dtype) -> None:
    inputs = drawn(2, nodes, (128, 128), dtype)
    on_cpu = SolveInputs(*(x.cpu() if isinstance(x, Tensor) else x for x in inputs))
    *exact, states = oracle.solve(*on_cpu)
    _, pseudo_value, key, _ = assert_solves(inputs, tuple(x.cuda() for x in exact))
    accepted = [nodes - 1, max(node for node, parent in enumerate(random_tree(nodes, 1)) if parent != PADDING)]
    expected = torch.stack([states[row][node] for row, node in enumerate(accepted)]).cuda()
    assert_commits(inputs, pseudo_value, key, expected, torch.tensor(accepted, device="cuda"))


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nodes", NODES)
def test_solve_then_commit_equal_the_reference_in_float64(
    nodes: int, dtype: torch.dtype, dims: tuple[int, int], batch: int
) -> None:
    inputs = drawn(batch, nodes, dims, dtype)
    exact = ops.tree_wy_solve(*in_float64(inputs))
    _, pseudo_value, key, _ = assert_solves(inputs, exact)
    accepted = torch.arange(batch, device="cuda") * 7 % (nodes + 1) - 1
    double = in_float64(inputs)
    expected = ops.tree_wy_commit(
        double.committed_state, exact[1], exact[2], double.log_decay, inputs.parents, accepted
    )
    assert_commits(inputs, pseudo_value, key, expected, accepted)


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("nodes", [4, 40])
@pytest.mark.parametrize("ratio", [1, 2, 3, 8])
def test_head_ratios(ratio: int, nodes: int) -> None:
    inputs = drawn(2, nodes, (128, 64), torch.bfloat16, ratio=ratio)
    assert_solves(inputs, ops.tree_wy_solve(*in_float64(inputs)))


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nodes", [4, 16, 40, 70])
@pytest.mark.parametrize("known", [1, 16, 18, 32, 33, 100])
def test_prefixes(known: int, nodes: int, dtype: torch.dtype) -> None:
    for batch in (1, 20):
        inputs = drawn(batch, nodes, (128, 128), dtype, known=known)
        assert_solves(inputs, ops.tree_wy_solve(*in_float64(inputs)))


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("nodes", [7, 22])
def test_sparse_prefixes_of_which_some_rows_nobody_reads(nodes: int) -> None:
    case = OpCase(
        (random_tree(nodes, 7), chain(nodes)),
        prefix_parents=(-1, 0, 0, 1, 3, 2),
        attach=((4,) * nodes, (3,) * nodes),
        key_dim=64,
        value_dim=64,
    )
    inputs = gpu(case.solve_inputs(torch.float32), torch.bfloat16)
    unused = ~inputs.prefix_mask.any(1)
    for x in (inputs.prefix_pseudo_value, inputs.prefix_key, inputs.prefix_log_decay):
        x[unused] = torch.nan
    assert_solves(inputs, ops.tree_wy_solve(*in_float64(inputs)))


@pytest.mark.parametrize("nodes", [7, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unit_keys_that_are_not_normalised(dtype: torch.dtype, nodes: int) -> None:
    inputs = drawn(2, nodes, (128, 128), torch.float32)
    unit = torch.nn.functional.normalize(inputs.key, dim=-1)
    inputs = gpu(inputs._replace(key=unit, qk_l2norm=False), dtype)
    assert_solves(inputs, ops.tree_wy_solve(*in_float64(inputs)))


@pytest.mark.parametrize("nodes", [7, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_whose_norm_is_near_the_greatest_number(dtype: torch.dtype, nodes: int) -> None:
    inputs = drawn(2, nodes, (128, 128), torch.float32)
    long = {name: torch.nn.functional.normalize(getattr(inputs, name), dim=-1) * 1e19 for name in ("query", "key")}
    inputs = gpu(inputs._replace(**long), dtype)
    assert_solves(inputs, ops.tree_wy_solve(*in_float64(inputs)))


@pytest.mark.parametrize("gates", [(-30.0, -1e-6), (-torch.inf, -0.5, -0.1), (-1e-6, -1e-6, -torch.inf)], ids=str)
@pytest.mark.parametrize("nodes", [9, 64, 100])
def test_gates_of_any_size_on_one_path(nodes: int, gates: tuple[float, ...]) -> None:
    inputs = drawn(1, nodes, (64, 64), torch.float32)
    gate = torch.tensor(gates, device="cuda").repeat(nodes)[:nodes]
    inputs = inputs._replace(log_decay=gate[None, :, None].expand_as(inputs.log_decay).contiguous())
    exact = oracle.solve(*(x.cpu() if isinstance(x, Tensor) else x for x in inputs))
    for actual, expected in zip(ops.tree_wy_solve(*inputs)[:3], exact, strict=False):
        assert relative_error(actual.cpu(), expected) <= FLOAT32


@pytest.mark.parametrize("distance", [1e-1, 1e-3, 0.0], ids=lambda x: f"distance={x}")
def test_near_identical_keys_amplify_rounding_no_more_than_the_recurrence(distance: float) -> None:
    case = OpCase((chain(64),), key_dim=128, value_dim=128, seed=5)
    inputs = equal_keys(case.solve_inputs(torch.float32), distance, 2.0)
    exact, recurrence = oracle.solve(*inputs), oracle.solve(*inputs, dtype=torch.float32)
    results = ops.tree_wy_solve(*(x.cuda() if isinstance(x, Tensor) else x for x in inputs))
    for actual, expected, own in zip(results, exact, recurrence, strict=False):
        assert relative_error(actual.cpu(), expected) <= AMPLIFIED * relative_error(own, expected) + FLOAT32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 17, 70], ids=["one launch", "tables", "tables of many rows"])
@in_16_bits
def test_equal_keys_of_16_bits_lose_no_more_than_halves(
    distance: float, beta: float, allowed: float, rows: int, dtype: torch.dtype
) -> None:
    case = OpCase((chain(16),) * rows, key_dim=64, value_dim=64, key_heads=2, value_heads=4, seed=5)
    inputs = gpu(equal_keys(case.solve_inputs(torch.float32), distance, beta), dtype)
    exact = ops.tree_wy_solve(*in_float64(inputs))
    assert relative_error(ops.tree_wy_solve(*inputs)[1], exact[1]) <= allowed


@pytest.mark.parametrize("nodes", [3, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_greatest_numbers_of_a_state_that_no_key_reads_make_no_nan(dtype: torch.dtype, nodes: int) -> None:
    inputs = drawn(1, nodes, (64, 64), dtype)
    inputs.key[..., 2], inputs.query[..., 2] = 0.0, 0.0
    state = inputs.committed_state
    great = inputs._replace(committed_state=state.index_fill(2, torch.tensor(2, device="cuda"), 3.4028e38))
    clean = inputs._replace(committed_state=state.index_fill(2, torch.tensor(2, device="cuda"), 0.0))
    for a, b in zip(ops.tree_wy_solve(*great), ops.tree_wy_solve(*clean), strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("nodes", [7, 16, 40, 100])
@pytest.mark.parametrize("batch", [4, 33])
def test_a_solve_has_the_bits_that_a_row_has_alone_and_again(batch: int, nodes: int) -> None:
    """Alone means: in a batch for which the same launches are chosen."""
    inputs = drawn(batch, nodes, (128, 128), torch.bfloat16, ratio=2, known=5)
    whole = ops.tree_wy_solve(*inputs)
    for _ in range(3):
        assert all(same_bits(a, b) for a, b in zip(ops.tree_wy_solve(*inputs), whole, strict=True))
    for row in range(0, batch, 5):
        other = torch.full((batch if nodes <= 16 else 1,), row, device="cuda")
        alone = SolveInputs(*(x[other] if isinstance(x, Tensor) else x for x in inputs))
        results = ops.tree_wy_solve(*alone)
        assert all(same_bits(a[:1], b[row : row + 1]) for a, b in zip(results, whole, strict=True))


@pytest.mark.parametrize("nodes", [4, 40])
def test_inputs_may_be_slices_of_one_projection(nodes: int) -> None:
    inputs = drawn(3, nodes, (128, 64), torch.bfloat16)
    parts = (inputs.query, inputs.key, inputs.value)
    split = torch.cat([x.flatten(2) for x in parts], dim=-1).split([x[0, 0].numel() for x in parts], dim=-1)
    query, key, value = (y.unflatten(-1, x.shape[2:]) for x, y in zip(parts, split, strict=True))
    views = inputs._replace(query=query, key=key, value=value, parents=inputs.parents.int())
    assert not value.is_contiguous()
    for a, b in zip(ops.tree_wy_solve(*views), ops.tree_wy_solve(*inputs), strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("name", ["tree_wy_solve", "tree_wy_commit", "tree_wy_commit_", "tree_wy_verify_"])
def test_more_nodes_than_the_kernels_take_are_refused_and_everything_stays_usable(name: str) -> None:
    def values(nodes: int) -> tuple[Any, ...]:
        return call_of(name, drawn(2, nodes, (64, 64), torch.bfloat16), nodes)

    wrong, right = values(129), values(128)
    before = clone(wrong)
    with pytest.raises(ValueError, match="129 nodes, the kernels take up to 128"):
        getattr(ops, name)(*wrong)
    assert all(same_bits(a, b) for a, b in zip(wrong, before, strict=True) if isinstance(a, Tensor))
    getattr(ops, name)(*right)
    torch.cuda.synchronize()
