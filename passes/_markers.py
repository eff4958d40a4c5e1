"""Operators that stand in a graph where a layer called a function that sees tokens, until a pass replaces them.

A delta rule traced through would be hundreds of nodes that differ from one version of PyTorch to the next. As one
operator it can be found. A marker that no pass replaced is a mistake of ours, and raises when it runs.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor


@torch.library.custom_op("treewy::delta_rule_marker", mutates_args=())
def delta_rule_marker(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    parents: Tensor,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:
    """Stand for a delta rule over nodes: its output and the state that the layer writes back."""
    _not_replaced("delta rule")


@delta_rule_marker.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, *rest: Any) -> Any:
    return torch.empty_like(value), torch.empty_like(state)


@torch.library.custom_op("treewy::convolution_marker", mutates_args=())
def convolution_marker(
    window_and_columns: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, parents: Tensor
) -> Tensor:
    """Stand for a causal convolution over nodes, channels first, with the window in front."""
    _not_replaced("convolution")


@convolution_marker.register_fake
def _(window_and_columns: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(window_and_columns)


@torch.library.custom_op("treewy::attention_marker", mutates_args=())
def attention_marker(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    prefix_start: Tensor,
    prefix_length: Tensor,
    parents: Tensor,
    scale: float,
    window: int,
    more: str,
) -> Tensor:
    """Stand for the attention of nodes [B, H, N, D] to a cached prefix and to each other; returns [B, N, H, D].

    ``window`` is how many tokens of its own text a node sees, 0 for all; ``more`` says what else the layer asks for.
    """
    _not_replaced("attention")


@attention_marker.register_fake
def _(query: Tensor, *rest: Any) -> Tensor:
    batch, heads, num_nodes, width = query.shape
    return query.new_empty(batch, num_nodes, heads, width)


def _not_replaced(what: str) -> NoReturn:
    raise RuntimeError(f"the {what} of a tree forward ran as it was traced: no pass of treewy has replaced it")
