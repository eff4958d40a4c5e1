"""Attend from each node of a tree to the cached prefix and to its own path.

    o_i = sum_{c in prefix} p_i(c) V_c + sum_{j in anc(i) + i} p_i(j) v_j
    p_i = softmax(scale q_i . [keys of the prefix, keys of anc(i) + i])

One softmax runs over both parts, so that the keys of the tree need not be written to the cache before some of them are
accepted. The prefix of row b is the columns `prefix_start[b] <= c < prefix_start[b] + prefix_length[b]`: rows of one
batch may have different lengths and different left padding, and their bounds stay on the device.

With a window of w tokens a node sees the last w of its own text, which is the prefix and its path: siblings and cousins
lie between the columns of a path but are not in its text. So node i at depth d_i sees of the prefix the columns
c > prefix_start[b] + prefix_length[b] + d_i - w, and the ancestors j with d_j > d_i - w.

Query head h uses key head h // (HQ / HKV); the queries of a group are rows of one product, so keys are never repeated.

The reference masks cache columns outside the prefix by score: they weigh exactly 0, but their values are still
multiplied by it, so that they may hold any finite numbers, and no NaN. On CUDA two kernels load the prefix alone: the
first gives each of many programs a share of it, or the tree, and finds a softmax over that part, the second combines
the parts (`_attention_kernel.py`). Their time follows from the length of the prefix, or from the window if that is
less, not from the room in the cache.
"""

import importlib.util
import math

import torch
from torch import Tensor

from treewy.ops._launch import attention_options
from treewy.ops._registration import tree_op
from treewy.ops._tree import PADDING, ancestor_mask
from treewy.ops._validation import check_group, check_index, check_nodes, check_rank, check_shape

if importlib.util.find_spec("triton") is not None:
    import triton
    from torch.library import wrap_triton

    from treewy.ops._attention_kernel import tree_attention_merge_kernel, tree_attention_parts_kernel

_WIDEST_WINDOW = 2**31 - 1  # kernels count columns in 32 bits


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
    window: int,
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

    column = torch.arange(cache_length, device=query.device) - prefix_start[:, None]  # [B, L], in the prefix
    of_prefix = ((column >= 0) & (column < prefix_length[:, None]))[:, None].expand(-1, num_nodes, -1)
    of_tree = ancestor_mask(parents)
    if window > 0:
        depth = of_tree.sum(-1) - 1
        behind = (depth - window)[:, :, None]  # [B, N, 1], in nodes behind the prefix
        of_prefix = of_prefix & (column[:, None] > prefix_length[:, None, None] + behind)
        of_tree = of_tree & (depth[:, None] > behind)
    visible = torch.cat([of_prefix, of_tree], dim=2)[:, None, None]
    scores = scores.reshape(batch, key_heads, ratio, num_nodes, cache_length + num_nodes).masked_fill(
        ~visible, float("-inf")
    )
    weights = scores.softmax(-1).flatten(2, 3)  # [B, HKV, ratio N, L + N]

    outputs = weights[..., :cache_length] @ value_cache.to(dtype) + weights[..., cache_length:] @ values
    outputs = outputs.reshape(batch, query_heads, num_nodes, head_dim).transpose(1, 2)
    # A padding node without a prefix sees nothing at all, and its softmax is NaN.
    return outputs.masked_fill(padding[:, :, None, None], 0.0).to(query.dtype).contiguous()


def _kernels_apply(*tensors: Tensor) -> bool:
    """Tell whether the kernels run: on CUDA, where all tensors have one dtype and this is not float64."""
    dtype = tensors[0].dtype
    return tensors[0].device.type == "cuda" and dtype != torch.float64 and all(x.dtype == dtype for x in tensors)


def _dense_vectors(x: Tensor) -> Tensor:
    """Return x itself where the numbers of each vector lie side by side, whatever the strides between vectors."""
    return x if x.stride(-1) == 1 else x.contiguous()


