"""The calls of operators whose kernels are compiled without a GPU. A line for each way in which a kernel is launched.

Operators choose tile sizes and warps by the number of nodes and the head dimensions, so there is a case for each such
bucket and dtype, and none for sizes that change no more than loop bounds: compiling one takes up to seconds.
Arguments have a shape and no data.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from treewy import ops

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


Case = tuple[Callable[..., Any], tuple[Any, ...]]


def _tensor(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _conv(num_nodes: int, dtype: torch.dtype, window: int = 4) -> Case:
    channels, taps = 8192, 4
    x, state = _tensor(2, num_nodes, channels, dtype=dtype), _tensor(2, channels, window, dtype=dtype)
    weight, bias = _tensor(channels, taps, dtype=dtype), _tensor(0, dtype=dtype)
    return (ops.tree_conv, (x, state, weight, bias, _tensor(2, num_nodes), "silu"))


# The first case of a function is also compiled by Inductor.
CASES = {
    "conv, 4 nodes": _conv(4, BFLOAT16),
    "conv, 8 nodes": _conv(8, BFLOAT16),
    "conv, 64 nodes": _conv(64, BFLOAT16),
    "conv, 64 nodes, float32": _conv(64, FLOAT32),
}
