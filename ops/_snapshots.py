"""Verify a tree by keeping the state of every node, as serving engines do: what the solve is compared with.

`_solve.py` states the recurrence. Here it is walked node by node, each from the stored state of its parent, so that any
node can be committed by taking its state. That moves N + 1 states a tree where the solve moves one, and holds N of them
until the commit.

"Stored" is meant: where states are bfloat16, a node starts from its parent's rounded state, as in a model that decodes
the path token by token, so that a path gives the same numbers in every tree that contains it.

On CUDA `_snapshot_kernel.py` does the same; `snapshot_launch` says how it is launched.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton

from treewy.ops._launch import kernels_apply, power_of_two, rows_contiguous, tile_columns, tiles
from treewy.ops._registration import tree_op
from treewy.ops._tree import PADDING
from treewy.ops._validation import (
    check_group,
    check_index,
    check_log_decay,
    check_nodes,
    check_rank,
    check_shape,
)

if importlib.util.find_spec("triton") is not None:
    from treewy.ops._snapshot_kernel import tree_snapshots_kernel


def _reference(
    value: Tensor,
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    committed_state: Tensor,
    parents: Tensor,
    earlier_states: Tensor,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(torch.float32, value.dtype)
    batch, num_nodes, value_heads, _ = value.shape
    ratio, num_earlier = value_heads // key.shape[2], earlier_states.shape[1]
    rows = torch.arange(batch, device=value.device)
    k, q, v, decay, strength = (x.to(dtype) for x in (key, query, value, log_decay.to(dtype).exp(), beta))
    if qk_l2norm:
        k, q = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (k, q))
    k, q = k.repeat_interleave(ratio, dim=2), q.repeat_interleave(ratio, dim=2)
    states = committed_state.new_zeros(batch, num_earlier + num_nodes, *committed_state.shape[1:])
    states[:, :num_earlier] = earlier_states
    outputs = []
    for node in range(num_nodes):
        parent = parents[:, node]
        stored = states[rows, parent.clamp(min=0)]
        before = torch.where((parent >= 0)[:, None, None, None], stored, committed_state).to(dtype)
        decayed = decay[:, node, :, None, None] * before
        error = v[:, node] - torch.einsum("bhkv,bhk->bhv", decayed, k[:, node])
        after = decayed + k[:, node, :, :, None] * (strength[:, node, :, None] * error)[:, :, None]
        output = torch.einsum("bhkv,bhk->bhv", after, q[:, node]) * scale
        absent = (parent == PADDING)[:, None, None]
        states[:, num_earlier + node] = after.masked_fill(absent[..., None], 0.0).to(states.dtype)
        outputs.append(output.masked_fill(absent, 0.0).to(value.dtype))
    return torch.stack(outputs, dim=1), states[:, num_earlier:].clone() if num_earlier else states


def snapshot_config(states: int, key_dim: int, value_dim: int) -> dict[str, Any]:
    """Choose the columns of a tile and the warps for it, by the states that are committed: value heads of all rows.

    A warp holds 2048 elements of the state before and after a node, 64 registers a thread each. Few states are best cut
    into tiles of one warp, whose sums over K need no other; of many, wider tiles make longer stores.
    """
    columns = tile_columns(key_dim, value_dim, 2048 if states < 512 else 8192)
    return {"COLUMNS": columns, "num_warps": max(1, power_of_two(key_dim) * columns // 2048)}


def snapshot_launch(
    value: Tensor,
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    committed_state: Tensor,
    parents: Tensor,
    earlier_states: Tensor,
    scale: float,
    qk_l2norm: bool,
    config: dict[str, Any],
) -> tuple[tuple[int], tuple[Any, ...], dict[str, Any], tuple[Tensor, Tensor]]:
    """Allocate the results and put the kernel's launch together: its grid, arguments, options, and the results."""
    batch, num_nodes, value_heads, value_dim = value.shape
    key_heads, key_dim = key.shape[2:]
    value, query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (value, query, key))
    committed_state, parents, earlier_states = rows_contiguous(committed_state, parents, earlier_states)
    output = value.new_empty(batch, num_nodes, value_heads, value_dim)
    states = committed_state.new_empty(batch, num_nodes, value_heads, key_dim, value_dim)
    strides = (*value.stride()[:3], *query.stride()[:3], *key.stride()[:3], *log_decay.stride(), *beta.stride())
    tensors = (value, query, key, log_decay, beta, committed_state, parents, earlier_states, output, states)
    options = {
        "VALUE_HEADS": value_heads,
        "HEAD_RATIO": value_heads // key_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "QK_L2NORM": qk_l2norm,
        "NODES": power_of_two(num_nodes, 32),  # shorter vectors than a warp take more registers
        "KEYS": power_of_two(key_dim),
        **config,
    }
    grid = (batch * value_heads * tiles(value_dim, config["COLUMNS"]),)
    return grid, (*tensors, *strides, num_nodes, earlier_states.shape[1], scale), options, (output, states)


