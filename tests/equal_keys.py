"""Inputs on which a solve is hardest: chains of nodes with almost the same key."""

import pytest
import torch

from tolerances import KERNEL_HALVES, KERNEL_HALVES_AMPLIFIED
from treewy.testing import SolveInputs


def equal_keys(inputs: SolveInputs, distance: float, beta: float) -> SolveInputs:
    """Keys that differ from the first by `distance`, write strengths of `beta`, and next to no decay."""
    return inputs._replace(
        key=inputs.key[:, :1] + distance * inputs.key,
        beta=torch.full_like(inputs.beta, beta),
        log_decay=torch.full_like(inputs.log_decay, -1e-4),
    )


in_16_bits = pytest.mark.parametrize(
    ("distance", "beta", "allowed"),
    [(0.0, 1.0, KERNEL_HALVES), (0.1, 2.0, KERNEL_HALVES_AMPLIFIED)],
    ids=["equal", "near-identical"],
)
"""What such keys may cost pseudo-values where kernels compute with halves."""
