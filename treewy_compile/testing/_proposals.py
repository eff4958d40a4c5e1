"""What a scripted drafter proposes to one row in one round: the shape of the tree, and what of it is right."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from treewy._draft_tree import parents_from_widths


@dataclass(frozen=True)
class Proposal:
    """Describe one row's draft in one round, in the numbering of ``DraftTree``: the root is not a node.

    Args:
        parents: Parent of each node, which precedes it; -1 for a child of the last emitted token.
        accepted: The nodes to be accepted, first level first: a path from a child of the last emitted token down.

    Raises:
        ValueError: If a node does not follow its parent, or ``accepted`` is not such a path.

    Example:
        >>> Proposal(parents=(-1, -1, 1), accepted=(1, 2)).num_tokens
        3

    Source:
        Draft trees as :class:`treewy.DraftTree` holds them.
    """

    parents: tuple[int, ...]
    accepted: tuple[int, ...]

    def __post_init__(self) -> None:
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ValueError(f"the parent of node {node} is {parent}; list every node after its parent, or -1")
        size = len(self.parents)
        above = -1
        for node in self.accepted:
            if not 0 <= node < size or self.parents[node] != above:
                raise ValueError(
                    f"accepted {self.accepted} is not a path from the root: node {node} of {size} is no child of "
                    f"{above}; name the path's nodes from the first level down"
                )
            above = node

    @property
    def num_tokens(self) -> int:
        """Tokens that the round emits: the accepted ones and the target's own."""
        return len(self.accepted) + 1


NOTHING = Proposal((), ())
"""A round without a draft."""


def chain(num_tokens: int, accept: int) -> Proposal:
    """Propose a chain whose first tokens are right.

    Args:
        num_tokens: Tokens in the chain.
        accept: How many of them are right.

    Returns:
        The proposal.

    Example:
        >>> chain(3, accept=2)
        Proposal(parents=(-1, 0, 1), accepted=(0, 1))

    Source:
        Speculative decoding of Leviathan et al. (2023), whose drafts are chains.
    """
    return Proposal(tuple(range(-1, num_tokens - 1)), tuple(range(accept)))


def perfect(num_tokens: int) -> Proposal:
    """Propose a chain that is right throughout.

    Args:
        num_tokens: Tokens in the chain.

    Returns:
        The proposal.

    Example:
        >>> perfect(2) == chain(2, accept=2)
        True

    Source:
        :func:`chain`; such a drafter alone hides a missing rollback.
    """
    return chain(num_tokens, num_tokens)


def always_wrong(num_tokens: int) -> Proposal:
    """Propose a chain whose first token is wrong already.

    Args:
        num_tokens: Tokens in the chain.

    Returns:
        The proposal.

    Example:
        >>> always_wrong(2) == chain(2, accept=0)
        True

    Source:
        :func:`chain`; every node has to be forgotten.
    """
    return chain(num_tokens, 0)


def tree(widths: Sequence[int], path: Sequence[int]) -> Proposal:
    """Propose a tree given by widths, with its right path as a bug report would name it.

    Args:
        widths: Children a node, from the first level on.
        path: Nodes of the right path, numbered breadth first with the last emitted token as node 0; it starts with 0.

    Returns:
        The proposal, in which the last emitted token is no node.

    Raises:
        ValueError: If the path does not start with 0 or is not one.

    Example:
        >>> tree((2, 2), path=(0, 2, 6))
        Proposal(parents=(-1, -1, 0, 0, 1, 1), accepted=(1, 5))

    Source:
        Fixed tree shapes as in Medusa (Cai et al., 2024), section 2.1.2.
    """
    if not path or path[0] != 0:
        raise ValueError(f"path {tuple(path)} must start with 0, the last emitted token")
    return Proposal(tuple(parents_from_widths(widths)), tuple(node - 1 for node in path[1:]))


def random_proposal(rng: random.Random, max_nodes: int) -> Proposal:
    """Draw any topology of up to ``max_nodes`` nodes, children in any order, and any node of it to be accepted."""
    parents = [rng.randint(-1, node - 1) for node in range(rng.randint(0, max_nodes))]
    return ending_at(parents, rng.randint(-1, len(parents) - 1))


def ending_at(parents: Sequence[int], node: int) -> Proposal:
    """Propose a tree of which the path down to ``node`` is right; -1 for none of it."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return Proposal(tuple(parents), tuple(path))
