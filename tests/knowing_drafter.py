"""A drafter that knows the text, and is right as often as it is told."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from models import VOCAB_SIZE
from treewy import Drafter, DraftTree


class KnowingDrafter(Drafter):
    """Proposes pairs of siblings, a wrong token and the right one, as deep as the schedule says, and wrong ones below.

    Args:
        texts: Whole texts without pads, prompts included.
        schedule: How many levels are right in a round, again and again; rows begin at different places in it.
        depth: Levels of the trees.
    """

    def __init__(self, texts: Sequence[Sequence[int]], schedule: Sequence[int], depth: int) -> None:
        self._texts = texts
        self._depth = depth
        self._schedules = [itertools.cycle([*schedule[row:], *schedule[:row]]) for row in range(len(texts))]

    def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
        """Draft two nodes a level."""
        tokens = []
        for text, length, schedule in zip(self._texts, lengths.tolist(), self._schedules, strict=True):
            num_right, row = next(schedule), []
            for level in range(self._depth):
                right = text[min(length + level, len(text) - 1)]
                wrong = (right + 1) % VOCAB_SIZE
                row += [wrong, right if level < num_right else (right + 2) % VOCAB_SIZE]
            tokens.append(row)
        parents = [2 * (node // 2) - 1 for node in range(2 * self._depth)]
        device = input_ids.device
        return DraftTree(torch.tensor(tokens, device=device), torch.tensor(parents, device=device))
