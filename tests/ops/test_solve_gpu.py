"""Solve, commit and rounds on a CUDA device, against the recurrence and the reference in float64.

The bounds of outputs: twice the error that the reference has on the same inputs, beside float32 rounding.

`pytest -k sanitizer` is for compute-sanitizer: every kernel, in a few seconds.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
import rounds
from parents import chain, widths
from rounds import Errors, Rounds, by_recurrence, by_reference, play
from snapshots import snapshot_inputs
from tolerances import (
    AMPLIFIED,
    BFLOAT16_PAIR,
    BFLOAT16_ROUNDING,
    FLOAT32,
    KERNEL_HALVES,
    KERNEL_OVER_REFERENCE,
    STATE_AFTER_COMMITS,
    relative_error,
)
from treewy import ops
from treewy.ops import PADDING
from treewy.testing import OpCase, SolveInputs

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (96, 192), (256, 64), (40, 72)]
NODES = [1, 4, 16, 17, 40, 64, 100, 128]
BATCHES = [1, 5, 40]


@pytest.fixture
def nan_in_new_memory():
    """With deterministic algorithms PyTorch fills memory that nobody has written with NaN; tracing refuses that."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device="cuda").isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def random_tree(num_nodes: int, seed: int, reach: int = 6) -> tuple[int, ...]:
    """With a hole, if there is room; no node continues a hole."""
    generator = torch.Generator().manual_seed(seed)
    hole = num_nodes // 2 if num_nodes > 3 else -1
    parents: list[int] = []
    for node in range(num_nodes):
        parent = int(torch.randint(max(-1, node - reach), node, (), generator=generator))
        parents.append(PADDING if node == hole else -1 if parent == hole else parent)
    return tuple(parents)


def trees(batch: int, nodes: int) -> tuple[tuple[int, ...], ...]:
    """A chain, a row of padding alone if there are rows enough, and random trees."""
    rows = [chain(nodes), *(random_tree(nodes, seed) for seed in range(1, batch))]
    if batch > 4:
        rows[3] = (PADDING,) * nodes
    return tuple(rows)


def gpu(values: Any, dtype: torch.dtype) -> SolveInputs:
    """On the device; what a model computes in low precision is rounded, and padding holds NaN."""
    inputs = SolveInputs(*(x.cuda() if isinstance(x, Tensor) else x for x in values))
    absent = inputs.parents == PADDING
    rounded = {name: getattr(inputs, name).to(dtype) for name in ("value", "query", "key", "beta")}
    for x in (*rounded.values(), inputs.log_decay):
        x[absent] = torch.nan
    inputs.committed_state[absent.all(1)] = torch.nan
    return inputs._replace(**rounded)


def drawn(
    batch: int, nodes: int, dims: tuple[int, int], dtype: torch.dtype, ratio: int = 2, known: int = 0
) -> SolveInputs:
    prefix = {"prefix_parents": chain(known), "attach": ((known - 1,) * nodes,) * batch} if known else {}
    case = OpCase(trees(batch, nodes), key_dim=dims[0], value_dim=dims[1], key_heads=2, value_heads=2 * ratio, **prefix)
    return gpu(case.solve_inputs(torch.float32), dtype)


def in_float64(inputs: SolveInputs) -> SolveInputs:
    return SolveInputs(*(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs))


def bound(dtype: torch.dtype) -> float:
    return FLOAT32 if dtype == torch.float32 else KERNEL_HALVES


def rounding(dtype: torch.dtype) -> float:
    """Of an output."""
    return {torch.float32: 0.0, torch.bfloat16: BFLOAT16_ROUNDING, torch.float16: BFLOAT16_ROUNDING / 8}[dtype]


def eager_output(inputs: SolveInputs) -> Tensor:
    """The reference on the CPU, which rounds nothing but the result to low precision."""
    return ops.tree_wy_solve(*(x.cpu() if isinstance(x, Tensor) else x for x in inputs))[0].cuda()


