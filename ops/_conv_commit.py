"""Advance the convolution windows along the accepted path.

The window of a row is the last W columns of its text. Accepting the path to node a appends the columns of the path:

    window <- last W columns of cat(window, x_j for j in path(a), root first)

so with n nodes on the path, column w of the new window is column n + w of that sequence: an old column while n + w < W,
else node n + w - W of the path.

Layers are stacked. A model has tens of convolution layers, and all of them commit the same path of the same rows: a few
kilobytes a layer and row, less work than a launch. So the operator takes the windows of all layers of a kind as one
pool, and their columns as one tensor, with the layer in front; a single layer is L = 1. The dimension is always there:
an optional one would have to be added by a view, and a view of the pool would be cloned under `torch.compile`.

How rows without anything to commit are kept from writing, see `_slots.py`.
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

    from treewy.ops._conv_commit_kernel import tree_conv_commit_kernel


def _reference(window_pool: Tensor, slots: Tensor, x: Tensor, parents: Tensor, accepted_node: Tensor) -> None:
    layers, _, channels, width = window_pool.shape
    batch, num_nodes = parents.shape
    path, length = path_to_node(parents, accepted_node)
    length = torch.where(slots >= 0, length, 0)
    slot = slots.long().clamp(min=0)
    position = length[:, None] + torch.arange(width, device=parents.device)  # in cat(window, path)
    node = path.gather(1, (position - width).clamp(0, num_nodes - 1))
    source = torch.where(position < width, position, width + node)  # in cat(window, all nodes)
    columns = torch.cat([window_pool.index_select(1, slot), x.transpose(2, 3).to(window_pool.dtype)], dim=3)
    windows = columns.gather(3, source[None, :, None].expand(layers, batch, channels, width))
    writer = writing_rows(length > 0)
    window_pool.index_copy_(1, slot.index_select(0, writer), windows.index_select(1, writer))


@tree_op("tree_conv_commit_", mutates_args={"window_pool"})
def _tree_conv_commit_(window_pool: Tensor, slots: Tensor, x: Tensor, parents: Tensor, accepted_node: Tensor) -> None:
    if window_pool.device.type != "cuda":
        _reference(window_pool, slots, x, parents, accepted_node)
        return
    layers, batch, _, num_channels = x.shape
    width = window_pool.shape[3]
    block_channels = 256
    wrap_triton(tree_conv_commit_kernel)[(layers * batch, triton.cdiv(num_channels, block_channels))](
        window_pool,
        slots.contiguous(),
        x,
        parents,
        accepted_node.contiguous(),
        batch,
        num_channels,
        *window_pool.stride(),
        *x.stride(),
        *parents.stride(),
        WINDOW=width,
        BLOCK_COLUMNS=triton.next_power_of_2(width),
        BLOCK_CHANNELS=block_channels,
        num_warps=4,
    )


@_tree_conv_commit_.register_fake
def _(window_pool: Tensor, slots: Tensor, x: Tensor, parents: Tensor, accepted_node: Tensor) -> None:
    return None


def tree_conv_commit_(window_pool: Tensor, slots: Tensor, x: Tensor, parents: Tensor, accepted_node: Tensor) -> None:
    """Advance the convolution windows of some slots of a pool along the accepted path of each row, in place.

        window <- last W columns of cat(window, x_j for j in path(a), root first)

    All layers of a kind commit in one call, on CUDA in one launch; pass L = 1 for a single layer.

    Args:
        window_pool: `[L, S, C, W]`, floating, newest column last, W at least 1; written in place. Pass the whole pool,
            not a view of it.
        slots: `[B]`, integer: the slot of each row, the same in every layer; distinct, or -1 for a row without a state.
        x: `[L, B, N, C]`, floating: the inputs of `tree_conv`; converted to the dtype of the pool.
        parents: `[B, N]`, integer; -1 for a child of the newest column, `PADDING` for no node.
        accepted_node: `[B]`, integer: the node to commit, or -1 to keep the slot bit for bit.

    Raises:
        ValueError: A shape or dtype does not fit.

    Example:
        One layer of one channel; row 0 accepts nodes 0 and 2, row 1 nothing.

        >>> pool, x = torch.arange(9.0).reshape(1, 3, 1, 3), torch.arange(10.0, 16.0).reshape(1, 2, 3, 1)
        >>> parents = torch.tensor([[-1, 0, 0], [-1, 0, 0]])
        >>> tree_conv_commit_(pool, torch.tensor([2, 0]), x, parents, torch.tensor([2, -1]))
        >>> pool[0, :, 0]
        tensor([[ 0.,  1.,  2.],
                [ 3.,  4.,  5.],
                [ 8., 10., 12.]])

    Source:
        The update of `conv_states` in Hugging Face transformers, for a path instead of a text.
    """
    check_rank("window_pool", window_pool, "L, S, C, W")
    check_rank("x", x, "L, B, N, C")
    check_rank("slots", slots, "B")
    layers, batch, num_nodes, channels = window_pool.shape[0], slots.shape[0], x.shape[2], window_pool.shape[2]
    if window_pool.shape[3] < 1:
        raise ValueError(f"window_pool has shape {tuple(window_pool.shape)}, expected [L, S, C, W] with W at least 1")
    check_index("slots", slots)
    check_nodes("x", num_nodes)
    check_shape("x", x, "L, B, N, C", layers, batch, num_nodes, channels)
    check_shape("parents", parents, "B, N", batch, num_nodes)
    check_index("parents", parents)
    check_shape("accepted_node", accepted_node, "B", batch)
    check_index("accepted_node", accepted_node)
    _tree_conv_commit_(window_pool, slots, x, parents, accepted_node)
