"""Hypothesis strategies for the operators: they draw the structure and a seed; tensors come from the seed."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

PADDING = -2


class SolveInputs(NamedTuple):
    """The arguments of `tree_wy_solve`, in order."""

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
    """The arguments of `tree_conv`, in order."""

    x: Tensor
    window: Tensor
    weight: Tensor
    bias: Tensor
    parents: Tensor
    activation: str


class AttentionInputs(NamedTuple):
    """The arguments of `tree_attention`, in order."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    prefix_start: Tensor
    prefix_length: Tensor
    parents: Tensor
    scale: float


@dataclass(frozen=True)
class Structure:
    """The sizes, trees and prefixes of a call, and the seed of its numbers."""

    parents: tuple[tuple[int, ...], ...]
    key_heads: int = 2
    value_heads: int = 6
    key_dim: int = 7
    value_dim: int = 9
    prefix_parents: tuple[int, ...] = ()
    attach: tuple[tuple[int, ...], ...] = ()  # the prefix row above each child of the committed state
    seed: int = 0

    @property
    def tree(self) -> Tensor:
        return torch.tensor(self.parents)

    def prefix_mask(self) -> Tensor:
        """What the ancestors of each node are among the prefix rows, by walking up."""
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

    def attention_inputs(self, dtype: torch.dtype = torch.float64, *, cache_length: int = 11) -> AttentionInputs:
        """Rows have prefixes of various bounds; the columns outside hold a large finite number."""
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
        )


class _Random:
    """Numbers of one seed; the same in every dtype, up to rounding."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)


def chain(num_nodes: int) -> tuple[int, ...]:
    return tuple(range(-1, num_nodes - 1))


def widths(*children: int) -> tuple[int, ...]:
    """A root, then breadth first `children[d]` nodes below each node of depth d."""
    parents, level = [-1], [0]
    for width in children:
        first = len(parents)
        parents += [node for node in level for _ in range(width)]
        level = list(range(first, len(parents)))
    return tuple(parents)


@st.composite
def trees(draw: st.DrawFn, num_nodes: int, *, padding: bool = True) -> tuple[int, ...]:
    """Parents of one row: a chain, or any forest; with padding at the end and holes, or none."""
    is_chain = draw(st.booleans())
    num_real = draw(st.integers(0, num_nodes)) if padding and draw(st.booleans()) else num_nodes
    holes = draw(st.sets(st.integers(0, num_nodes - 1), max_size=2)) if padding else set()
    parents: list[int] = []
    candidates = [-1]
    for node in range(num_nodes):
        if node >= num_real or node in holes:
            parents.append(PADDING)
            continue
        parents.append(candidates[-1] if is_chain else draw(st.sampled_from(candidates)))
        candidates.append(node)
    return tuple(parents)


@st.composite
def structures(
    draw: st.DrawFn, *, max_nodes: int = 14, max_prefix: int = 5, padding: bool = True, max_batch: int = 3
) -> Structure:
    """Sizes that differ from one another wherever they can, so that no swapped dimension goes unseen."""
    batch = draw(st.integers(1, max_batch))
    key_heads = draw(st.sampled_from([n for n in (1, 2, 3) if n != batch]))
    value_heads = key_heads * draw(st.integers(1, 4))
    used = {batch, key_heads, value_heads}
    num_nodes = draw(st.sampled_from([n for n in range(1, max_nodes + 1) if n not in used]))
    key_dim = draw(st.sampled_from([n for n in range(4, 18) if n not in used | {num_nodes}]))
    value_dim = draw(st.sampled_from([n for n in range(4, 18) if n not in used | {num_nodes, key_dim}]))
    known = draw(st.integers(0, max_prefix))
    return Structure(
        parents=tuple(draw(trees(num_nodes, padding=padding)) for _ in range(batch)),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        prefix_parents=tuple(draw(st.integers(-1, row - 1)) for row in range(known)),
        attach=tuple(tuple(draw(st.integers(-1, known - 1)) for _ in range(num_nodes)) for _ in range(batch)),
        seed=draw(st.integers(0, 2**31 - 1)),
    )
