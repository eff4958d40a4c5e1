"""Attend from each node of a tree to the cached prefix and to its own path.

    o_i = sum_{c in prefix} p_i(c) V_c + sum_{j in anc(i) + i} p_i(j) v_j
    p_i = softmax(scale q_i . [keys of the prefix, keys of anc(i) + i])

One softmax runs over both parts, so that the keys of the tree need not be written to the cache before some of them are
accepted. The prefix of row b is the columns `prefix_start[b] <= c < prefix_start[b] + prefix_length[b]`: rows of one
batch may have different lengths and different left padding, and their bounds stay on the device.

Query head h uses key head h // (HQ / HKV); the queries of a group are rows of one product, so keys are never repeated.
Cache columns outside the prefix are masked by score and weigh exactly 0, but their values are still multiplied by it:
they may hold any finite numbers, and no NaN.
"""

import torch
from torch import Tensor

from treewy.ops._registration import tree_op
from treewy.ops._tree import PADDING, ancestor_mask
from treewy.ops._validation import check_group, check_index, check_nodes, check_rank, check_shape


def _reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    prefix_start: Tensor,
    prefix_length: Tensor,
    parents: Tensor,
    scale: float,
) -> Tensor:
    dtype = torch.promote_types(torch.float32, query.dtype)
    batch, num_nodes, query_heads, head_dim = query.shape
    key_heads, cache_length = key_cache.shape[1:3]
    ratio = query_heads // key_heads
    padding = parents == PADDING

    def clean(x: Tensor) -> Tensor:
        return x.to(dtype).masked_fill(padding[:, :, None, None], 0.0).transpose(1, 2)  # [B, H, N, D]

    queries, keys, values = (
        clean(query).reshape(batch, key_heads, ratio * num_nodes, head_dim),
        clean(key),
        clean(value),
    )
    scores = torch.cat([queries @ key_cache.to(dtype).transpose(2, 3), queries @ keys.transpose(2, 3)], dim=3) * scale

    column = torch.arange(cache_length, device=query.device)
    in_prefix = (column >= prefix_start[:, None]) & (column < (prefix_start + prefix_length)[:, None])  # [B, L]
    visible = torch.cat([in_prefix[:, None].expand(-1, num_nodes, -1), ancestor_mask(parents)], dim=2)[:, None, None]
    scores = scores.reshape(batch, key_heads, ratio, num_nodes, cache_length + num_nodes).masked_fill(
        ~visible, float("-inf")
    )
    weights = scores.softmax(-1).flatten(2, 3)  # [B, HKV, ratio N, L + N]

    outputs = weights[..., :cache_length] @ value_cache.to(dtype) + weights[..., cache_length:] @ values
    outputs = outputs.reshape(batch, query_heads, num_nodes, head_dim).transpose(1, 2)
    # A padding node without a prefix sees nothing at all, and its softmax is NaN.
    return outputs.masked_fill(padding[:, :, None, None], 0.0).to(query.dtype).contiguous()


_tree_attention = tree_op("tree_attention")(_reference)


@_tree_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    prefix_start: Tensor,
    prefix_length: Tensor,
    parents: Tensor,
    scale: float,
) -> Tensor:
    return query.new_empty(query.shape)


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    prefix_start: Tensor,
    prefix_length: Tensor,
    parents: Tensor,
    scale: float,
) -> Tensor:
    """Attend from every node of a tree to the cached prefix, its ancestors and itself, leaving the cache as it is.

        o_i = sum_c softmax_c(scale q_i . k_c) v_c          over c in prefix, anc(i) and i

    The softmax is in float32, in float64 for queries of float64. Query head h uses key head h // (HQ / HKV).

    Args:
        query: `[B, N, HQ, D]`, floating.
        key: `[B, N, HKV, D]`, floating.
        value: `[B, N, HKV, D]`, floating.
        key_cache: `[B, HKV, L, D]`, floating; finite outside the prefix too.
        value_cache: `[B, HKV, L, D]`, floating; finite outside the prefix too.
        prefix_start: `[B]`, integer: the first column of the prefix, in columns.
        prefix_length: `[B]`, integer: its length, in columns.
        parents: `[B, N]`, integer; -1 for a child of the prefix, `PADDING` for no node.
        scale: Factor of the scores, usually D ** -0.5.

    Returns:
        `[B, N, HQ, D]` in the dtype of `query`; 0 for padding.

    Raises:
        ValueError: A shape or dtype does not fit.

    Example:
        Without a prefix a root sees only itself, and returns its own value.

        >>> query, key, value = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8)
        >>> cache, none, parents = torch.zeros(1, 2, 5, 8), torch.zeros(1, dtype=torch.int64), torch.tensor([[-1, -1]])
        >>> output = tree_attention(query, key, value, cache, cache, none, none, parents, 8**-0.5)
        >>> torch.allclose(output, value.repeat_interleave(2, dim=2))
        True

    Source:
        Miao et al., "SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative Inference and
        Verification", 2024, for the tree mask.
    """
    check_rank("query", query, "B, N, HQ, D")
    check_rank("key", key, "B, N, HKV, D")
    check_rank("key_cache", key_cache, "B, HKV, L, D")
    batch, num_nodes, query_heads, head_dim = query.shape
    key_heads, cache_length = key.shape[2], key_cache.shape[2]
    check_nodes("query", num_nodes)
    check_group("query", query_heads, "key", key_heads)
    check_shape("key", key, "B, N, HKV, D", batch, num_nodes, key_heads, head_dim)
    check_shape("value", value, "B, N, HKV, D", batch, num_nodes, key_heads, head_dim)
    check_shape("key_cache", key_cache, "B, HKV, L, D", batch, key_heads, cache_length, head_dim)
    check_shape("value_cache", value_cache, "B, HKV, L, D", batch, key_heads, cache_length, head_dim)
    check_shape("prefix_start", prefix_start, "B", batch)
    check_index("prefix_start", prefix_start)
    check_shape("prefix_length", prefix_length, "B", batch)
    check_index("prefix_length", prefix_length)
    check_shape("parents", parents, "B, N", batch, num_nodes)
    check_index("parents", parents)
    result: Tensor = _tree_attention(
        query, key, value, key_cache, value_cache, prefix_start, prefix_length, parents, scale
    )
    return result
