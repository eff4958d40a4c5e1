"""Verify a tree of draft nodes against one committed state.

The recurrence. A value head keeps a state S in R^{K x V}. A node with parent p, log decay g <= 0, write strength b, key
k, value v and query q reads and writes

    S_i = exp(g_i) S_p + k_i u_i^T          u_i = b_i (v_i - exp(g_i) S_p^T k_i)          o_i = scale S_i^T q_i

where the parent of a root is the committed state S0. Walking a tree this way needs a state a node.

The closed form. Unroll the first equation along the path to i. With G_i the sum of the log decays from the root to i,
and anc(i) the ancestors of i without i,

    S_i = exp(G_i) S0 + sum_{j in anc(i) + i} exp(G_i - G_j) k_j u_j^T                                            (1)

Put (1), for the parent of i, into the second equation: exp(g_i) exp(G_p) = exp(G_i), and only inner products of keys
remain of the states,

    u_i + b_i sum_{j in anc(i)} exp(G_i - G_j) (k_i . k_j) u_j = b_i (v_i - exp(G_i) S0^T k_i)                    (2)
    o_i = scale [exp(G_i) S0^T q_i + sum_{j in anc(i) + i} exp(G_i - G_j) (q_i . k_j) u_j]                        (3)

Parents precede children, so (2) is a unit lower triangular system of N rows a head: (I + L) u = r. Its solution, the
pseudo-values u, is V numbers a node and all that has to be kept of it: by (1), u gives the state after any node.

The prefix. A token that was accepted but is not yet in S0 is a known ancestor. P such rows extend every sum to the
left of the nodes, with their own pseudo-values, keys and log decays; `prefix_mask [B, N, P]` says which of them are
ancestors of which node. A dense mask defers the commit by some rounds; a sparse one lets a draft model grow a tree
level by level.

In code A = [prefix_mask | ancestor_mask] has the shape `[B, N, P + N]`. The ancestors of one node form a chain sorted
by index, so G_i - G_j = sum_{k > j} A[i, k] g[k], summed as such (see `decays_behind`). Exponents are masked before the
exponential and never positive, so nothing overflows; inputs of padding are replaced by 0 before they are used, since a
product with a mask would let NaN through.

On CUDA the kernels of `_solve_kernel.py` do this in one launch, or those of `_tables_kernel.py` and `_pass_kernel.py`
in two; `_launch.py` chooses between them.
"""

import importlib.util

import torch
from torch import Tensor
from torch.library import wrap_triton

from treewy.ops._algebra import decays_behind, grouped_matmul
from treewy.ops._launch import (
    bucket,
    check_kernel_limits,
    fits_one_launch,
    head_options,
    pass_options,
    prefix_chunks,
    programs,
    row_strided,
    rows_contiguous,
    solve_kernels_apply,
    solve_options,
    tables_options,
    workspace,
)
from treewy.ops._registration import tree_op
from treewy.ops._tree import PADDING, ancestor_mask
from treewy.ops._validation import (
    check_group,
    check_index,
    check_log_decay,
    check_mask,
    check_nodes,
    check_rank,
    check_shape,
)

if importlib.util.find_spec("triton") is not None:
    from treewy.ops._pass_kernel import tree_pass_kernel
    from treewy.ops._solve_kernel import tree_solve_kernel
    from treewy.ops._tables_kernel import tree_tables_kernel


