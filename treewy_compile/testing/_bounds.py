"""What counts as equal: bounds that follow from how far two ways of computing the plain model lie apart.

The plain model, token by token and in one forward, sums in different orders, so its own numbers differ by what is
called noise here. Speculative decoding is a third order. Its error may be a few times the noise, or a floor that stands
for the rounding that a short noise measurement may have missed. Measured values are in docs/testing.md.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

TIE_FLOAT32 = 1e-4
"""In float32 two texts may part where the plain model's logit of the chosen token is this close to its best."""

FLOOR_FLOAT32 = {"stores": 2e-4, "logits": 1e-4}
"""Relative errors that rounding explains in float32 through a few layers and some dozens of tokens."""

FLOOR_LOW_PRECISION = 4.0
"""In bfloat16 and float16: this many units of rounding, relative to the greatest value."""

MARGIN = {"stores": 4.0, "logits": 6.0}
"""An error may be so many times the greatest noise, of the same layer and store for a store. Measured on tiny models in
float16 and bfloat16: 1.7 and 2.4 times. Noise of logits is measured along the text, errors beside it too."""

TIE_MARGIN = 2.0
"""In low precision a tie is within this many times the greatest noise of a distance: both texts have some."""

TIES_BESIDE_EXPECTED = 2
"""Places with ties that are accepted beyond what the noise lets expect."""


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the greatest absolute error over the greatest absolute value; 0 for two tensors of zeros."""
    if expected.numel() == 0:
        return 0.0
    scale = expected.double().abs().max().item()
    error = (actual.double() - expected.double()).abs().max().item()
    return error / scale if scale > 0 else error


@dataclass
class Noise:
    """How far the plain model token by token and the plain model in one forward lie apart.

    Args:
        dtype: Of the model.
        stores: Greatest relative difference by layer and store.
        logits: Greatest relative difference of the logits after a token.
        gaps: At each token: the distance of the two best logits, and how much it differs between the two ways.
    """

    dtype: torch.dtype
    stores: dict[tuple[int, str], float] = field(default_factory=dict)
    logits: float = 0.0
    gaps: list[tuple[float, float]] = field(default_factory=list)

    @property
    def is_exact(self) -> bool:
        """Whether the dtype is precise enough for tokens to be compared with a fixed bound."""
        return self.dtype in (torch.float32, torch.float64)

    def store_bound(self, layer: int, store: str) -> float:
        """Return the greatest relative error allowed in a store of a layer."""
        return max(self._floor("stores"), MARGIN["stores"] * self.stores.get((layer, store), 0.0))

    @property
    def logits_bound(self) -> float:
        """Greatest relative error allowed in the logits of a node."""
        return max(self._floor("logits"), MARGIN["logits"] * self.logits)

    @property
    def tie_bound(self) -> float:
        """Distance of logits under which either of two tokens is as right as the other."""
        noise = TIE_MARGIN * max((difference for _, difference in self.gaps), default=0.0)
        return max(TIE_FLOAT32, noise) if self.is_exact else noise

    def expected_ties(self, num_generations: int) -> float:
        """Return at how many of the measured tokens some of so many generations are expected to part.

        The noise turns a token at a distance g with probability Q(g / s), where Q is the upper tail of the normal
        distribution and s the root mean square of the noise of the distance.
        """
        if not self.gaps:
            return 0.0
        gap, difference = torch.tensor(self.gaps, dtype=torch.float64).T
        spread = difference.square().mean().sqrt().clamp(min=1e-30)
        turned = torch.special.ndtr(-gap / spread)
        return float((1 - (1 - turned) ** num_generations).sum())

    def _floor(self, what: str) -> float:
        if self.is_exact:
            return FLOOR_FLOAT32[what]
        return FLOOR_LOW_PRECISION * torch.finfo(self.dtype).eps