@tree_op("tree_snapshots")
def _tree_snapshots(
    value: Tensor,
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    committed_state: Tensor,
    parents: Tensor,
    earlier_states: Tensor,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:
    inputs = (value, query, key, log_decay, beta, committed_state, parents, earlier_states, scale, qk_l2norm)
    if not kernels_apply(value, committed_state):
        return _reference(*inputs)
    config = snapshot_config(value.shape[0] * value.shape[2], key.shape[3], value.shape[3])
    grid, arguments, options, results = snapshot_launch(*inputs, config)
    wrap_triton(tree_snapshots_kernel)[grid](*arguments, **options)
    return results


@_tree_snapshots.register_fake
def _(
    value: Tensor,
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    committed_state: Tensor,
    parents: Tensor,
    earlier_states: Tensor,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:
    return (
        value.new_empty(value.shape),
        committed_state.new_empty(*value.shape[:2], *committed_state.shape[1:]),
    )


def tree_snapshots(
    value: Tensor,
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    committed_state: Tensor,
    parents: Tensor,
    earlier_states: Tensor,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule node by node, each from its parent's state, and keep the state of every node.

        S_i = exp(g_i) S_p + k_i u_i^T          u_i = b_i (v_i - exp(g_i) S_p^T k_i)          o_i = scale S_i^T q_i

    What serving engines do today; `tree_wy_solve` gives the same output without the states. Computes in the wider of
    float32 and the dtype of `value`. Value head h uses key head h // (HV / HK). Float64 on CUDA runs the reference.

    Args:
        value: `[B, N, HV, V]`, floating.
        query: `[B, N, HK, K]`, floating.
        key: `[B, N, HK, K]`, floating.
        log_decay: `[B, N, HV]`, floating, natural logarithm, <= 0.
        beta: `[B, N, HV]`, floating, write strength in [0, 2].
        committed_state: `[B, HV, K, V]`, floating; read only.
        parents: `[B, N]`, integer, counted through the M earlier states first: -1 for a child of the committed state,
            p < M for a child of earlier state p, M + j for a child of node j, j < i; `PADDING` for no node.
        earlier_states: `[B, M, HV, K, V]`, in the dtype of `committed_state`: what earlier calls returned for a tree
            that grows level by level; M may be 0.
        scale: Factor of the queries, usually K ** -0.5.
        qk_l2norm: Normalise queries and keys as x * rsqrt(sum(x^2) + 1e-6) before use.

    Returns:
        The output `[B, N, HV, V]` in the dtype of `value`, and the states after each node `[B, N, HV, K, V]` in the
        dtype of `committed_state`. Both are 0 for padding.

    Raises:
        ValueError: A shape or dtype does not fit.

    Example:
        A root and two children, each of which starts from the root's state.

        >>> _ = torch.manual_seed(0)
        >>> value, query, key = torch.randn(1, 3, 4, 8), torch.randn(1, 3, 2, 6), torch.randn(1, 3, 2, 6)
        >>> log_decay, beta = -torch.rand(1, 3, 4), torch.rand(1, 3, 4)
        >>> state, parents = torch.randn(1, 4, 6, 8), torch.tensor([[-1, 0, 0]])
        >>> none = state.new_zeros(1, 0, 4, 6, 8)
        >>> output, states = tree_snapshots(value, query, key, log_decay, beta, state, parents, none, 6**-0.5, True)
        >>> output.shape, states.shape
        (torch.Size([1, 3, 4, 8]), torch.Size([1, 3, 4, 6, 8]))

    Source:
        Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024, for the recurrence.
    """
    check_rank("value", value, "B, N, HV, V")
    check_rank("key", key, "B, N, HK, K")
    check_rank("earlier_states", earlier_states, "B, M, HV, K, V")
    batch, num_nodes, value_heads, value_dim = value.shape
    key_heads, key_dim = key.shape[2:]
    num_earlier = earlier_states.shape[1]
    check_nodes("value", num_nodes)
    check_group("value", value_heads, "key", key_heads)
    check_shape("query", query, "B, N, HK, K", batch, num_nodes, key_heads, key_dim)
    check_shape("key", key, "B, N, HK, K", batch, num_nodes, key_heads, key_dim)
    check_log_decay("log_decay", log_decay, "B, N, HV", batch, num_nodes, value_heads)
    check_shape("beta", beta, "B, N, HV", batch, num_nodes, value_heads)
    check_shape("committed_state", committed_state, "B, HV, K, V", batch, value_heads, key_dim, value_dim)
    check_shape("parents", parents, "B, N", batch, num_nodes)
    check_index("parents", parents)
    check_shape("earlier_states", earlier_states, "B, M, HV, K, V", batch, num_earlier, value_heads, key_dim, value_dim)
    if earlier_states.dtype != committed_state.dtype:
        raise ValueError(
            f"earlier_states has dtype {earlier_states.dtype}, expected that of committed_state, "
            f"{committed_state.dtype}"
        )
    results: tuple[Tensor, Tensor] = _tree_snapshots(
        value, query, key, log_decay, beta, committed_state, parents, earlier_states, scale, qk_l2norm
    )
    return results
