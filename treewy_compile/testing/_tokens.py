"""Texts against plain generation: where they part, and whether the plain model minds."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from treewy.testing._bounds import TIES_BESIDE_EXPECTED, Noise
from treewy.testing._plain import logits_at_once
from treewy.testing._report import Comparison, Tie


class TokenComparison:
    """Compare generations with plain ones and keep the places where they part.

    Args:
        model: The plain model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._generations: dict[tuple[str, str], tuple[int, list[Tie]]] = {}  # tokens and differences, by line
        self._texts: dict[Tie, tuple[int, ...]] = {}  # before each difference: other generations may part there too

    def add(
        self, check: str, generation: str, prompts: Sequence[Tensor], expected: Tensor, actual: Tensor
    ) -> list[int]:
        """Compare the new tokens [B, M] of a generation, a line of the report; return the rows that part.

        A row is compared up to its first difference: what follows belongs to another text.
        """
        width = max(expected.shape[1], actual.shape[1])
        expected, actual = (torch.nn.functional.pad(x, (0, width - x.shape[1]), value=-1) for x in (expected, actual))
        compared = 0
        partings: list[Tie] = []
        for row, (plain, ours) in enumerate(zip(expected.tolist(), actual.tolist(), strict=True)):
            position = next((i for i, pair in enumerate(zip(plain, ours, strict=True)) if pair[0] != pair[1]), None)
            compared += width if position is None else position + 1
            if position is not None:
                text = prompts[row].tolist() + plain[:position]
                gap = self._gap(text, plain[position], ours[position])
                parting = Tie(generation, row, position, plain[position], ours[position], gap)
                self._texts[parting] = tuple(text)
                partings.append(parting)
        self._generations[check, generation] = compared, partings
        return [parting.row for parting in partings]

    def judge(self, noise: Noise) -> tuple[list[Comparison], tuple[Tie, ...]]:
        """Return a line a generation, one for the number of ties, and the ties."""
        bound = noise.tie_bound
        lines = []
        ties: list[Tie] = []
        total = 0
        for (check, generation), (compared, partings) in self._generations.items():
            faults = [parting for parting in partings if not parting.gap < bound]
            worst = max((parting.gap for parting in partings), default=0.0)
            lines.append(Comparison(check, generation, compared, worst, bound, str(faults[0]) if faults else None))
            ties += [parting for parting in partings if parting.gap < bound]
            total += compared
        places = len({self._texts[tie] for tie in ties})
        allowed = TIES_BESIDE_EXPECTED + noise.expected_ties(len(self._generations))
        fault = None
        if places > allowed:
            fault = f"ties at {places} places; the plain model's own noise explains at most {allowed:.1f}"
        lines.append(Comparison("ties", "places", total, places, allowed, fault))
        return lines, tuple(ties)

    def _gap(self, text: list[int], expected: int, actual: int) -> float:
        """Return how far the worse of two tokens lies below the best; infinity if one is missing."""
        if min(expected, actual) < 0:
            return math.inf
        logits = logits_at_once(self._model, [text], keep=1)[0, -1].float()
        return float(logits.max() - torch.minimum(logits[expected], logits[actual]))
