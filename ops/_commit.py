"""Fold the accepted path of a tree into the committed state.

The pseudo-values of `tree_wy_solve` give the state after any node a (equation 1 there):

    S_a = exp(G_a) S0 + sum_{j in path(a)} exp(G_a - G_j) k_j u_j^T

so a commit is one product of K x path by path x V matrices a head, and nothing had to be kept but u. As in the solve,
G_a - G_j is summed along the piece of path behind j, without a subtraction.

A row with nothing to commit (accepted node -1, or slot -1) keeps its state bit for bit, whatever its nodes hold.

In place on a pool. The pool is passed whole, with a slot a row: a view of one slot would be cloned and copied back
under `torch.compile`. Rows with nothing to commit must not write, and must not be dropped by a boolean index either,
since their number would have to be read on the host. Sending them to slot 0 would race with the row that owns it. So
each of them repeats the write of the first row that does commit: the same bits, to the same slot, in any order. When no
row commits, all of them write the state that slot 0 already has. This touches B states, whatever the size of the pool.

On CUDA `_commit_kernel.py` walks to the accepted node, and a program a tile of a state reads and writes it once.
"""

import importlib.util

import torch
from torch import Tensor
from torch.library import wrap_triton

from treewy.ops._algebra import decays_behind, grouped_matmul
from treewy.ops._launch import commit_options, kernels_apply, rows_contiguous
from treewy.ops._registration import tree_op
from treewy.ops._tree import path_mask
from treewy.ops._validation import check_group, check_index, check_log_decay, check_nodes, check_rank, check_shape

if importlib.util.find_spec("triton") is not None:
    from treewy.ops._commit_kernel import tree_commit_kernel


def _reference(
    committed_state: Tensor,
    pseudo_value: Tensor,
    key: Tensor,
    log_decay: Tensor,
    on_path: Tensor,
) -> Tensor:
    dtype = torch.promote_types(torch.float32, committed_state.dtype)
    absent = ~on_path
    path_decay = log_decay.to(dtype).masked_fill(absent.unsqueeze(-1), 0.0).transpose(1, 2)  # [B, HV, N]
    decay_behind, total = decays_behind(path_decay)
    keys = key.to(dtype).masked_fill(absent[:, :, None, None], 0.0)
    values = pseudo_value.to(dtype).masked_fill(absent[:, :, None, None], 0.0).transpose(1, 2)  # [B, HV, N, V]
    written = grouped_matmul(keys.permute(0, 2, 3, 1), decay_behind.exp().unsqueeze(-1) * values)  # [B, HV, K, V]
    state = total.exp()[:, :, None, None] * committed_state.to(dtype) + written
    return torch.where(on_path.any(1)[:, None, None, None], state.to(committed_state.dtype), committed_state)


@tree_op("tree_wy_commit")
def _tree_wy_commit(
    committed_state: Tensor,
    pseudo_value: Tensor,
    key: Tensor,
    log_decay: Tensor,
    parents: Tensor,
    accepted_node: Tensor,
) -> Tensor:
    if not kernels_apply(committed_state, pseudo_value, key):
        return _reference(committed_state, pseudo_value, key, log_decay, path_mask(parents, accepted_node)).contiguous()
    state = committed_state.contiguous()
    result = torch.empty_like(state)
    written = rows_contiguous(pseudo_value, key, log_decay, parents)
    grid, options = commit_options(pseudo_value, key)
    wrap_triton(tree_commit_kernel)[grid](
        state, accepted_node, *written, accepted_node, result, parents.shape[1], IN_PLACE=False, **options
    )
    return result


@_tree_wy_commit.register_fake
def _(
    committed_state: Tensor,
    pseudo_value: Tensor,
    key: Tensor,
    log_decay: Tensor,
    parents: Tensor,
    accepted_node: Tensor,
) -> Tensor:
    return committed_state.new_empty(committed_state.shape)


@tree_op("tree_wy_commit_", mutates_args={"state_pool"})
def _tree_wy_commit_(
    state_pool: Tensor,
    slots: Tensor,
    pseudo_value: Tensor,
    key: Tensor,
    log_decay: Tensor,
    parents: Tensor,
    accepted_node: Tensor,
) -> None:
    if kernels_apply(state_pool, pseudo_value, key):
        written = rows_contiguous(pseudo_value, key, log_decay, parents)
        grid, options = commit_options(pseudo_value, key)
        wrap_triton(tree_commit_kernel)[grid](
            state_pool, slots, *written, accepted_node, state_pool, parents.shape[1], IN_PLACE=True, **options
        )
        return
    on_path = path_mask(parents, accepted_node) & (slots >= 0)[:, None]
    slot = slots.long().clamp(min=0)
    states = _reference(state_pool.index_select(0, slot), pseudo_value, key, log_decay, on_path)
    # See "In place on a pool" above.
    commits = on_path.any(1)
    first = commits.long().argmax(0)
    writer = torch.where(commits, torch.arange(commits.shape[0], device=commits.device), first)
    slot = torch.where(commits.any(), slot.index_select(0, writer), 0)
    states = torch.where(commits.any(), states.index_select(0, writer), state_pool[:1])
    state_pool.index_copy_(0, slot, states)


@_tree_wy_commit_.register_fake
def _(
    state_pool: Tensor,
    slots: Tensor,
    pseudo_value: Tensor,
    key: Tensor,
    log_decay: Tensor,
    parents: Tensor,
    accepted_node: Tensor,
) -> None:
    return None


