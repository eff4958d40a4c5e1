"""Greedy decoding of a verified tree."""

from collections.abc import Sequence

import torch
from torch import Tensor

from treewy._accept import greedy_accept
from treewy._decoding import Decoding, RowOfTree
from treewy._device_choice import Chosen, DeviceChoice
from treewy._draft_tree import DraftTree
from treewy._scores import no_text

_PARTS = 64  # of a vocabulary; most are a multiple


class GreedyDecoding(Decoding):
    """Take the token with the greatest score."""

    def check(self, draft: DraftTree, vocab_size: int) -> None:
        """Do nothing: what a draft says about chance does not matter."""

    def choose_paths(
        self, scores: Tensor, token_ids: Tensor, parents: Tensor, draft: DraftTree | None
    ) -> tuple[Tensor, Tensor]:
        """Take the deepest path of greatest scores; see ``Decoding.choose_paths``."""
        return greedy_paths(scores, token_ids, parents)

    def device_choice(self, draft: DraftTree | None) -> DeviceChoice:
        """Return what takes the deepest path of greatest scores; see ``Decoding.device_choice``."""
        return GreedyChoice(self.scores)

    def choose(self, scores: Tensor, reached: Tensor, tree: RowOfTree) -> tuple[Tensor, Tensor]:
        """Take the token with the greatest score; see ``Decoding.choose``."""
        token = scores.argmax(dim=-1, keepdim=True)
        return token, (torch.isin(tree.parents, reached) & (tree.token_ids == token)).nonzero()[:, 0]


class GreedyChoice(DeviceChoice):
    """Take the deepest path of greatest scores, on the device."""

    def to_compile(self, device: torch.device) -> DeviceChoice:
        """Return one with processors of its own; see ``DeviceChoice.to_compile``."""
        return GreedyChoice(self.scores.copied_to(device))

    def places(self, shape: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
        """Return nothing: logits and tree decide; see ``DeviceChoice.places``."""
        return ()

    def fill(self, *places: Tensor) -> None:
        """Do nothing; see ``DeviceChoice.fill``."""

    def paths(self, logits: Tensor, token_ids: Tensor, parents: Tensor, *places: Tensor) -> Chosen:
        """Choose a path a row; see ``DeviceChoice.paths``."""
        scores = self.scores.of_nodes(logits, no_text) if self.scores.change_logits else logits
        return *greedy_paths(scores, token_ids, parents), None


def greedy_paths(scores: Tensor, token_ids: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last node of each row's deepest path of greatest scores, and the token behind it.

    Args:
        scores: [B, N, V] after each node.
        token_ids: Tokens of the nodes, the root first [B, N].
        parents: Their parents [B, N].
    """
    chosen = _greatest(scores)
    node = greedy_accept(token_ids, parents, chosen)
    return node, chosen.gather(1, node.clamp(min=0)[:, None])[:, 0]


def _greatest(scores: Tensor) -> Tensor:
    """Return ``scores.argmax(dim=-1)``, part by part."""
    parts = in_parts(scores)
    greatest, index = parts.max(dim=-1)
    part = greatest.argmax(dim=-1, keepdim=True)
    chosen: Tensor = part * parts.shape[-1] + index.gather(-1, part)
    return chosen[..., 0]


def in_parts(scores: Tensor, least: int = 1) -> Tensor:
    """Return scores [..., V] as parts [..., P, V / P] of no fewer than ``least``; one part if V is no multiple.

    What is greatest is looked for in each part and then among these: in one step, few rows would have few programs.
    """
    size = scores.shape[-1] // _PARTS
    parts = _PARTS if scores.shape[-1] % _PARTS == 0 and size >= least else 1
    return scores.reshape(*scores.shape[:-1], parts, -1)