def _l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _reference(
    value: Tensor,
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    committed_state: Tensor,
    parents: Tensor,
    prefix_pseudo_value: Tensor,
    prefix_key: Tensor,
    prefix_log_decay: Tensor,
    prefix_mask: Tensor,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(torch.float32, value.dtype)
    batch, num_nodes, value_heads, _ = value.shape
    key_heads, prefix_length = key.shape[2], prefix_key.shape[1]
    ratio, num_known = value_heads // key_heads, prefix_length + num_nodes

    padding = parents == PADDING
    on_path = torch.cat([prefix_mask & ~padding[:, :, None], ancestor_mask(parents)], dim=2)  # [B, N, P + N]
    unused = ~on_path[:, :, :prefix_length].any(1)  # [B, P]

    def clean(x: Tensor, absent: Tensor) -> Tensor:
        return x.to(dtype).masked_fill(absent.reshape(*absent.shape, *[1] * (x.ndim - 2)), 0.0)

    key_as_used, query_as_used = clean(key, padding), clean(query, padding)
    if qk_l2norm:
        key_as_used, query_as_used = _l2norm(key_as_used), _l2norm(query_as_used)
    queries = (query_as_used * scale).transpose(1, 2)  # [B, HK, N, K]
    keys = key_as_used.transpose(1, 2)
    known_keys = torch.cat([clean(prefix_key, unused), key_as_used], dim=1).transpose(1, 2)  # [B, HK, P + N, K]
    known_decay = torch.cat([clean(prefix_log_decay, unused), clean(log_decay, padding)], dim=1)
    values = clean(value, padding).transpose(1, 2)  # [B, HV, N, V]
    strength = clean(beta, padding).transpose(1, 2).unsqueeze(-1)
    prefix_values = clean(prefix_pseudo_value, unused).transpose(1, 2)

    path_decay = known_decay.transpose(1, 2).unsqueeze(2).masked_fill(~on_path.unsqueeze(1), 0.0)  # [B, HV, N, P + N]
    decay_behind, total = decays_behind(path_decay)
    decay = decay_behind.masked_fill(~on_path.unsqueeze(1), float("-inf")).exp()
    total_decay = total.exp().unsqueeze(-1)

    # Keys and queries meet the state together, so that it is read once.
    probes = torch.cat([keys, queries], dim=2)
    read = grouped_matmul(probes, committed_state.to(dtype))  # [B, HV, 2 N, V]
    # In float64: with near-identical keys and b = 2 the rounding of inner products grows with the depth squared, that
    # of the recurrence with the depth. On 64 such nodes float32 products cost 20 times its error, float64 ones 7 times.
    inner = (probes.double() @ known_keys.double().transpose(2, 3)).to(dtype)
    inner = inner.reshape(batch, key_heads, 1, 2, num_nodes, num_known)
    mix = (inner * decay.reshape(batch, key_heads, ratio, 1, num_nodes, num_known)).flatten(1, 2)
    key_mix, query_mix = mix.unbind(2)  # [B, HV, N, P + N] each

    known = total_decay * read[:, :, :num_nodes] + key_mix[..., :prefix_length] @ prefix_values
    pseudo_values = torch.linalg.solve_triangular(
        strength * key_mix[..., prefix_length:], strength * (values - known), upper=False, unitriangular=True
    )
    outputs = total_decay * read[:, :, num_nodes:] + query_mix @ torch.cat([prefix_values, pseudo_values], dim=2)

    # A row of padding may have a state of NaN, so that zero inputs are not enough.
    absent = padding[:, :, None, None]
    return (
        outputs.transpose(1, 2).masked_fill(absent, 0.0).to(value.dtype).contiguous(),
        pseudo_values.transpose(1, 2).masked_fill(absent, 0.0).contiguous(),
        key_as_used.contiguous(),
        total.transpose(1, 2).contiguous(),
    )


@tree_op("tree_wy_solve")
def _tree_wy_solve(
    value: Tensor,
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    committed_state: Tensor,
    parents: Tensor,
    prefix_pseudo_value: Tensor,
    prefix_key: Tensor,
    prefix_log_decay: Tensor,
    prefix_mask: Tensor,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = (value, query, key, log_decay, beta, committed_state, parents)
    prefix = (prefix_pseudo_value, prefix_key, prefix_log_decay, prefix_mask)
    if not solve_kernels_apply(value, query, key, log_decay, beta, committed_state, *prefix[:3]):
        return _reference(*inputs, *prefix, scale, qk_l2norm)
    batch, num_nodes, value_heads, value_dim = value.shape
    key_dim = key.shape[3]
    prefix_length = prefix_key.shape[1]
    check_kernel_limits("value", num_nodes, key_dim, value_dim)
    value, query, key = row_strided(value), row_strided(query), row_strided(key)
    log_decay, beta, state, parents = rows_contiguous(log_decay, beta, committed_state, parents)
    known_value, known_key, known_decay, mask = rows_contiguous(*prefix)
    output = value.new_empty(value.shape)
    pseudo_value = value.new_empty(value.shape, dtype=torch.float32)
    key_as_used = key.new_empty(key.shape, dtype=torch.float32)
    path_log_decay = log_decay.new_empty(log_decay.shape, dtype=torch.float32)
    heads = head_options(value, key, query)
    precision = {"L2NORM": qk_l2norm, "PREFIX_EXACT": prefix_key.dtype == torch.bfloat16}
    strides = (query.stride(1), key.stride(1))
    if fits_one_launch(batch, value_heads, num_nodes, prefix_length):
        grid, options = solve_options(value, key_dim)
        wrap_triton(tree_solve_kernel)[grid](
            *(value, query, key, log_decay, beta, state, parents, parents, known_value, known_key, known_decay, mask),
            # There is no ring.
            *(pseudo_value, key, pseudo_value, parents, key, pseudo_value, parents, parents, parents),
            *(output, pseudo_value, key_as_used, path_log_decay),
            *(num_nodes, prefix_length, num_nodes, num_nodes, scale, value.stride(1), *strides, 0),
            NODES=bucket(num_nodes),
            CHUNKS=prefix_chunks(prefix_length),
            RING=16,
            HAS_SLOTS=False,
            RAW_KEYS=False,
            **heads,
            **precision,
            **options,
        )
        return output, pseudo_value, key_as_used, path_log_decay
    known = prefix_chunks(prefix_length) * 16
    tables = workspace(value, key, heads, known)
    tables_grid, options = tables_options(value, key_dim, prefix_length, has_ring=False)
    wrap_triton(tree_tables_kernel)[tables_grid](
        *(query, key, log_decay, beta, parents, known_key, known_decay, mask),
        # There is no ring.
        *(state, parents, pseudo_value, parents, pseudo_value, key, log_decay, parents, parents, parents),
        *(*tables, key_as_used, path_log_decay),
        *(num_nodes, prefix_length, num_nodes, num_nodes, scale, *strides, 0),
        KNOWN=known,
        HAS_SLOTS=False,
        RAW_KEYS=False,
        **heads,
        **precision,
        **options,
    )
    num_tiles, options = pass_options(value, heads, prefix_length, has_ring=False)
    wrap_triton(tree_pass_kernel)[programs(num_tiles)](
        *(value, state, parents, known_value, *tables, output, pseudo_value),
        *(num_nodes, prefix_length, num_nodes, num_tiles, value.stride(1)),
        KNOWN=known,
        HAS_SLOTS=False,
        **heads,
        **options,
    )
    return output, pseudo_value, key_as_used, path_log_decay


@_tree_wy_solve.register_fake
def _(
    value: Tensor,
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    committed_state: Tensor,
    parents: Tensor,
    prefix_pseudo_value: Tensor,
    prefix_key: Tensor,
    prefix_log_decay: Tensor,
    prefix_mask: Tensor,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(torch.float32, value.dtype)
    return (
        value.new_empty(value.shape),
        value.new_empty(value.shape, dtype=dtype),
        key.new_empty(key.shape, dtype=dtype),
        log_decay.new_empty(log_decay.shape, dtype=dtype),
    )


def tree_wy_solve(
    value: Tensor,
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    committed_state: Tensor,
    parents: Tensor,
    prefix_pseudo_value: Tensor,
    prefix_key: Tensor,
    prefix_log_decay: Tensor,
    prefix_mask: Tensor,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the gated delta rule along every path of a tree at once, leaving the committed state as it is.

        u_i + b_i sum_{j in anc(i)} exp(G_i - G_j) (k_i . k_j) u_j = b_i (v_i - exp(G_i) S0^T k_i)
        o_i = scale [exp(G_i) S0^T q_i + sum_{j in anc(i) + i} exp(G_i - G_j) (q_i . k_j) u_j]

    Computes in the wider of float32 and the dtype of `value`. Value head h uses key head h // (HV / HK). On CUDA,
    Triton kernels take bfloat16 and float16, up to 128 nodes and head dimensions up to 256; their products keep 16
    bits. Other dtypes go the way of the CPU.

    Args:
        value: `[B, N, HV, V]`, floating.
        query: `[B, N, HK, K]`, floating.
        key: `[B, N, HK, K]`, floating.
        log_decay: `[B, N, HV]`, floating, natural logarithm, <= 0: each node's own, not the path's.
        beta: `[B, N, HV]`, floating, write strength in [0, 2].
        committed_state: `[B, HV, K, V]`, floating; read only.
        parents: `[B, N]`, integer, `parents[b, i] < i`; -1 for a child of the committed state (or of the prefix),
            `PADDING` for no node.
        prefix_pseudo_value: `[B, P, HV, V]`, floating, of known ancestors, oldest first; P may be 0.
        prefix_key: `[B, P, HK, K]`, floating, as used: already normalised.
        prefix_log_decay: `[B, P, HV]`, floating, natural logarithm, each row's own.
        prefix_mask: `[B, N, P]`, bool: prefix row p is an ancestor of node i. What a node has, its children have too. A
            prefix row that no node marks is not read.
        scale: Factor of the queries, usually K ** -0.5.
        qk_l2norm: Normalise queries and keys as x * rsqrt(sum(x^2) + 1e-6) before use.

    Returns:
        The output `[B, N, HV, V]` in the dtype of `value`, and in the dtype of the computation the pseudo-values
        `[B, N, HV, V]`, the keys as used `[B, N, HK, K]` and the log decays from the committed state to each node,
        prefix included, `[B, N, HV]`. All are 0 for padding.

    Raises:
        ValueError: A shape or dtype does not fit, or is beyond the kernels on CUDA.

    Example:
        A root and two children, each of which sees the root and not the other.

        >>> _ = torch.manual_seed(0)
        >>> value, query, key = torch.randn(1, 3, 4, 8), torch.randn(1, 3, 2, 6), torch.randn(1, 3, 2, 6)
        >>> log_decay, beta = -torch.rand(1, 3, 4), torch.rand(1, 3, 4)
        >>> state, parents = torch.randn(1, 4, 6, 8), torch.tensor([[-1, 0, 0]])
        >>> no_prefix = value[:, :0], key[:, :0], log_decay[:, :0], torch.zeros(1, 3, 0, dtype=torch.bool)
        >>> output, pseudo_value, key_as_used, path_log_decay = tree_wy_solve(
        ...     value, query, key, log_decay, beta, state, parents, *no_prefix, 6**-0.5, True
        ... )
        >>> output.shape, pseudo_value.shape, key_as_used.shape, path_log_decay.shape
        (torch.Size([1, 3, 4, 8]), torch.Size([1, 3, 4, 8]), torch.Size([1, 3, 2, 6]), torch.Size([1, 3, 4]))

    Source:
        Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024, for the recurrence and its form
        on a chain.
    """
    check_rank("value", value, "B, N, HV, V")
    check_rank("key", key, "B, N, HK, K")
    check_rank("prefix_key", prefix_key, "B, P, HK, K")
    batch, num_nodes, value_heads, value_dim = value.shape
    key_heads, key_dim = key.shape[2:]
    prefix_length = prefix_key.shape[1]
    check_nodes("value", num_nodes)
    check_group("value", value_heads, "key", key_heads)
    check_shape("query", query, "B, N, HK, K", batch, num_nodes, key_heads, key_dim)
    check_shape("key", key, "B, N, HK, K", batch, num_nodes, key_heads, key_dim)
    check_log_decay("log_decay", log_decay, "B, N, HV", batch, num_nodes, value_heads)
    check_shape("beta", beta, "B, N, HV", batch, num_nodes, value_heads)
    check_shape("committed_state", committed_state, "B, HV, K, V", batch, value_heads, key_dim, value_dim)
    check_shape("parents", parents, "B, N", batch, num_nodes)
    check_index("parents", parents)
    check_shape("prefix_pseudo_value", prefix_pseudo_value, "B, P, HV, V", batch, prefix_length, value_heads, value_dim)
    check_shape("prefix_key", prefix_key, "B, P, HK, K", batch, prefix_length, key_heads, key_dim)
    check_log_decay("prefix_log_decay", prefix_log_decay, "B, P, HV", batch, prefix_length, value_heads)
    check_shape("prefix_mask", prefix_mask, "B, N, P", batch, num_nodes, prefix_length)
    check_mask("prefix_mask", prefix_mask)
    results: tuple[Tensor, Tensor, Tensor, Tensor] = _tree_wy_solve(
        value,
        query,
        key,
        log_decay,
        beta,
        committed_state,
        parents,
        prefix_pseudo_value,
        prefix_key,
        prefix_log_decay,
        prefix_mask,
        scale,
        qk_l2norm,
    )
    return results