def _check(
    state: tuple[str, Tensor, str],
    batch: int,
    pseudo_value: Tensor,
    key: Tensor,
    log_decay: Tensor,
    parents: Tensor,
    accepted_node: Tensor,
) -> None:
    name, tensor, layout = state
    check_rank("pseudo_value", pseudo_value, "B, N, HV, V")
    check_rank("key", key, "B, N, HK, K")
    num_nodes, value_heads, value_dim = pseudo_value.shape[1:]
    key_heads, key_dim = key.shape[2:]
    check_nodes("pseudo_value", num_nodes)
    check_group("pseudo_value", value_heads, "key", key_heads)
    check_shape(name, tensor, layout, tensor.shape[0], value_heads, key_dim, value_dim)
    check_shape("pseudo_value", pseudo_value, "B, N, HV, V", batch, num_nodes, value_heads, value_dim)
    check_shape("key", key, "B, N, HK, K", batch, num_nodes, key_heads, key_dim)
    check_log_decay("log_decay", log_decay, "B, N, HV", batch, num_nodes, value_heads)
    check_shape("parents", parents, "B, N", batch, num_nodes)
    check_index("parents", parents)
    check_shape("accepted_node", accepted_node, "B", batch)
    check_index("accepted_node", accepted_node)


def tree_wy_commit(
    committed_state: Tensor,
    pseudo_value: Tensor,
    key: Tensor,
    log_decay: Tensor,
    parents: Tensor,
    accepted_node: Tensor,
) -> Tensor:
    """Return the state after one node of each row.

        S_a = exp(G_a) S0 + sum_{j in path(a)} exp(G_a - G_j) k_j u_j^T

    Computes in the wider of float32 and the dtype of the state. Value head h uses key head h // (HV / HK).

    Args:
        committed_state: `[B, HV, K, V]`, floating; read only.
        pseudo_value: `[B, N, HV, V]`, floating, as `tree_wy_solve` returned them; rounding them rounds the state.
        key: `[B, N, HK, K]`, floating, as used (the third result of `tree_wy_solve`).
        log_decay: `[B, N, HV]`, floating, natural logarithm, <= 0: each node's own, not the path's.
        parents: `[B, N]`, integer; -1 for a child of the committed state, `PADDING` for no node.
        accepted_node: `[B]`, integer: the node to commit, or -1 to keep the row's state bit for bit.

    Returns:
        The new states `[B, HV, K, V]` in the dtype of `committed_state`.

    Raises:
        ValueError: A shape or dtype does not fit.

    Example:
        Two rows; the first accepts nodes 0 and 2, the second nothing.

        >>> state, pseudo_value, key = torch.ones(2, 1, 1, 1), torch.ones(2, 3, 1, 1), torch.ones(2, 3, 1, 1)
        >>> parents = torch.tensor([[-1, 0, 0], [-1, 0, 0]])
        >>> accepted_node = torch.tensor([2, -1])
        >>> tree_wy_commit(state, pseudo_value, key, torch.zeros(2, 3, 1), parents, accepted_node).flatten()
        tensor([3., 1.])

    Source:
        Equation 1 of `_solve.py`.
    """
    check_rank("committed_state", committed_state, "B, HV, K, V")
    state = ("committed_state", committed_state, "B, HV, K, V")
    _check(state, committed_state.shape[0], pseudo_value, key, log_decay, parents, accepted_node)
    result: Tensor = _tree_wy_commit(committed_state, pseudo_value, key, log_decay, parents, accepted_node)
    return result


def tree_wy_commit_(
    state_pool: Tensor,
    slots: Tensor,
    pseudo_value: Tensor,
    key: Tensor,
    log_decay: Tensor,
    parents: Tensor,
    accepted_node: Tensor,
) -> None:
    """Replace the states of some slots of a pool by those after one node of each row, in place.

        S_a = exp(G_a) S0 + sum_{j in path(a)} exp(G_a - G_j) k_j u_j^T

    Computes in the wider of float32 and the dtype of the pool. Value head h uses key head h // (HV / HK).

    Args:
        state_pool: `[S, HV, K, V]`, floating; written in place. Pass the whole pool, not a view of it.
        slots: `[B]`, integer: the slot of each row; distinct, or -1 for a row without a state.
        pseudo_value: `[B, N, HV, V]`, floating, as `tree_wy_solve` returned them; rounding them rounds the state.
        key: `[B, N, HK, K]`, floating, as used (the third result of `tree_wy_solve`).
        log_decay: `[B, N, HV]`, floating, natural logarithm, <= 0: each node's own, not the path's.
        parents: `[B, N]`, integer; -1 for a child of the committed state, `PADDING` for no node.
        accepted_node: `[B]`, integer: the node to commit, or -1 to keep the slot bit for bit.

    Raises:
        ValueError: A shape or dtype does not fit.

    Example:
        >>> pool, pseudo_value, key = torch.ones(4, 1, 1, 1), torch.ones(2, 3, 1, 1), torch.ones(2, 3, 1, 1)
        >>> parents = torch.tensor([[-1, 0, 0], [-1, 0, 0]])
        >>> slots, accepted_node = torch.tensor([3, 0]), torch.tensor([2, -1])
        >>> tree_wy_commit_(pool, slots, pseudo_value, key, torch.zeros(2, 3, 1), parents, accepted_node)
        >>> pool.flatten()
        tensor([1., 1., 1., 3.])

    Source:
        Equation 1 of `_solve.py`.
    """
    check_rank("state_pool", state_pool, "S, HV, K, V")
    check_rank("slots", slots, "B")
    check_index("slots", slots)
    state = ("state_pool", state_pool, "S, HV, K, V")
    _check(state, slots.shape[0], pseudo_value, key, log_decay, parents, accepted_node)
    _tree_wy_commit_(state_pool, slots, pseudo_value, key, log_decay, parents, accepted_node)
