"""Check the arguments of a public function once, from shapes and dtypes alone: no value is read from the device."""

import torch
from torch import Tensor


def check_rank(argument: str, tensor: Tensor, layout: str) -> None:
    """Raise unless `tensor` has as many dimensions as `layout` ("B, N, HV, V") names."""
    if tensor.ndim != len(layout.split(",")):
        raise ValueError(f"{argument} has shape {tuple(tensor.shape)}, expected [{layout}]")


def check_shape(argument: str, tensor: Tensor, layout: str, *expected: int) -> None:
    """Raise unless `tensor` has the shape `expected`, whose dimensions `layout` names."""
    check_rank(argument, tensor, layout)
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{argument} has shape {tuple(tensor.shape)}, expected [{layout}] = {expected}")


def check_nodes(argument: str, num_nodes: int) -> None:
    """Raise unless there is at least one node."""
    if num_nodes < 1:
        raise ValueError(f"{argument} has {num_nodes} nodes, expected at least 1 (pad with parent -2)")


def check_group(argument: str, heads: int, group_argument: str, group_heads: int) -> None:
    """Raise unless the heads of one tensor divide evenly over the heads of another."""
    if group_heads < 1 or heads % group_heads != 0:
        raise ValueError(f"{argument} has {heads} heads, expected a multiple of the {group_heads} of {group_argument}")


def check_index(argument: str, tensor: Tensor) -> None:
    """Raise unless `tensor` holds indices."""
    if tensor.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{argument} has dtype {tensor.dtype}, expected torch.int64 or torch.int32")


def check_mask(argument: str, tensor: Tensor) -> None:
    """Raise unless `tensor` is a mask."""
    if tensor.dtype != torch.bool:
        raise ValueError(f"{argument} has dtype {tensor.dtype}, expected torch.bool")


def check_log_decay(argument: str, tensor: Tensor, layout: str, *expected: int) -> None:
    """Raise unless `tensor` has one log decay a node and value head."""
    if tensor.ndim == len(expected) + 1:
        raise ValueError(
            f"{argument} has shape {tuple(tensor.shape)}, a decay for each key channel, which is not supported; "
            f"expected [{layout}] = {expected}"
        )
    check_shape(argument, tensor, layout, *expected)
