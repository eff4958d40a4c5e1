"""Solves and rounds on a GPU: inputs, exact results and bounds, for the GPU tests of the kernels.

The bounds of outputs: twice the error that the reference has on the same inputs, beside float32 rounding.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import rounds
from parents import chain
from rounds import Rounds
from tolerances import (
    BFLOAT16_ROUNDING,
    FLOAT32,
    KERNEL_HALVES,
    KERNEL_OVER_REFERENCE,
    relative_error,
)
from treewy import ops
from treewy.ops import PADDING
from treewy.testing import OpCase, SolveInputs

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
    # The reference of the CPU, which has no limit, comes to a round with that many nodes. With three rows and 9 or 40
    # of them, a path is appended behind known rows, and another does not fit.
    case = Rounds(**SIZES | {"device": "cpu"}, batch=batch, nodes=nodes, number=3, ring=4, seed=8)
    engine, tree = rounds.engine_after(case)
    return tuple(x.cuda() if isinstance(x, Tensor) else x for x in engine.arguments(tree))


def clone(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.clone() if isinstance(x, Tensor) else x for x in values)


SIZES = {"device": "cuda", "dtype": torch.bfloat16, "key_dim": 64, "value_dim": 64}
