"""Move the keys and values of the accepted path next to the committed ones.

Verification leaves the keys and values of all N nodes in the cache, node i of row b in column `start[b] + i`, behind
what the row has committed. Accepting the path p_0, ..., p_{n-1} (root first) keeps n of them, side by side:

    column start + i <- column start + p_i          i < n

Parents precede children, so p_i >= i, and everything moves to the left or stays. Source and target overlap all the
same (node 2 goes to the place of node 1, node 3 to that of node 2), so everything is read before anything is written.
Columns behind the path keep what they hold; the next round writes over them.

Layers are stacked, as in `_conv_commit.py` and for the same reason: the path is short, and the same in all layers.

How rows without anything to commit are kept from writing, see `_slots.py`. Within a row the reference fills up its N
moves by repeating the first of them.
"""

import importlib.util

import torch
from torch import Tensor

from treewy.ops._registration import tree_op
from treewy.ops._slots import writing_rows
from treewy.ops._tree import path_to_node
from treewy.ops._validation import check_index, check_nodes, check_rank, check_shape

if importlib.util.find_spec("triton") is not None:
    import triton
    from torch.library import wrap_triton

    from treewy.ops._kv_commit_kernel import tree_kv_commit_kernel


def _reference(
    key_pool: Tensor, value_pool: Tensor, slots: Tensor, start: Tensor, parents: Tensor, accepted_node: Tensor
) -> None:
    path, length = path_to_node(parents, accepted_node)
    commits = (length > 0) & (slots >= 0)
    index = torch.arange(parents.shape[1], device=parents.device)
    place = torch.where(index < length[:, None], index, 0)
    node = torch.where(commits[:, None], path.gather(1, place), 0)
    place = torch.where(commits[:, None], place, 0)
    writer = writing_rows(commits)
    # The bounds matter to rows without a state alone, whose `start` may be anything.
    first = start.long().clamp(0, key_pool.shape[3] - 1)
    slot = slots.long().clamp(min=0).index_select(0, writer)[:, None]
    source = (first[:, None] + node).index_select(0, writer)
    target = (first[:, None] + place).index_select(0, writer)
    for pool in (key_pool, value_pool):
        pool[:, slot, :, target] = pool[:, slot, :, source]


def _tile(num_nodes: int) -> tuple[int, int]:
    """Choose nodes and dimensions a program: all nodes, and as many dimensions as its registers hold."""
    block_nodes = 16
    while block_nodes < num_nodes:  # one range guard a doubling when num_nodes is symbolic
        block_nodes *= 2
    return block_nodes, max(16, min(64, 4096 // block_nodes))


@tree_op("tree_kv_commit_", mutates_args={"key_pool", "value_pool"})
def _tree_kv_commit_(
    key_pool: Tensor, value_pool: Tensor, slots: Tensor, start: Tensor, parents: Tensor, accepted_node: Tensor
) -> None:
    if key_pool.device.type != "cuda":
        _reference(key_pool, value_pool, slots, start, parents, accepted_node)
        return
    layers, _, num_heads, _, head_dim = key_pool.shape
    batch, num_nodes = parents.shape
    block_nodes, block_dims = _tile(num_nodes)
    wrap_triton(tree_kv_commit_kernel)[(layers * batch, num_heads * triton.cdiv(head_dim, block_dims))](
        key_pool,
        value_pool,
        slots.contiguous(),
        start.contiguous(),
        parents,
        accepted_node.contiguous(),
        batch,
        num_heads,
        head_dim,
        *key_pool.stride(),
        *value_pool.stride(),
        *parents.stride(),
        BLOCK_NODES=block_nodes,
        BLOCK_DIMS=block_dims,
        num_warps=4,
    )


@_tree_kv_commit_.register_fake
def _(
    key_pool: Tensor, value_pool: Tensor, slots: Tensor, start: Tensor, parents: Tensor, accepted_node: Tensor
) -> None:
    return None


def tree_kv_commit_(
    key_pool: Tensor, value_pool: Tensor, slots: Tensor, start: Tensor, parents: Tensor, accepted_node: Tensor
) -> None:
    """Move the accepted path of each row to the front of its nodes in the key/value cache, in place.

        column start + i <- column start + p_i          for p_0, ..., p_{n-1} the path to the accepted node

    All layers commit in one call, on CUDA in one launch; pass L = 1 for a single layer. All other columns keep what
    they hold.

    Args:
        key_pool: `[L, S, HKV, T, D]`; written in place. Pass the whole pool, not a view of it.
        value_pool: `[L, S, HKV, T, D]`, likewise.
        slots: `[B]`, integer: the slot of each row, the same in every layer; distinct, or -1 for a row without a state.
        start: `[B]`, integer: the column of node 0; node i is in column `start + i`, below T for nodes of the path.
        parents: `[B, N]`, integer; -1 for a child of what is committed, `PADDING` for no node.
        accepted_node: `[B]`, integer: the node to commit, or -1 to keep the slot bit for bit.

    Raises:
        ValueError: A shape or dtype does not fit.

    Example:
        Two committed columns, then nodes 0 to 3, of which 0, 2 and 3 are accepted.

        >>> keys = torch.tensor([8.0, 9.0, 0.0, 1.0, 2.0, 3.0]).reshape(1, 1, 1, 6, 1)
        >>> values, slots, start = keys.clone(), torch.tensor([0]), torch.tensor([2])
        >>> tree_kv_commit_(keys, values, slots, start, torch.tensor([[-1, 0, 0, 2]]), torch.tensor([3]))
        >>> keys.flatten()
        tensor([8., 9., 0., 2., 3., 3.])

    Source:
        None: a move.
    """
    check_rank("key_pool", key_pool, "L, S, HKV, T, D")
    check_shape("value_pool", value_pool, "L, S, HKV, T, D", *key_pool.shape)
    check_rank("parents", parents, "B, N")
    batch, num_nodes = parents.shape
    check_nodes("parents", num_nodes)
    check_index("parents", parents)
    for name, tensor in (("slots", slots), ("start", start), ("accepted_node", accepted_node)):
        check_shape(name, tensor, "B", batch)
        check_index(name, tensor)
    _tree_kv_commit_(key_pool, value_pool, slots, start, parents, accepted_node)
