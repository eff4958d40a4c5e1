"""Compare drawn tokens with a distribution."""

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

Text = tuple[int, ...]


def p_value(draws: Iterable[Text], expected: Mapping[Text, float]) -> float:
    """The probability of draws this far from what is expected, or farther (Pearson's chi-square test).

    Cells that should have fewer than five draws are taken together.
    """
    counts = Counter(draws)
    number = sum(counts.values())
    assert abs(sum(expected.values()) - 1) < 1e-5
    if any(expected.get(text, 0.0) == 0.0 for text in counts):
        return 0.0  # an impossible text
    cells = [(counts[text], number * probability) for text, probability in expected.items()]
    rare = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5]
    if rare:
        cells.append((sum(count for count, _ in rare), sum(mean for _, mean in rare)))
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells if mean > 0)
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2), torch.tensor(statistic / 2)))


def total_variation(draws: Tensor, expected: Tensor) -> float:
    """Between the frequencies of drawn tokens [R] and a distribution [V]."""
    frequency = draws.bincount(minlength=len(expected)) / len(draws)
    return float((frequency - expected).abs().sum() / 2)
