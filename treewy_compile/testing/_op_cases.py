"""Inputs of the operators: a structure and a seed, from which the numbers come."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class SolveInputs(NamedTuple):
    """The arguments of :func:`treewy.ops.tree_wy_solve`, in order."""

    value: Tensor
    query: Tensor
    key: Tensor
    log_decay: Tensor
    beta: Tensor
    committed_state: Tensor
    parents: Tensor
    prefix_pseudo_value: Tensor
    prefix_key: Tensor
    prefix_log_decay: Tensor
    prefix_mask: Tensor
    scale: float
    qk_l2norm: bool


class ConvInputs(NamedTuple):
    """The arguments of :func:`treewy.ops.tree_conv`, in order."""

    x: Tensor
    window: Tensor
    weight: Tensor
    bias: Tensor
    parents: Tensor
    activation: str


class AttentionInputs(NamedTuple):
    """The arguments of :func:`treewy.ops.tree_attention`, in order."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    prefix_start: Tensor
    prefix_length: Tensor
    parents: Tensor
    scale: float
    window: int = 0


@dataclass(frozen=True)
class OpCase:
    """Hold the sizes, trees and prefixes of an operator's call, and the seed of its numbers.

    All defaults are different numbers, so that no swapped dimension goes unseen. The tensors are on the CPU.

    Args:
        parents: Parent of each node, a tuple a row; -1 for a child of the committed state, ``PADDING`` for no node.
        key_heads: Key heads.
        value_heads: Value heads, a multiple of the key heads.
        key_dim: Width of a key.
        value_dim: Width of a value.
        prefix_parents: Parent of each known node before the tree, which the rows share; -1 for the committed state.
        attach: The prefix node above each child of the committed state, a tuple a row; -1 for none.
        seed: Of all numbers; the same in every dtype, up to rounding.

    Example:
        >>> from treewy.ops import tree_wy_solve
        >>> output = tree_wy_solve(*OpCase(parents=((-1, 0, 0),)).solve_inputs())[0]
        >>> output.shape
        torch.Size([1, 3, 6, 9])

    Source:
        The arguments of :mod:`treewy.ops`.
    """

    parents: tuple[tuple[int, ...], ...]
    key_heads: int = 2
    value_heads: int = 6
    key_dim: int = 7
    value_dim: int = 9
    prefix_parents: tuple[int, ...] = ()
    attach: tuple[tuple[int, ...], ...] = ()
    seed: int = 0

    @property
    def tree(self) -> Tensor:
        """Parents [B, N]."""
        return torch.tensor(self.parents)

    def prefix_mask(self) -> Tensor:
        """Mark the ancestors of each node among the prefix rows [B, N, P], by walking up."""
        mask = torch.zeros(len(self.parents), len(self.parents[0]), len(self.prefix_parents), dtype=torch.bool)
        for row, row_parents in enumerate(self.parents):
            for node, parent in enumerate(row_parents):
                if parent >= 0:
                    mask[row, node] = mask[row, parent]
                elif parent == -1 and self.attach:
                    known = self.attach[row][node]
                    while known >= 0:
                        mask[row, node, known] = True
                        known = self.prefix_parents[known]
        return mask

    def solve_inputs(self, dtype: torch.dtype = torch.float64, *, max_beta: float = 1.0) -> SolveInputs:
        """Draw the arguments of :func:`treewy.ops.tree_wy_solve`, with write strengths up to ``max_beta``."""
        random = _Random(self.seed, dtype)
        batch, num_nodes, known = len(self.parents), len(self.parents[0]), len(self.prefix_parents)
        prefix_key = random.normal(batch, known, self.key_heads, self.key_dim)
        return SolveInputs(
            value=random.normal(batch, num_nodes, self.value_heads, self.value_dim),
            query=random.normal(batch, num_nodes, self.key_heads, self.key_dim),
            key=random.normal(batch, num_nodes, self.key_heads, self.key_dim),
            log_decay=-random.uniform(batch, num_nodes, self.value_heads),
            beta=max_beta * random.uniform(batch, num_nodes, self.value_heads),
            committed_state=random.normal(batch, self.value_heads, self.key_dim, self.value_dim),
            parents=self.tree,
            prefix_pseudo_value=random.normal(batch, known, self.value_heads, self.value_dim),
            prefix_key=torch.nn.functional.normalize(prefix_key, dim=-1),
            prefix_log_decay=-random.uniform(batch, known, self.value_heads),
            prefix_mask=self.prefix_mask(),
            scale=self.key_dim**-0.5,
            qk_l2norm=True,
        )

    def conv_inputs(
        self,
        dtype: torch.dtype = torch.float64,
        *,
        taps: int = 4,
        window: int = 4,
        bias: bool = True,
        channels: int = 5,
    ) -> ConvInputs:
        """Draw the arguments of :func:`treewy.ops.tree_conv`."""
        random = _Random(self.seed, dtype)
        batch, num_nodes = len(self.parents), len(self.parents[0])
        return ConvInputs(
            x=random.normal(batch, num_nodes, channels),
            window=random.normal(batch, channels, window),
            weight=random.normal(channels, taps),
            bias=random.normal(channels) if bias else random.normal(0),
            parents=self.tree,
            activation="silu",
        )

    def attention_inputs(
        self, dtype: torch.dtype = torch.float64, *, cache_length: int = 11, window: int = 0
    ) -> AttentionInputs:
        """Draw the arguments of :func:`treewy.ops.tree_attention`, with a window as given.

        Rows have prefixes of various bounds; the columns outside hold a large finite number.
        """
        random = _Random(self.seed, dtype)
        batch, num_nodes = len(self.parents), len(self.parents[0])
        cache = (batch, self.key_heads, cache_length, self.value_dim)
        start = torch.arange(batch) % (cache_length + 1)
        length = (7 * torch.arange(batch) + self.seed) % (cache_length + 1 - start)
        column = torch.arange(cache_length)
        outside = ((column < start[:, None]) | (column >= (start + length)[:, None]))[:, None, :, None]
        return AttentionInputs(
            query=random.normal(batch, num_nodes, self.value_heads, self.value_dim),
            key=random.normal(batch, num_nodes, self.key_heads, self.value_dim),
            value=random.normal(batch, num_nodes, self.key_heads, self.value_dim),
            key_cache=random.normal(*cache).masked_fill(outside, 1e4),
            value_cache=random.normal(*cache).masked_fill(outside, 1e4),
            prefix_start=start,
            prefix_length=length,
            parents=self.tree,
            scale=self.value_dim**-0.5,
            window=window,
        )


class _Random:
    """Numbers of one seed; the same in every dtype, up to rounding."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)
