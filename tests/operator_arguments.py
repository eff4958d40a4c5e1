"""Arguments of every operator, drawn from one case."""

from typing import Any

import torch

from parents import chain, widths
from rounds import verify_arguments
from sampled_trees import drawn_trees
from snapshots import snapshot_inputs
from treewy.ops import PADDING
from treewy.testing import OpCase

TREES = OpCase((widths(2, 2), (*chain(5), PADDING, 4), widths(6)))
WITH_PREFIX = OpCase(
    (widths(2, 2), (*chain(5), PADDING, 4), widths(6)),
    prefix_parents=(-1, 0, 0, 1),
    attach=((1,) * 7, (3,) * 7, (-1,) * 7),
)

LAYERS = 2


def arguments(name: str, case: OpCase = TREES, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    solve = case.solve_inputs(dtype)
    batch, num_nodes = solve.parents.shape
    accepted = torch.where(torch.arange(batch) == 1, -1, num_nodes - 1)
    written = (solve.value, solve.key, solve.log_decay, solve.parents, accepted)
    if name == "tree_wy_solve":
        return tuple(solve)
    if name == "tree_wy_commit":
        return (solve.committed_state, *written)
    if name == "tree_wy_commit_":
        pool = torch.cat([solve.committed_state, solve.committed_state])
        return (pool, torch.arange(batch) * 2, *written)
    if name == "tree_wy_verify_":
        return verify_arguments(solve)
    if name == "tree_conv":
        return tuple(case.conv_inputs(dtype))
    conv = case.conv_inputs(dtype)
    if name == "tree_conv_commit_":
        pool = torch.stack([torch.cat([conv.window, conv.window + layer]) for layer in range(LAYERS)])
        x = torch.stack([conv.x + layer for layer in range(LAYERS)])
        return (pool, torch.arange(batch) * 2, x, solve.parents, accepted)
    if name == "tree_kv_commit_":
        columns = num_nodes + batch
        pool = torch.arange(LAYERS * 2 * batch * 3 * columns * 4).reshape(LAYERS, 2 * batch, 3, columns, 4).to(dtype)
        return (pool, -pool, torch.arange(batch) * 2, torch.arange(batch), solve.parents, accepted)
    if name == "tree_sample":
        trees = drawn_trees("without_replacement", vocab_size=9, seed=case.seed, batch=batch, num_nodes=num_nodes)
        return (trees.probs.to(dtype), *trees[1:3], trees.draft_probs.to(dtype), trees.draft_index, *trees[5:])
    if name == "tree_snapshots":
        return tuple(snapshot_inputs(case, dtype, num_earlier=len(case.prefix_parents)))
    return tuple(case.attention_inputs(dtype, window=3))
