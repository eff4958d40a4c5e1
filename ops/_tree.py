"""Turn the parents of a tree into masks, depths and paths.

A tree of N nodes is the tensor `parents [B, N]`: `parents[b, i] < i` is the node that i continues, -1 says that i
continues the committed state, and `PADDING` (-2) that row b has no node i. Parents precede children, so the ancestors
of a node, sorted by index, are its path from the root.

Ancestors come by pointer doubling. Let M_s[i] be the set of the 2^s nearest ancestors-or-selves of i and p_s[i] its
2^s-th ancestor. Then

    M_{s+1}[i] = M_s[i] | M_s[p_s[i]]          p_{s+1}[i] = p_s[p_s[i]]

and after ceil(log2(N)) steps M holds every path, whatever the topology. The number of steps comes from the shape alone
and no value is read on the host, so a CUDA graph captured for one tree replays for any other.
"""

import torch
from torch import Tensor

PADDING = -2
"""The parent of a node that is not there. Such a node is inert: nothing depends on its inputs, its outputs are 0."""


def ancestor_mask(parents: Tensor) -> Tensor:
    """Mark the ancestors of each node and the node itself.

    `mask[b, i, j]` is true when j is i or an ancestor of i. Rows and columns of padding nodes are all false.

    Args:
        parents: `[B, N]`, integer; -1 for a child of the committed state, `PADDING` for no node.

    Returns:
        `[B, N, N]`, bool.

    Example:
        >>> ancestor_mask(torch.tensor([[-1, 0, 0, 2]])).int()
        tensor([[[1, 0, 0, 0],
                 [1, 1, 0, 0],
                 [1, 0, 1, 0],
                 [1, 0, 1, 1]]], dtype=torch.int32)
    """
    num_nodes = parents.shape[1]
    pointer = parents.long()
    index = torch.arange(num_nodes, device=parents.device)
    mask = (index[:, None] == index) & (parents != PADDING)[:, :, None]
    span = 1
    while span < num_nodes:  # one range guard a doubling when num_nodes is symbolic
        inside, target = pointer >= 0, pointer.clamp(min=0)
        mask = mask | (mask.gather(1, target[:, :, None].expand_as(mask)) & inside[:, :, None])
        pointer = torch.where(inside, pointer.gather(1, target), pointer)
        span *= 2
    return mask


def depths(parents: Tensor) -> Tensor:
    """Count the ancestors of each node.

    Args:
        parents: `[B, N]`, integer; -1 for a child of the committed state, `PADDING` for no node.

    Returns:
        `[B, N]`, int64: 0 for a node with parent -1, one more than its parent for any other, -1 for padding.

    Example:
        >>> depths(torch.tensor([[-1, 0, 0, 2, PADDING]]))
        tensor([[ 0,  1,  1,  2, -1]])
    """
    return ancestor_mask(parents).sum(-1) - 1


def path_to_node(parents: Tensor, accepted_node: Tensor) -> tuple[Tensor, Tensor]:
    """List the nodes on the path to one node of each row, root first.

    Args:
        parents: `[B, N]`, integer; -1 for a child of the committed state, `PADDING` for no node.
        accepted_node: `[B]`, integer; -1 for the empty path.

    Returns:
        The nodes `[B, N]`, int64, filled with -1 on the right, and their number `[B]`, int64.

    Example:
        >>> path_to_node(torch.tensor([[-1, 0, 0, 2]]), torch.tensor([3]))
        (tensor([[ 0,  2,  3, -1]]), tensor([3]))
    """
    num_nodes = parents.shape[1]
    on_path = path_mask(parents, accepted_node)
    index = torch.arange(num_nodes, device=parents.device)
    nodes = torch.where(on_path, index, num_nodes).sort(-1).values
    return torch.where(nodes < num_nodes, nodes, -1), on_path.sum(-1)


def path_mask(parents: Tensor, accepted_node: Tensor) -> Tensor:
    """Mark the nodes on the path to one node of each row, as `[B, N]`, bool; none where `accepted_node` is -1."""
    mask = ancestor_mask(parents)
    row = accepted_node.long().clamp(min=0)[:, None, None].expand(-1, 1, mask.shape[2])
    return mask.gather(1, row).squeeze(1) & (accepted_node >= 0)[:, None]
