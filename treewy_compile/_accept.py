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


def emitted_node(
    token_ids: Tensor, parents: Tensor, num_pending: Tensor, emitted: Tensor, num_emitted: Tensor
) -> tuple[Tensor, Tensor]:
    """Find which node of a draft model's own tree the target has emitted last, so that it can be committed.

    Args:
        token_ids: Of its nodes [B, N].
        parents: Their parents [B, N].
        num_pending: How many nodes of each row, a chain that ends with the root, were emitted before [B].
        emitted: Tokens that were emitted since [B, M], M > 0.
        num_emitted: How many of them count [B].

    Returns:
        The node [B], -1 for none, and its depth behind the root [B], 0 for the first drafted level. It is never the
        last emitted token: that one's logits are what the next drafts start from.
    """
    after_root = depths(parents) - num_pending[:, None]
    expected = emitted.gather(1, after_root.clamp(0, emitted.shape[1] - 1))
    agrees = (after_root < 0) | (token_ids == expected)
    node = deepest_accepted(agrees & (after_root < num_emitted[:, None] - 1), parents)
    return node, after_root.gather(1, node.clamp(min=0)[:, None])[:, 0]


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
