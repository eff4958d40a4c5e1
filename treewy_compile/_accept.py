"""Which node of a verified tree the target agrees with."""

import torch
from torch import Tensor

from treewy.ops import PADDING, ancestor_mask, depths


def deepest_accepted(agrees: Tensor, parents: Tensor) -> Tensor:
    """Return the deepest node all of whose path agrees.

    Args:
        agrees: Whether each node, taken alone, is what its parent's distribution chose [B, N].
        parents: Parent of each node [B, N].

    Returns:
        Node [B], -1 where no node without a parent agrees. Of equally deep ones the first counts.
    """
    batch, size = parents.shape
    if size == 0:
        return parents.new_full((batch,), -1)
    on_path = ancestor_mask(parents)
    accepted = (agrees[:, None] | ~on_path).all(dim=-1) & (parents != PADDING)
    index = torch.arange(size, device=parents.device)
    rank = (depths(parents) + 1) * size - index  # deeper first, then earlier
    best, node = torch.where(accepted, rank, -1).max(dim=-1)
    return torch.where(best >= 0, node, -1)


def greedy_accept(token_ids: Tensor, parents: Tensor, chosen: Tensor) -> Tensor:
    """Return the deepest node whose path the target would have taken greedily.

    Args:
        token_ids: Tokens of the verified nodes, the root first [B, N].
        parents: Their parents [B, N]; the root's is -1.
        chosen: The target's choice after each node [B, N].

    Returns:
        Node [B]; 0, the root, if no draft node is accepted; -1 for a row of padding.
    """
    expected = chosen.gather(1, parents.clamp(min=0))
    return deepest_accepted((token_ids == expected) | (parents == -1), parents)
