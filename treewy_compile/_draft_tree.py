"""The tree of tokens that a drafter proposes."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from numbers import Integral
from typing import ClassVar, Literal

import torch
from torch import Tensor

MAX_NODES = 1024  # of a tree given by widths: the cost of a verification grows with the square

_SUM_OF_PROBABILITIES = 1e-2  # how far it may be from 1: half precision, summed over a vocabulary

Sampling = Literal["top", "with_replacement", "without_replacement"]


@dataclass(frozen=True, init=False, eq=False)
class DraftTree:
    """Hold the draft nodes of a batch: token and parent of each.

    Parents precede their children, so ``parents[i] < i``; -1 marks a child of the last emitted token, which is not part
    of the tree itself.

    Args:
        token_ids: Tokens [B, N], int64.
        parents: Parent index of each node, [N] for one topology or [B, N] for one a row, int64.
        num_nodes: Real nodes a row [B], int64, each at most N; the rest is padding. None means N everywhere.
        draft_probs: Distributions [B, P, V] that the tokens were drawn from, floating, over the target's vocabulary:
            one a parent (not one a node), in the order of the parents' indices, the last emitted token's (-1) first. P
            is the number of parents of the row that has most. Of siblings without replacement it is what the first was
            drawn from. Greedy decoding does not look at it.
        sampling: How siblings were chosen: drawn with or without replacement, in the order in which they stand, or
            "top", the most probable ones. The rule for "top" is right for tokens chosen in any way, also without
            ``draft_probs``, but accepts drawn ones less often than their own.

    Raises:
        ValueError: If shapes, devices or values do not describe such trees.

    Example:
        >>> tree = DraftTree(torch.tensor([[5, 7, 9]]), torch.tensor([-1, -1, 0]))
        >>> tree.parents.tolist()
        [[-1, -1, 0]]

        The same drawn, from a vocabulary of ten: tokens 5 and 7 from one distribution, 9 from that behind 5.

        >>> q = torch.full((1, 2, 10), 0.1)  # of -1 and of node 0; node 1 has no children
        >>> tree = DraftTree(tree.token_ids, tree.parents, draft_probs=q, sampling="with_replacement")

    Source:
        Token trees as in SpecInfer (Miao et al., 2024), section 3.
    """

    token_ids: Tensor
    parents: Tensor
    num_nodes: Tensor
    draft_probs: Tensor | None
    sampling: Sampling

    known_levels: ClassVar[tuple[int, ...]] = ()
    """If all rows are full, all tokens the target's and nodes in order of depth, so that nobody has to look: how many
    nodes there are down to each level. Such a tree's parents stay as they are: what they become is kept."""

    def __init__(
        self,
        token_ids: Tensor,
        parents: Tensor,
        *,
        num_nodes: Tensor | None = None,
        draft_probs: Tensor | None = None,
        sampling: Sampling = "top",
    ) -> None:
        if not isinstance(token_ids, Tensor) or not isinstance(parents, Tensor):
            raise TypeError("token_ids and parents must be tensors; wrap them in torch.tensor")
        if token_ids.ndim != 2:
            raise ValueError(f"token_ids must be [B, N], not {list(token_ids.shape)}")
        batch, size = token_ids.shape
        if parents.ndim == 1:
            parents = parents[None].expand(batch, -1)
        if parents.shape != token_ids.shape:
            raise ValueError(
                f"parents {list(parents.shape)} must be [N] or [B, N] for token_ids {list(token_ids.shape)}"
            )
        if num_nodes is None:
            num_nodes = torch.full((batch,), size, dtype=torch.int64, device=token_ids.device)
        if not isinstance(num_nodes, Tensor):
            raise TypeError(f"num_nodes {num_nodes!r} must be a tensor, one count a row; wrap it in torch.tensor")
        if num_nodes.shape != (batch,):
            raise ValueError(f"num_nodes {list(num_nodes.shape)} must be [{batch}], one count a row of token_ids")
        for name, tensor in (("token_ids", token_ids), ("parents", parents), ("num_nodes", num_nodes)):
            if tensor.dtype != torch.int64:
                raise ValueError(f"{name} must be int64, not {tensor.dtype}; call .long()")
            if tensor.device != token_ids.device:
                raise ValueError(
                    f"{name} is on {tensor.device} but token_ids is on {token_ids.device}; move it with .to()"
                )
        if sampling not in ("top", "with_replacement", "without_replacement"):
            raise ValueError(f"sampling {sampling!r} must be 'top', 'with_replacement' or 'without_replacement'")
        if draft_probs is not None:
            _check_draft_probs(draft_probs, token_ids)
            if sampling == "top":
                raise ValueError(
                    "draft_probs are given but sampling='top' does not use them; pass sampling='with_replacement' or "
                    "'without_replacement', or leave draft_probs out"
                )
        if token_ids.device.type != "meta":  # where there are no values to check
            _check_values(parents, num_nodes)
        for name, value in (
            ("token_ids", token_ids),
            ("parents", parents),
            ("num_nodes", num_nodes),
            ("draft_probs", draft_probs),
            ("sampling", sampling),
        ):
            object.__setattr__(self, name, value)

    @cached_property
    def probs_index(self) -> Tensor:
        """Row of ``draft_probs`` for each possible parent [B, N + 1], that of -1 first."""
        batch, size = self.parents.shape
        real = torch.arange(size, device=self.parents.device) < self.num_nodes[:, None]
        counts = torch.zeros(batch, size + 1, dtype=torch.int64, device=self.parents.device)
        counts.scatter_add_(1, torch.where(real, self.parents, -1) + 1, real.long())
        return (counts > 0).cumsum(dim=1) - 1

    def with_token_ids(self, token_ids: Tensor, known_levels: tuple[int, ...]) -> "DraftTree":
        """Return the same tree of other tokens [B, N], which the caller knows; see ``known_levels``."""
        assert token_ids.shape == self.token_ids.shape
        tree = copy.copy(self)
        object.__setattr__(tree, "token_ids", token_ids)
        object.__setattr__(tree, "known_levels", known_levels)
        return tree

    def probs_after(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """Return the distributions [R, V] that children were drawn from.

        Args:
            rows: Rows of the batch [R].
            nodes: A parent in each [R], -1 for the last emitted token; without children, anything is returned.
        """
        assert self.draft_probs is not None
        source = self.probs_index[rows, nodes + 1].clamp(0, self.draft_probs.shape[1] - 1)
        return self.draft_probs[rows, source]

    def check_draft_probs(self, vocab_size: int) -> None:
        """Check that ``draft_probs`` is what the tokens can have been drawn from, since sampling relies on it.

        Args:
            vocab_size: Of the target.

        Raises:
            ValueError: If it is missing or is no such distribution.
        """
        if self.sampling == "top" or not bool(self.num_nodes.any()):
            return
        if self.draft_probs is None:
            raise ValueError(
                f"sampling {self.sampling!r} needs draft_probs, the distributions that the tokens were drawn from; "
                "pass them, or sampling='top', which needs none"
            )
        if self.draft_probs.shape[2] != vocab_size:
            raise ValueError(
                f"draft_probs has a vocabulary of {self.draft_probs.shape[2]} but the target one of {vocab_size}; "
                "draw from the target's tokens alone, and give all others 0"
            )
        size = self.parents.shape[1]
        index = torch.arange(size, device=self.parents.device)
        real = index < self.num_nodes[:, None]
        source = self.probs_index.gather(1, torch.where(real, self.parents, -1) + 1).masked_fill(~real, 0)
        most = int(source.max()) + 1
        if self.draft_probs.shape[1] != most:
            row = int(source.max(dim=1).values.argmax())
            raise ValueError(
                f"draft_probs has {self.draft_probs.shape[1]} distributions but row {row}, the one with most parents, "
                f"has {most}; pass one a parent (not one a node), the last emitted token's first"
            )
        rows = torch.arange(len(source), device=source.device)[:, None]
        total, least = self.draft_probs.sum(dim=2)[rows, source], self.draft_probs.amin(dim=2)[rows, source]
        own = self.draft_probs[rows, source, self.token_ids.masked_fill(~real, 0)]
        same_parent = (self.parents[:, :, None] == self.parents[:, None]) & (index < index[:, None])
        same_token = self.token_ids[:, :, None] == self.token_ids[:, None]
        repeated = (same_parent & same_token & real[:, None]).any(dim=2) & (self.sampling == "without_replacement")
        no_distribution = ~((total - 1).abs() < _SUM_OF_PROBABILITIES) | ~(least >= 0)  # NaN is none either
        for wrong, what in (
            (no_distribution, "was drawn from draft_probs that do not add up to 1, or are negative; normalise them"),
            (~(own > 0), "has probability 0 in draft_probs; pass the distribution that it was drawn from"),
            (repeated, "repeats an earlier sibling; draw without replacement, or pass sampling='with_replacement'"),
        ):
            if bool((wrong & real).any()):
                row, node = (wrong & real).nonzero()[0].tolist()
                raise ValueError(f"draft token {int(self.token_ids[row, node])} (row {row}, node {node}) {what}")

    @classmethod
    def from_widths(cls, widths: Sequence[int], token_ids: Tensor) -> "DraftTree":
        """Build the tree in which every node of depth d has ``widths[d]`` children, level by level.

        Args:
            widths: Children a node, from the first level on; (1, 1, 1) is a chain of three.
            token_ids: Tokens [B, N] in level order, N = sum of the level sizes.

        Returns:
            The tree.

        Raises:
            ValueError: If a width is not positive, or the number of tokens does not fit.

        Example:
            >>> DraftTree.from_widths((2, 1), torch.tensor([[4, 5, 6, 7]])).parents.tolist()
            [[-1, -1, 0, 1]]

        Source:
            Fixed tree shapes as in Medusa (Cai et al., 2024), section 2.1.2.
        """
        parents = parents_from_widths(widths)
        if token_ids.ndim != 2 or token_ids.shape[1] != len(parents):
            raise ValueError(
                f"widths {tuple(widths)} make {len(parents)} nodes, but token_ids is {list(token_ids.shape)}"
            )
        return cls(token_ids, torch.tensor(parents, dtype=torch.int64, device=token_ids.device))


def parents_from_widths(widths: Sequence[int]) -> list[int]:
    """Return the parents of a tree given by its widths, level by level."""
    if not isinstance(widths, Sequence):
        raise TypeError(f"widths {widths!r} must be a sequence with one integer a level; (1, 1, 1) is a chain of 3")
    if len(widths) == 0 or any(
        not isinstance(width, Integral) or isinstance(width, bool) or width < 1 for width in widths
    ):
        raise ValueError(f"widths {tuple(widths)} must be positive integers, one a level; (1, 1, 1) is a chain of 3")
    size = sum(prod(widths[: depth + 1]) for depth in range(len(widths)))
    if size > MAX_NODES:
        raise ValueError(f"widths {tuple(widths)} make {size} nodes, more than {MAX_NODES}; draft a smaller tree")
    parents: list[int] = []
    level_start, level_size = -1, 1  # the root
    for depth, width in enumerate(widths):
        parents += [level_start + node for node in range(level_size) for _ in range(width)]
        level_size = prod(widths[: depth + 1])
        level_start = len(parents) - level_size
    return parents


def parents_of_shape(shape: Sequence[int] | DraftTree) -> list[int]:
    """Return the parents of a tree shape given by widths or by a tree whose rows are all alike."""
    if not isinstance(shape, DraftTree):
        return parents_from_widths(shape)
    if shape.parents.device.type == "meta":
        raise ValueError("a DraftTree that gives the shape of drafts is on the meta device; make it on the CPU")
    if not bool((shape.parents == shape.parents[:1]).all()) or not bool(
        (shape.num_nodes == shape.parents.shape[1]).all()
    ):
        raise ValueError("a DraftTree that gives the shape of drafts must have the same full topology in every row")
    if shape.parents.shape[1] == 0:
        raise ValueError("a DraftTree that gives the shape of drafts must have at least one node")
    parents: list[int] = shape.parents[0].tolist()
    return parents


def _check_draft_probs(draft_probs: Tensor, token_ids: Tensor) -> None:
    if not isinstance(draft_probs, Tensor):
        raise TypeError(f"draft_probs {draft_probs!r:.60} must be a tensor [B, P, V], one distribution a parent")
    if draft_probs.ndim != 3 or draft_probs.shape[0] != token_ids.shape[0]:
        raise ValueError(
            f"draft_probs {list(draft_probs.shape)} must be [B, P, V], one distribution a parent, for token_ids "
            f"{list(token_ids.shape)}"
        )
    if draft_probs.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"draft_probs must be floating, of 16 bits or more, not {draft_probs.dtype}")
    if draft_probs.device != token_ids.device:
        raise ValueError(
            f"draft_probs is on {draft_probs.device} but token_ids is on {token_ids.device}; move it with .to()"
        )


def _check_values(parents: Tensor, num_nodes: Tensor) -> None:
    size = parents.shape[1]
    if bool(((num_nodes < 0) | (num_nodes > size)).any()):
        raise ValueError(f"num_nodes {num_nodes.tolist()} must lie between 0 and the {size} nodes of token_ids")
    index = torch.arange(size, device=parents.device)
    real = index < num_nodes[:, None]
    wrong = real & ((parents < -1) | (parents >= index))
    if bool(wrong.any()):
        row, node = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"the parent of node {node} in row {row} is {int(parents[row, node])}; parents must be -1 or the index of "
            "an earlier node, so list every node after its parent"
        )