@tree_op("tree_attention")
def _tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    prefix_start: Tensor,
    prefix_length: Tensor,
    parents: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    if not _kernels_apply(query, key, value, key_cache, value_cache):
        return _reference(
            query, key, value, key_cache, value_cache, prefix_start, prefix_length, parents, scale, window
        )
    batch, num_nodes, query_heads, head_dim = query.shape
    grid, options = attention_options(query, key.shape[2])
    parts = options["PARTS"]
    query, key, value = _dense_vectors(query), _dense_vectors(key), _dense_vectors(value)
    key_cache, value_cache = _dense_vectors(key_cache), _dense_vectors(value_cache)
    greatest = query.new_empty(batch, num_nodes, query_heads, parts, dtype=torch.float32)
    total = torch.empty_like(greatest)
    values = greatest.new_empty(batch, num_nodes, query_heads, parts, head_dim)
    wrap_triton(tree_attention_parts_kernel)[grid](
        query,
        key,
        value,
        key_cache,
        value_cache,
        prefix_start.contiguous(),
        prefix_length.contiguous(),
        parents,
        greatest,
        total,
        values,
        num_nodes,
        scale * math.log2(math.e),
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *parents.stride(),
        WINDOW=min(window, _WIDEST_WINDOW),
        **options,
    )
    output = query.new_empty(query.shape)
    width = min(options["DP"], 4096 // parts)  # dimensions a program, whose tile has a row for each part
    wrap_triton(tree_attention_merge_kernel)[(batch * num_nodes * query_heads, triton.cdiv(head_dim, width))](
        greatest,
        total,
        values,
        parents,
        output,
        num_nodes,
        *parents.stride(),
        QUERY_HEADS=query_heads,
        PARTS=parts,
        D=head_dim,
        WIDTH=width,
        num_warps=4,
    )
    return output


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
    window: int = 0,
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
    window: int = 0,
) -> Tensor:
    """Attend from every node of a tree to the cached prefix, its ancestors and itself, leaving the cache as it is.

        o_i = sum_c softmax_c(scale q_i . k_c) v_c          over c in prefix, anc(i) and i

    With a window these are the last tokens of the text that ends with node i, at most so many, itself included. A
    column of the prefix is a token, a node counts by its depth.

    The softmax is in float32, in float64 for queries of float64. Query head h uses key head h // (HQ / HKV).

    On CUDA, kernels run where queries, keys, values and caches are all bfloat16, float16 or float32; float64 and
    mixtures take the reference. The kernels take up to 128 nodes and head dimensions up to 256, round the weights to
    that dtype before they meet the values, and read of the caches the prefix alone, of this what a window shows.

    Args:
        query: `[B, N, HQ, D]`, floating.
        key: `[B, N, HKV, D]`, floating.
        value: `[B, N, HKV, D]`, floating.
        key_cache: `[B, HKV, L, D]`, floating; finite where nothing is seen too, where the reference runs. Any strides
            will do, of all tensors; without a copy on CUDA those in which the last dimension is dense.
        value_cache: `[B, HKV, L, D]`, likewise.
        prefix_start: `[B]`, integer: the first column of the prefix, in columns.
        prefix_length: `[B]`, integer: its length, in columns.
        parents: `[B, N]`, integer; -1 for a child of the prefix, `PADDING` for no node.
        scale: Factor of the scores, usually D ** -0.5.
        window: How many tokens a node sees; 0 for all.

    Returns:
        `[B, N, HQ, D]` in the dtype of `query`; 0 for padding.

    Raises:
        ValueError: A shape or dtype does not fit, or exceeds what the kernels take, or a window is negative.

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
    if window < 0:
        raise ValueError(f"window is {window}, expected a number of tokens, or 0 for none")
    result: Tensor = _tree_attention(
        query, key, value, key_cache, value_cache, prefix_start, prefix_length, parents, scale, window
    )
    return result
