"""Calls of `tree_attention` for the tests of its kernels. All that they may not read holds NaN."""

import torch

from treewy.ops import PADDING
from treewy.testing import AttentionInputs


def attention_call(
    parents: tuple[tuple[int, ...], ...],
    lengths: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
    key_heads: int = 2,
    ratio: int = 3,
    seed: int = 0,
    window: int = 0,
) -> AttentionInputs:
    """Trees behind prefixes of the given lengths, which begin 5 columns later in each row than in the one before it.

    Of a prefix a node at depth 0 sees one column less than the window has, and no node more.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, num_nodes = len(parents), len(parents[0])
    tree, length = torch.tensor(parents), torch.tensor(lengths)
    start = 5 * torch.arange(batch)
    column = torch.arange(int((start + length).max()) + 7)
    seen = length.clamp(max=window - 1) if window else length
    outside = (column < (start + length - seen)[:, None]) | (column >= (start + length)[:, None])
    absent = (tree == PADDING)[:, :, None, None]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def nodes(heads: int) -> torch.Tensor:
        return normal(batch, num_nodes, heads, head_dim).masked_fill(absent, torch.nan)

    def cache() -> torch.Tensor:
        return normal(batch, key_heads, len(column), head_dim).masked_fill(outside[:, None, :, None], torch.nan)

    return AttentionInputs(
        query=nodes(key_heads * ratio),
        key=nodes(key_heads),
        value=nodes(key_heads),
        key_cache=cache(),
        value_cache=cache(),
        prefix_start=start,
        prefix_length=length,
        parents=tree,
        scale=head_dim**-0.5,
        window=window,
    )
