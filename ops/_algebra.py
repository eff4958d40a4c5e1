"""The two pieces of algebra that the solve and the commit share."""

import torch
from torch import Tensor


def decays_behind(masked_log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the log decays of a path behind each of its nodes, and all of them.

        behind[..., j] = sum_{k > j} x[..., k]          total[...] = sum_k x[..., k]

    The textbook form is a difference of cumulative sums, G_i - G_j. In float32 it loses digits: once a gate of -30 is
    in both sums, a gate of -1e-6 between them is gone. Summing the piece itself adds numbers of one sign.

    Args:
        masked_log_decay: `[..., M]`, log decays <= 0 of nodes in path order, 0 for those off the path.

    Returns:
        `behind [..., M]` and `total [...]`.
    """
    suffix = masked_log_decay.flip(-1).cumsum(-1).flip(-1)
    return torch.nn.functional.pad(suffix[..., 1:], (0, 1)), suffix[..., 0]


def grouped_matmul(key_side: Tensor, value_side: Tensor) -> Tensor:
    """Multiply per key head with per value head matrices: `[B, HK, X, Y]` by `[B, HV, Y, Z]` gives `[B, HV, X, Z]`.

    Value head h belongs to key head h // (HV / HK). Taking the heads of a group one by one keeps each operand a strided
    view; a broadcast product would copy the keys once a value head, and an einsum the states.
    """
    batch, key_heads, rows, _ = key_side.shape
    value_heads, columns = value_side.shape[1], value_side.shape[3]
    ratio = value_heads // key_heads
    products = [key_side @ value_side[:, member::ratio] for member in range(ratio)]
    return torch.stack(products, dim=2).reshape(batch, value_heads, rows, columns)