def assert_solves(inputs: SolveInputs, exact: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    results = ops.tree_wy_solve(*inputs)
    dtype, absent = inputs.value.dtype, inputs.parents == PADDING
    assert [x.dtype for x in results] == [dtype, torch.float32, torch.float32, torch.float32]
    for x in results:
        assert x.is_contiguous()
        assert (x[absent] == 0).all()
    output, pseudo_value, key, path_log_decay = results
    allowed = KERNEL_OVER_REFERENCE * relative_error(eager_output(inputs), exact[0]) + bound(dtype)
    assert relative_error(output, exact[0]) <= allowed
    assert relative_error(pseudo_value, exact[1]) <= bound(dtype)
    assert relative_error(key, exact[2]) <= FLOAT32
    assert relative_error(path_log_decay, exact[3]) <= FLOAT32
    return results


def assert_commits(inputs: SolveInputs, pseudo_value: Tensor, key: Tensor, expected: Tensor, accepted: Tensor) -> None:
    """Functional and in place, into slots of a larger pool; row 0 has no slot in place if there are others."""
    batch, dtype = len(accepted), inputs.value.dtype
    written = (pseudo_value, key, inputs.log_decay, inputs.parents, accepted)
    states = ops.tree_wy_commit(inputs.committed_state, *written)
    commits = (accepted >= 0) & (inputs.parents.gather(1, accepted.clamp(min=0)[:, None])[:, 0] != PADDING)
    assert same_bits(states[~commits], inputs.committed_state[~commits])
    assert relative_error(states[commits], expected[commits]) <= bound(dtype)
    pool = torch.full((batch + 3, *states.shape[1:]), torch.nan, device="cuda")
    slots = torch.arange(batch, device="cuda").flip(0) + 2
    slots[0] = -1 if batch > 1 else slots[0]
    pool[slots[slots >= 0]] = inputs.committed_state[slots >= 0]
    right = pool.clone()
    right[slots[slots >= 0]] = states[slots >= 0]
    assert ops.tree_wy_commit_(pool, slots, *written) is None
    assert same_bits(pool, right)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


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
    inputs = OpCase((chain(64),), key_dim=128, value_dim=128, seed=5).solve_inputs(torch.float32)
    inputs = inputs._replace(
        key=inputs.key[:, :1] + distance * inputs.key,
        beta=torch.full_like(inputs.beta, 2.0),
        log_decay=torch.full_like(inputs.log_decay, -1e-4),
    )
    exact, recurrence = oracle.solve(*inputs), oracle.solve(*inputs, dtype=torch.float32)
    results = ops.tree_wy_solve(*(x.cuda() if isinstance(x, Tensor) else x for x in inputs))
    for actual, expected, own in zip(results, exact, recurrence, strict=False):
        assert relative_error(actual.cpu(), expected) <= AMPLIFIED * relative_error(own, expected) + FLOAT32


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


def call_of(name: str, inputs: SolveInputs, nodes: int) -> tuple[Any, ...]:
    """Arguments of an operator on a tree, for one that has none of its own."""
    if name == "tree_wy_solve":
        return tuple(inputs)
    batch = len(inputs.parents)
    accepted = torch.full((batch,), nodes - 1, device="cuda")
    written = (inputs.value.float(), inputs.key, inputs.log_decay, inputs.parents, accepted)
    if name == "tree_wy_commit":
        return (inputs.committed_state, *written)
    if name == "tree_wy_commit_":
        return (inputs.committed_state, torch.arange(batch, device="cuda"), *written)
    # The reference of the CPU, which has no limit, comes to a round with that many nodes.
    case = Rounds(
        **SIZES | {"device": "cpu"}, batch=batch, nodes=nodes, number=3, accept_last=True, chains=True, ring=5
    )
    engine, tree = rounds.engine_after(case)
    return tuple(x.cuda() if isinstance(x, Tensor) else x for x in engine.arguments(tree))


def clone(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.clone() if isinstance(x, Tensor) else x for x in values)


SIZES = {"device": "cuda", "dtype": torch.bfloat16, "key_dim": 64, "value_dim": 64}
ROUNDS = {
    "batch 1": Rounds(batch=1, nodes=16, number=12),
    "batch 5, 40 nodes": Rounds(batch=5, nodes=40, number=12, seed=1, without_slot=True),
    "batch 40": Rounds(batch=40, nodes=16, number=12, seed=2, without_slot=True),
    "ring of 5": Rounds(batch=4, nodes=20, ring=5, number=12, seed=3),
    "ring of 3, 33 rows": Rounds(batch=33, nodes=12, ring=3, number=8, seed=4),
    "no ring": Rounds(batch=3, ring=0, nodes=18, number=8, seed=5),
    "chains of 70": Rounds(batch=3, nodes=70, chains=True, number=6, seed=6),
    "any trees of 128": Rounds(batch=3, nodes=128, number=6, seed=7),
    "whole chains of 11, ring of 3": Rounds(batch=18, nodes=11, ring=3, chains=True, accept_last=True, seed=8),
    "ratio of 8": Rounds(batch=2, key_heads=1, value_heads=8, nodes=20, number=8, seed=9),
    "raw keys": Rounds(batch=9, nodes=20, qk_l2norm=False, number=8, seed=10),
}


def assert_within(errors: Errors, dtype: torch.dtype) -> None:
    assert errors.output <= bound(dtype) + rounding(dtype)
    assert errors.pseudo_value <= bound(dtype)
    assert errors.state <= bound(dtype)


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("shape", ROUNDS)
def test_rounds_equal_the_reference_in_float64(shape: str, dims: tuple[int, int], dtype: torch.dtype) -> None:
    case = dataclasses.replace(ROUNDS[shape], device="cuda", dtype=dtype, key_dim=dims[0], value_dim=dims[1])
    assert_within(play(case, by_reference), dtype)


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounds_equal_the_recurrence(dtype: torch.dtype) -> None:
    case = Rounds(nodes=20, number=8, seed=11, device="cuda", dtype=dtype, key_dim=96, value_dim=64, without_slot=True)

    def on_cpu(case: Rounds, state: Tensor, tree: rounds.Round) -> rounds.Exact:
        exact = by_recurrence(case, state.cpu(), rounds.Round(*(x.cpu() for x in tree)))
        return rounds.Exact(*(x.cuda() for x in exact))

    assert_within(play(case, on_cpu), dtype)


@pytest.mark.parametrize("batch", [2, 20])
@pytest.mark.parametrize("ring", [0, 7, 16])
def test_the_state_after_2500_commits_of_bfloat16_inputs_has_the_error_of_the_first(ring: int, batch: int) -> None:
    case = Rounds(
        **(SIZES | {"key_dim": 128, "value_dim": 128}),
        **{"batch": batch, "nodes": 4, "ring": ring, "number": 2500, "accept_last": True, "chains": True, "gate": 2e-3},
    )
    errors = play(case, by_reference)
    assert errors.state <= STATE_AFTER_COMMITS
    assert_within(errors, torch.bfloat16)


@pytest.mark.parametrize("nodes", [9, 20, 100])
@pytest.mark.parametrize("batch", [3, 20])
def test_a_round_has_the_bits_that_a_row_has_alone_and_again(batch: int, nodes: int) -> None:
    """Some rows fold, others append. Alone means: in a batch for which the same launches are chosen."""
    engine, tree = rounds.engine_after(Rounds(**SIZES, batch=batch, nodes=nodes, ring=5, number=4, seed=12))
    values = engine.arguments(tree)
    whole = clone(values)
    results = ops.tree_wy_verify_(*whole)
    written = (0, 2, 3, 4, 6)
    for _ in range(3):
        again = clone(values)
        assert all(same_bits(a, b) for a, b in zip(ops.tree_wy_verify_(*again), results, strict=True))
        assert all(same_bits(again[i], whole[i]) for i in written)
    for row in range(0, batch, 4):
        others = clone(values)
        keep = torch.arange(batch, device="cuda") == row
        for i, x in enumerate(others):
            if i in (
                2,
                3,
                4,
                6,
                7,
                8,
                9,
                10,
                11,
                13,
                14,
            ):  # floating, a row each: all but this row become other numbers
                x[~keep] = x[~keep].nan_to_num(nan=0.0) * 0.5
        others[16][~keep] = 0  # nothing accepted elsewhere
        output, known = ops.tree_wy_verify_(*others)
        assert same_bits(output[row], results[0][row])
        assert known[row] == results[1][row]
        slot = values[1][row]
        assert slot < 0 or same_bits(others[0][slot], whole[0][slot])
        assert all(same_bits(others[i][row], whole[i][row]) for i in written[1:])


CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "tree_wy_solve": lambda: tuple(drawn(3, 9, (64, 64), torch.bfloat16, known=3)),
    "tree_wy_solve, tables": lambda: tuple(drawn(3, 40, (64, 64), torch.bfloat16, known=3)),
    "tree_wy_commit": lambda: call_of("tree_wy_commit", drawn(3, 9, (64, 64), torch.bfloat16), 9),
    "tree_wy_commit_": lambda: call_of("tree_wy_commit_", drawn(3, 9, (64, 64), torch.bfloat16), 9),
    "tree_wy_verify_": lambda: call_of("tree_wy_verify_", drawn(3, 9, (64, 64), torch.bfloat16), 9),
    "tree_wy_verify_, tables": lambda: call_of("tree_wy_verify_", drawn(3, 40, (64, 64), torch.bfloat16), 40),
}


