"""What a way of decoding gives a compiled round, so that it chooses its paths on the device."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from treewy._scores import Scores

Chosen = tuple[Tensor, Tensor, Tensor | None]


class DeviceChoice(ABC):
    """Choose paths from what lies on the device alone: the tree, its logits, and tensors that are filled before.

    Args:
        scores: Of processors that can be traced.
    """

    def __init__(self, scores: Scores) -> None:
        self.scores = scores

    @property
    def key(self) -> Hashable:
        """What is compiled for one choice serves all others of the same key."""
        return type(self), self.scores.settings

    @abstractmethod
    def to_compile(self, device: torch.device) -> "DeviceChoice":
        """Return one of the same key with all its tensors on a device, that no user changes and no round fills."""

    @abstractmethod
    def places(self, shape: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
        """Return tensors for what rounds of this key need beside logits [B, N, V] and trees of up to N nodes."""

    @abstractmethod
    def fill(self, *places: Tensor) -> None:
        """Fill these tensors for the next round, in place."""

    @abstractmethod
    def paths(self, logits: Tensor, token_ids: Tensor, parents: Tensor, *places: Tensor) -> Chosen:
        """Choose a path a row; this is traced.

        Args:
            logits: The target's logits [B, N, V] after each node.
            token_ids: Tokens of the nodes, the root first [B, N].
            parents: Their parents [B, N].
            *places: What was filled.

        Returns:
            The last node of each path [B], -1 for a row of padding, and the token that follows it [B]; and, if it can
            fail, whether the scores along each path were a distribution [B].
        """
