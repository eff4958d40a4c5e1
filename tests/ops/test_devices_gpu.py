"""Operators on tensors of a CUDA device that is not the current one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from parents import chain, widths
from snapshots import snapshot_inputs
from store_commits import Accepted, conv_commit_inputs, kv_commit_inputs
from treewy import ops
from treewy.testing import OpCase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

CASE = OpCase((widths(2, 2), chain(7)), key_dim=64, value_dim=64, key_heads=2, value_heads=4)
LARGE = OpCase((widths(3, 3, 3), chain(40)), key_dim=64, value_dim=64, key_heads=2, value_heads=4)
ACCEPTED = Accepted(CASE, (5, 6), (2, 0), 3)
BFLOAT16 = torch.bfloat16  # float32 would stay with the reference


def verify_inputs(case: OpCase) -> tuple[Any, ...]:
    """An empty ring of five rows, and no path."""
    solve = case.solve_inputs(BFLOAT16)
    batch, num_nodes, value_heads, value_dim = solve.value.shape
    none, path = torch.zeros(batch, dtype=torch.int64), torch.full((batch, num_nodes), -1)
    scratch, slots = torch.zeros(solve.value.shape), torch.arange(batch)
    ring = torch.zeros(batch, 5, value_heads, value_dim), solve.key.new_zeros(batch, 5, *solve.key.shape[2:])
    ring = *ring, torch.zeros(batch, 5, value_heads)
    tree = *solve[:5], solve.parents
    last = solve.key, solve.log_decay, path, none
    return solve.committed_state, slots, *ring, none, scratch, *tree, *last, solve.scale, solve.qk_l2norm


def commit_inputs() -> tuple[Tensor, ...]:
    solve = CASE.solve_inputs(BFLOAT16)
    _, *written, _ = ops.tree_wy_solve(*solve)
    return solve.committed_state, *written, solve.log_decay, solve.parents, torch.tensor(ACCEPTED.nodes)


def commit_in_place_inputs() -> tuple[Tensor, ...]:
    state, *rest = commit_inputs()
    return state, torch.tensor([1, 0]), *rest


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "solve": (ops.tree_wy_solve, lambda: CASE.solve_inputs(BFLOAT16)),
    "solve in two launches": (ops.tree_wy_solve, lambda: LARGE.solve_inputs(BFLOAT16)),
    "commit": (ops.tree_wy_commit, commit_inputs),
    "commit in place": (ops.tree_wy_commit_, commit_in_place_inputs),
    "round": (ops.tree_wy_verify_, lambda: verify_inputs(CASE)),
    "round in two launches": (ops.tree_wy_verify_, lambda: verify_inputs(LARGE)),
    "snapshots": (ops.tree_snapshots, lambda: snapshot_inputs(CASE, BFLOAT16)),
    "convolution": (ops.tree_conv, lambda: CASE.conv_inputs(BFLOAT16)),
    "attention": (ops.tree_attention, lambda: CASE.attention_inputs(BFLOAT16)),
    "commit of windows": (ops.tree_conv_commit_, lambda: conv_commit_inputs(ACCEPTED)),
    "commit of keys and values": (ops.tree_kv_commit_, lambda: kv_commit_inputs(ACCEPTED)),
}


def run(name: str, current: int) -> list[Tensor]:
    """Call an operator on tensors of device 1, and return its results and what it left in its arguments."""
    function, inputs = CALLS[name]
    args = [x.to("cuda:1") if isinstance(x, Tensor) else x for x in inputs()]
    with torch.cuda.device(current):
        results = function(*args)
        assert torch.cuda.current_device() == current
        torch.cuda.synchronize(1)
    results = [] if results is None else [results] if isinstance(results, Tensor) else list(results)
    return [*results, *(x for x in args if isinstance(x, Tensor))]


@pytest.mark.parametrize("name", CALLS)
def test_the_current_device_does_not_matter(name: str) -> None:
    for here, there in zip(run(name, 1), run(name, 0), strict=True):
        assert here.device == there.device == torch.device("cuda", 1)
        assert torch.equal(here.nan_to_num(), there.nan_to_num())