def operator(name: str) -> Any:
    return getattr(torch.ops.treewy, name.partition(",")[0]).default


def finite(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """NaN is equal to nothing, and opcheck compares."""
    return tuple(x.nan_to_num(nan=0.5) if isinstance(x, Tensor) and x.is_floating_point() else x for x in values)


def outcome(name: str, values: tuple[Any, ...], result: Any) -> list[Tensor]:
    """The results, and what was written in place."""
    arguments = operator(name)._schema.arguments
    results = [] if result is None else [result] if isinstance(result, Tensor) else list(result)
    return results + [x for x, argument in zip(values, arguments, strict=True) if argument.is_write]


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(operator(name), finite(CALLS[name]()))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_it_gives_the_numbers_of_eager(name: str, dynamic: bool) -> None:
    """Not the bits: what a compiler knows of strides changes the order in which norms are summed."""
    function = getattr(ops, name.partition(",")[0])
    eager, compiled = finite(CALLS[name]()), finite(CALLS[name]())
    expected = outcome(name, eager, function(*eager))
    result = torch.compile(function, fullgraph=True, dynamic=dynamic)(*compiled)
    for x, y in zip(outcome(name, compiled, result), expected, strict=True):
        assert relative_error(x, y) <= (BFLOAT16_PAIR if y.dtype == torch.bfloat16 else KERNEL_HALVES)


@pytest.mark.parametrize("name", ["tree_wy_commit_", "tree_wy_verify_"])
def test_a_compiled_operator_does_not_clone_the_pool(name: str) -> None:
    pool, *rest = finite(CALLS[name]())
    pool = torch.cat([pool, pool.new_zeros(3000, *pool.shape[1:])])
    compiled = torch.compile(getattr(ops, name), fullgraph=True)
    compiled(pool, *rest)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    compiled(pool, *rest)
    assert torch.cuda.max_memory_allocated() - before < pool.nbytes // 2


def test_a_solve_exports_with_any_number_of_rows_and_nodes() -> None:
    class Solve(torch.nn.Module):
        def forward(self, *values: Any) -> Any:
            return ops.tree_wy_solve(*values)

    batch, nodes, known = (torch.export.Dim(name) for name in ("batch", "nodes", "known"))
    rows = {0: batch, 1: nodes}
    dynamic = (*[rows] * 5, {0: batch}, rows, *[{0: batch, 1: known}] * 3, {**rows, 2: known}, None, None)
    values = tuple(drawn(3, 9, (64, 64), torch.bfloat16, known=3))
    exported = torch.export.export(Solve(), values, dynamic_shapes=(dynamic,))
    assert operator("tree_wy_solve") in [node.target for node in exported.graph.nodes]
    for other in (drawn(5, 7, (64, 64), torch.bfloat16, known=4), drawn(4, 40, (64, 64), torch.bfloat16, known=18)):
        for a, b in zip(exported.module()(*other), ops.tree_wy_solve(*other), strict=True):
            assert same_bits(a, b)


@pytest.mark.parametrize("batch", [3, 20])
@pytest.mark.parametrize("nodes", [12, 40, 70])
def test_a_captured_round_replays_for_other_trees_acceptances_and_lengths(nodes: int, batch: int) -> None:
    """One graph, launched round after round: each round's inputs are copied into the tensors that were captured."""
    case = Rounds(**SIZES, batch=batch, nodes=nodes, number=10, ring=9, seed=13, without_slot=True)
    trees_of_case = [rounds.padded(tree, nodes) for tree in rounds.drawn(case)]
    eager, replayed = rounds.Engine(case, rounds.call), rounds.Engine(case, rounds.call)
    for engine in (eager, replayed):  # one shape for all rounds
        engine.last_key = engine.last_key.expand(-1, nodes, -1, -1).contiguous()
        engine.last_decay = engine.last_decay.expand(-1, nodes, -1).contiguous()
        engine.path = engine.path.expand(-1, nodes).contiguous()
    static = replayed.arguments(trees_of_case[0])
    ops.tree_wy_verify_(*clone(static))  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, known = ops.tree_wy_verify_(*static)
    for tree in trees_of_case:
        for ours, theirs in zip(static, eager.arguments(tree), strict=True):
            if isinstance(ours, Tensor) and ours is not theirs:
                ours.copy_(theirs)
        expected = eager.verify(tree)
        output.fill_(torch.nan)
        graph.replay()
        assert same_bits(output, expected)
        assert same_bits(known, eager.known)
        for ours, theirs in zip(static[:7], eager.arguments(tree)[:7], strict=True):
            assert ours is static[5] or same_bits(ours, theirs)
        eager.accept(tree)


def test_sanitizer() -> None:
    """Every kernel at a few shapes, for compute-sanitizer; no comparison, and nothing that compiles but Triton."""
    for dims, dtype in (((64, 64), torch.bfloat16), ((40, 72), torch.float32)):
        for batch, nodes, known in ((2, 7, 0), (2, 7, 5), (2, 70, 0), (17, 16, 18), (2, 40, 3)):
            inputs = drawn(batch, nodes, dims, dtype, known=known)
            _, pseudo_value, key, _ = ops.tree_wy_solve(*inputs)
            accepted = torch.arange(batch, device="cuda") % (nodes + 1) - 1
            written = (pseudo_value, key, inputs.log_decay, inputs.parents, accepted)
            ops.tree_wy_commit(inputs.committed_state, *written)
            ops.tree_wy_commit_(inputs.committed_state, torch.arange(batch, device="cuda"), *written)
        for batch, nodes, ring in ((2, 7, 5), (17, 7, 5), (2, 40, 16), (2, 70, 3), (2, 7, 0)):
            case = Rounds(batch=batch, nodes=nodes, ring=ring, number=4, accept_last=True, device="cuda", dtype=dtype)
            rounds.engine_after(dataclasses.replace(case, key_dim=dims[0], value_dim=dims[1]))
    case = OpCase((widths(2, 2), random_tree(7, 3)), key_dim=64, value_dim=64)
    ops.tree_snapshots(*snapshot_inputs(case).to(torch.bfloat16, torch.float32, "cuda"))
    conv = case.conv_inputs(torch.bfloat16, channels=70)
    ops.tree_conv(*(x.cuda() if isinstance(x, Tensor) else x for x in conv))
    torch.cuda.synchronize()
