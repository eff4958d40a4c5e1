"""From a draft to the tree that is verified: checked, put behind its root, and cut where a text must end.

A tree whose shape is known beforehand is planted once and then again and again: only its tokens are new. Any other one
is read back once and cut on the host: on a device the many small steps would be a launch each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treewy._decoding import Decoding
from treewy._draft_tree import DraftTree
from treewy._texts import Texts
from treewy.ops import PADDING


@dataclass(frozen=True)
class Planted:
    """A tree to verify.

    Args:
        token_ids: The root, that is each row's last token, and its drafts [B, N].
        parents: Their parents [B, N]; rows that have ended are padding.
        depths: How deep the drafts of each row are, 0 for none.
    """

    token_ids: Tensor
    parents: Tensor
    depths: list[int]


class Planting:
    """Plant the drafts of one generation.

    Args:
        decoding: What the target chooses, and where rows end.
        vocab_size: Token ids are below this.
        device: Of the target.
    """

    def __init__(self, decoding: Decoding, vocab_size: int, device: torch.device) -> None:
        self._decoding = decoding
        self._vocab_size = vocab_size
        self._device = device
        # a known shape, how deep each row may be (-1 for one that has ended), and what that gives
        self._last: tuple[Tensor, list[int], tuple[Tensor, list[int]]] | None = None

    def plant(self, draft: DraftTree, texts: Texts, ended: Sequence[bool]) -> Planted:
        """Check a draft and put each row's last token before it.

        Args:
            draft: What a drafter has proposed.
            texts: What it continues.
            ended: Which rows have ended; they become padding.

        Raises:
            ValueError: If it is no draft of this batch.
        """
        batch = len(texts)
        if not isinstance(draft, DraftTree):
            raise ValueError(f"the drafter proposed a {type(draft).__name__}; propose() must return a treewy.DraftTree")
        if draft.token_ids.shape[0] != batch:
            raise ValueError(
                f"the drafter proposed for {draft.token_ids.shape[0]} rows but the batch has {batch}; propose() must "
                "return one tree a row, with num_nodes 0 for rows without a proposal"
            )
        if draft.token_ids.device != self._device:
            raise ValueError(
                f"the draft tree is on {draft.token_ids.device} but the batch is on {self._device}; "
                f"move its tensors with .to({str(self._device)!r})"
            )
        # no node so deep that the text would be full before it is emitted; -1: not even a root
        most = [
            -1 if has_ended else room - 1 for room, has_ended in zip(self._decoding.room(texts), ended, strict=True)
        ]
        if draft.known_levels:
            parents, deepest = self._known_shape(draft, most)
            token_ids = draft.token_ids[:, : parents.shape[1] - 1]
        else:
            token_ids, parents, deepest = self._any_shape(draft, most)
        return Planted(torch.cat([texts.last_tokens(), token_ids], dim=1), parents, deepest)

    def _known_shape(self, draft: DraftTree, most: list[int]) -> tuple[Tensor, list[int]]:
        """Return the planted parents [B, N], and how deep the drafts of each row are."""
        most = [min(limit, len(draft.known_levels)) for limit in most]
        if self._last is None or self._last[0] is not draft.parents or self._last[1] != most:
            self._last = draft.parents, most, self._behind_roots(draft.parents.tolist(), most)
        return self._last[2]

    def _any_shape(self, draft: DraftTree, most: list[int]) -> tuple[Tensor, Tensor, list[int]]:
        """Return the drafts' tokens [B, N - 1], the planted parents [B, N], and how deep the drafts of each row are."""
        read = torch.cat([draft.token_ids, draft.parents, draft.num_nodes[:, None]], dim=1).cpu()
        size = draft.token_ids.shape[1]
        token_ids, num_nodes = read[:, :size], read[:, -1]
        real = torch.arange(size) < num_nodes[:, None]
        wrong = real & ((token_ids < 0) | (token_ids >= self._vocab_size))
        if bool(wrong.any()):
            row, node = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"draft token id {int(token_ids[row, node])} (row {row}, node {node}) is outside the target's "
                f"vocabulary of {self._vocab_size}; the drafter must use the target's tokenizer"
            )
        self._decoding.check(draft, self._vocab_size)
        real_parents = [row[:count] for *row, count in read[:, size:].tolist()]
        parents, deepest = self._behind_roots(real_parents, most)
        token_ids = torch.where(real, token_ids, 0)[:, : parents.shape[1] - 1]
        return token_ids.to(self._device), parents, deepest

    def _behind_roots(self, parents: list[list[int]], most: list[int]) -> tuple[Tensor, list[int]]:
        """Put a root before the nodes of each row; return their parents [B, N], and how deep the drafts of each are."""
        rows, deepest = zip(*map(_behind_root, parents, most), strict=True)
        size = max(map(len, rows))
        padded = [row + [PADDING] * (size - len(row)) for row in rows]
        return torch.tensor(padded).to(self._device), list(deepest)


def _behind_root(parents: list[int], most: int) -> tuple[list[int], int]:
    """Return the parents of a root and of the nodes down to a depth, and how deep these are; -1 leaves no root either.

    Nodes that are deeper become padding, and are left out at the end.
    """
    if most < 0:
        return [], 0
    depths, planted = [0], [-1]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
        planted.append(parent + 1 if depths[-1] <= most else PADDING)
    while planted[-1] == PADDING:
        planted.pop()
    return planted, min(most, max(depths))
