"""The operators of solve, commit and round on a GPU, registered, compiled, exported and captured.

`pytest -k sanitizer` is for compute-sanitizer: every kernel, in a few seconds.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rounds
from gpu_solves import SIZES, call_of, clone, drawn, random_tree, same_bits
from parents import widths
from rounds import Rounds
from snapshots import snapshot_inputs
from tolerances import (
    BFLOAT16_PAIR,
    KERNEL_HALVES,
    relative_error,
)
from treewy import ops
from treewy.testing import OpCase

pytestmark = pytest.mark.gpu


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


@pytest.mark.parametrize(("dims", "dtype"), [((64, 64), torch.bfloat16), ((40, 72), torch.float16)])
def test_sanitizer(dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Every kernel at a few shapes, for compute-sanitizer; no comparison, and nothing that compiles but Triton."""
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
    case = OpCase((widths(2, 2), random_tree(7, 3)), key_dim=dims[0], value_dim=dims[1])
    ops.tree_snapshots(*snapshot_inputs(case).to(dtype, torch.float32, "cuda"))
    conv = case.conv_inputs(dtype, channels=70)
    ops.tree_conv(*(x.cuda() if isinstance(x, Tensor) else x for x in conv))
    torch.cuda.synchronize()
