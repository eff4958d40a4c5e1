"""Verify a tree behind tokens that are accepted but not yet written into the state: a whole round of one layer.

A commit reads and writes the state, 2 K V numbers a head, for a few tokens of K + V numbers each. Deferring it is
cheaper: accepted tokens stay in a ring of R known rows a row of the batch, of which every later node is a descendant,
and the state takes them in when the next accepted path no longer fits. With paths of a tokens the state is then written
once in about R / a rounds. With R = 0 every path is folded in when the next tree is verified.

One call does, for each row of the batch on its own:

1. take the path that was accepted in the last tree: append it to the ring, or fold ring and path into the state;
2. solve the new tree behind the ring, as `tree_wy_solve` does behind a prefix.

The pseudo-values of a tree wait in a scratch until the next call picks the accepted ones out of it, so they are
written once and nothing is copied that was rejected.

Keys are kept as given. With normalisation a node writes (k / |k|) u^T, and k (u / |k|)^T is the same: the scratch and
the ring hold u / |k| beside raw keys, which in bfloat16 are half the size and exact on tensor cores.
"""

import importlib.util

import torch
from torch import Tensor
from torch.library import wrap_triton

from treewy.ops._commit import _tree_wy_commit_
from treewy.ops._launch import (
    LARGEST_TREE,
    bucket,
    check_kernel_limits,
    fits_one_launch,
    head_options,
    pass_options,
    programs,
    row_strided,
    rows_contiguous,
    solve_kernels_apply,
    solve_options,
    tables_options,
    workspace,
)
from treewy.ops._registration import tree_op
from treewy.ops._solve import _reference as _solve_reference
from treewy.ops._validation import (
    check_group,
    check_index,
    check_log_decay,
    check_nodes,
    check_rank,
    check_shape,
)

if importlib.util.find_spec("triton") is not None:
    from treewy.ops._pass_kernel import tree_pass_kernel
    from treewy.ops._solve_kernel import tree_solve_kernel
    from treewy.ops._tables_kernel import tree_tables_kernel


def _take_path_(
    state_pool: Tensor,
    slots: Tensor,
    ring: tuple[Tensor, Tensor, Tensor],
    num_known: Tensor,
    last: tuple[Tensor, Tensor, Tensor],
    path: Tensor,
    path_length: Tensor,
) -> Tensor:
    """Append each row's path to its ring, or fold both into the state; return how many rows the ring holds then."""
    size, longest = ring[0].shape[1], path.shape[1]
    total = num_known.long() + path_length.long()
    fits = total <= size
    position = torch.arange(size + longest, device=path.device).expand(len(path), -1)
    node = path.long().gather(1, (position - num_known.long()[:, None]).clamp(0, longest - 1)).clamp(min=0)
    source = torch.where(position < num_known[:, None], position, size + node)
    rows = []
    for ours, theirs in zip(ring, last, strict=True):
        both = torch.cat([ours, theirs.to(ours.dtype)], dim=1)
        rows.append(
            both.gather(1, source.reshape(*source.shape, *[1] * (ours.ndim - 2)).expand(-1, -1, *ours.shape[2:]))
        )
    first = 0
    while first < size + longest:  # a range would fix lengths that are symbolic under torch.compile
        part = slice(first, first + LARGEST_TREE)
        chain = (position - first - 1).masked_fill(position >= total[:, None], -2)[:, part]
        last_row = (total - first).clamp(0, chain.shape[1]) - 1
        _tree_wy_commit_(state_pool, slots, *(x[:, part] for x in rows), chain, torch.where(fits, -1, last_row))
        first += LARGEST_TREE
    appended = (position >= num_known[:, None]) & (position < total[:, None]) & fits[:, None]
    for ours, new in zip(ring, rows, strict=True):
        mask = appended[:, :size].reshape(*appended[:, :size].shape, *[1] * (ours.ndim - 2))
        ours.copy_(torch.where(mask, new[:, :size], ours))
    return torch.where(fits, total, 0).to(num_known.dtype)


def _reference(
    state_pool: Tensor,
    slots: Tensor,
    ring: tuple[Tensor, Tensor, Tensor],
    num_known: Tensor,
    node_pseudo_value: Tensor,
    tree: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    parents: Tensor,
    last: tuple[Tensor, Tensor],
    path: Tensor,
    path_length: Tensor,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:
    if slots.shape[0] == 0:
        slots = torch.arange(len(parents), device=parents.device)
    last_rows = (node_pseudo_value[:, : last[0].shape[1]], *last)
    known = _take_path_(state_pool, slots, ring, num_known, last_rows, path, path_length)
    state = state_pool.index_select(0, slots.long().clamp(min=0)).masked_fill((slots < 0)[:, None, None, None], 0.0)
    num_nodes = parents.shape[1]
    index = torch.arange(ring[0].shape[1], device=path.device)
    mask = (index < known[:, None])[:, None].expand(-1, num_nodes, -1)
    output, pseudo_value, key_as_used, _ = _solve_reference(*tree, state, parents, *ring, mask, scale, qk_l2norm)
    if qk_l2norm:
        key = tree[2].to(key_as_used.dtype).masked_fill((parents == -2)[:, :, None, None], 0.0)
        factor = torch.rsqrt((key * key).sum(-1) + 1e-6)
        pseudo_value = pseudo_value * factor.repeat_interleave(tree[0].shape[2] // key.shape[2], dim=2).unsqueeze(-1)
    node_pseudo_value[:, :num_nodes] = pseudo_value.to(node_pseudo_value.dtype)
    return output, known


@tree_op(
    "tree_wy_verify_",
    mutates_args={"state_pool", "ring_pseudo_value", "ring_key", "ring_log_decay", "node_pseudo_value"},
)
def _tree_wy_verify_(
    state_pool: Tensor,
    slots: Tensor,
    ring_pseudo_value: Tensor,
    ring_key: Tensor,
    ring_log_decay: Tensor,
    num_known: Tensor,
    node_pseudo_value: Tensor,
    value: Tensor,
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    parents: Tensor,
    last_key: Tensor,
    last_log_decay: Tensor,
    path: Tensor,
    path_length: Tensor,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:
    ring = (ring_pseudo_value, ring_key, ring_log_decay)
    tree = (value, query, key, log_decay, beta)
    if not solve_kernels_apply(value, query, key, log_decay, beta, *ring, state_pool, node_pseudo_value):
        return _reference(
            *(state_pool, slots, ring, num_known, node_pseudo_value, tree, parents, (last_key, last_log_decay)),
            *(path, path_length, scale, qk_l2norm),
        )
    batch, num_nodes, value_heads, value_dim = value.shape
    key_dim = key.shape[3]
    size, last, scratch = ring_key.shape[1], path.shape[1], node_pseudo_value.shape[1]
    check_kernel_limits("value", num_nodes, key_dim, value_dim)
    value, query, key, last_key = row_strided(value), row_strided(query), row_strided(key), row_strided(last_key)
    log_decay, beta, parents, last_log_decay, path = rows_contiguous(log_decay, beta, parents, last_log_decay, path)
    output = value.new_empty(value.shape)
    known_after = num_known.new_empty(num_known.shape)
    heads = head_options(value, key, query)
    has_slots = slots.shape[0] != 0
    precision = {"L2NORM": qk_l2norm, "PREFIX_EXACT": True}
    strides = (query.stride(1), key.stride(1))
    if fits_one_launch(batch, value_heads, num_nodes, 0):
        grid, options = solve_options(value, key_dim)
        wrap_triton(tree_solve_kernel)[grid](
            *(value, query, key, log_decay, beta, state_pool, slots, parents),
            *(node_pseudo_value, key, log_decay, parents),  # there is no prefix
            *(*ring, num_known, last_key, last_log_decay, path, path_length, known_after),
            *(output, node_pseudo_value, node_pseudo_value, node_pseudo_value),
            *(num_nodes, 0, last, scratch, scale, value.stride(1), *strides, last_key.stride(1)),
            NODES=bucket(num_nodes),
            CHUNKS=1,
            RING=size,
            HAS_SLOTS=has_slots,
            RAW_KEYS=True,
            **heads,
            **precision,
            **options,
        )
        return output, known_after
    tables = workspace(value, key, heads, 16)
    tables_grid, options = tables_options(value, key_dim, 0, has_ring=True)
    wrap_triton(tree_tables_kernel)[tables_grid](
        *(query, key, log_decay, beta, parents, ring_key, ring_log_decay, parents),
        *(state_pool, slots, ring_pseudo_value, num_known, node_pseudo_value, last_key, last_log_decay),
        *(path, path_length, known_after, *tables, tables[3], tables[3]),
        *(num_nodes, size, last, scratch, scale, *strides, last_key.stride(1)),
        KNOWN=16,
        HAS_SLOTS=has_slots,
        RAW_KEYS=True,
        **heads,
        **precision,
        **options,
    )
    num_tiles, options = pass_options(value, heads, 0, has_ring=True)
    wrap_triton(tree_pass_kernel)[programs(num_tiles)](
        *(value, state_pool, slots, ring_pseudo_value, *tables, output, node_pseudo_value),
        *(num_nodes, size, scratch, num_tiles, value.stride(1)),
        KNOWN=16,
        HAS_SLOTS=has_slots,
        **heads,
        **options,
    )
    return output, known_after


@_tree_wy_verify_.register_fake
def _(
    state_pool: Tensor,
    slots: Tensor,
    ring_pseudo_value: Tensor,
    ring_key: Tensor,
    ring_log_decay: Tensor,
    num_known: Tensor,
    node_pseudo_value: Tensor,
    value: Tensor,
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    parents: Tensor,
    last_key: Tensor,
    last_log_decay: Tensor,
    path: Tensor,
    path_length: Tensor,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:
    return value.new_empty(value.shape), num_known.new_empty(num_known.shape)


def tree_wy_verify_(
    state_pool: Tensor,
    slots: Tensor,
    ring_pseudo_value: Tensor,
    ring_key: Tensor,
    ring_log_decay: Tensor,
    num_known: Tensor,
    node_pseudo_value: Tensor,
    value: Tensor,
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    parents: Tensor,
    last_key: Tensor,
    last_log_decay: Tensor,
    path: Tensor,
    path_length: Tensor,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:
    """Commit the last tree's accepted path, now or later, and verify the next tree behind it.

        S <- S_path where ring and path together have more than R rows; the ring is empty then
        o_i = scale S_i^T q_i for each node i, with S_i the state after ring, path to i and i

    Computes in the wider of float32 and the dtype of `value`. Value head h uses key head h // (HV / HK). The first call
    has an empty ring and no path: `num_known` and `path_length` of 0. Everything a call leaves behind is its rings,
    scratch and states: to have the states themselves up to date, call `tree_wy_commit_` with the rows of the ring and
    the path as a chain.

    Args:
        state_pool: `[S, HV, K, V]`, floating; written in place where a row folds. Pass the whole pool, not a
            view of it.
        slots: `[B]`, integer: the slot of each row; distinct, or -1 for a row without a state, which is taken as 0. Or
            `[0]`: slot b is row b's, which saves a look at memory before each state.
        ring_pseudo_value: `[B, R, HV, V]`, in the dtype of `node_pseudo_value`; written in place. R may be 0, and is at
            most 16 on CUDA.
        ring_key: `[B, R, HK, K]`, in the dtype of `key`; written in place.
        ring_log_decay: `[B, R, HV]`, float32, natural logarithm; written in place.
        num_known: `[B]`, integer: rows in the ring, at its beginning. What lies behind them is not read.
        node_pseudo_value: `[B, M, HV, V]`, float32, scratch: on entry the pseudo-values of the last tree, on return
            those of this one, for keys as given. M is at least the nodes of both.
        value: `[B, N, HV, V]`, floating.
        query: `[B, N, HK, K]`, floating.
        key: `[B, N, HK, K]`, floating.
        log_decay: `[B, N, HV]`, floating, natural logarithm, <= 0: each node's own.
        beta: `[B, N, HV]`, floating, write strength in [0, 2].
        parents: `[B, N]`, integer; -1 for a child of the last accepted node, `PADDING` for no node.
        last_key: `[B, L, HK, K]`, in the dtype of `key`: the keys of the last tree.
        last_log_decay: `[B, L, HV]`, floating: the log decays of the last tree.
        path: `[B, L]`, integer: nodes of the last tree that were accepted, root first (`path_to_node`).
        path_length: `[B]`, integer: how many these are; 0 for none.
        scale: Factor of the queries, usually K ** -0.5.
        qk_l2norm: Normalise queries and keys as x * rsqrt(sum(x^2) + 1e-6) before use.

    Returns:
        The output `[B, N, HV, V]` in the dtype of `value`, 0 for padding, and `num_known` for the next call.

    Raises:
        ValueError: A shape or dtype does not fit, or is beyond the kernels on CUDA.

    Example:
        Two rounds with a ring of four rows. Of the first tree the root and its second child are accepted.

        >>> _ = torch.manual_seed(0)
        >>> pool, slots, scratch = torch.zeros(1, 4, 6, 8), torch.tensor([0]), torch.empty(1, 3, 4, 8)
        >>> ring = torch.empty(1, 4, 4, 8), torch.empty(1, 4, 2, 6), torch.empty(1, 4, 4)
        >>> value, query, key = torch.randn(1, 3, 4, 8), torch.randn(1, 3, 2, 6), torch.randn(1, 3, 2, 6)
        >>> log_decay, beta, parents = -torch.rand(1, 3, 4), torch.rand(1, 3, 4), torch.tensor([[-1, 0, 0]])
        >>> tree = value, query, key, log_decay, beta, parents
        >>> none = torch.zeros(1, dtype=torch.int64)
        >>> path = torch.tensor([[0, 2, -1]])
        >>> _, known = tree_wy_verify_(
        ...     pool, slots, *ring, none, scratch, *tree, key, log_decay, path, none, 6**-0.5, True
        ... )
        >>> output, known = tree_wy_verify_(
        ...     pool, slots, *ring, known, scratch, *tree, key, log_decay, path, torch.tensor([2]), 6**-0.5, True
        ... )
        >>> output.shape, known
        (torch.Size([1, 3, 4, 8]), tensor([2]))

    Source:
        `_solve.py` and `_commit.py`; for the ring, the deferred writes that serving engines use on chains.
    """
    check_rank("value", value, "B, N, HV, V")
    check_rank("key", key, "B, N, HK, K")
    check_rank("ring_key", ring_key, "B, R, HK, K")
    check_rank("state_pool", state_pool, "S, HV, K, V")
    check_rank("node_pseudo_value", node_pseudo_value, "B, M, HV, V")
    check_rank("path", path, "B, L")
    batch, num_nodes, value_heads, value_dim = value.shape
    key_heads, key_dim = key.shape[2:]
    size, last, scratch = ring_key.shape[1], path.shape[1], node_pseudo_value.shape[1]
    check_nodes("value", num_nodes)
    check_nodes("path", last)
    check_group("value", value_heads, "key", key_heads)
    check_shape("state_pool", state_pool, "S, HV, K, V", state_pool.shape[0], value_heads, key_dim, value_dim)
    check_rank("slots", slots, "B or 0")
    if slots.shape[0] != 0:
        check_shape("slots", slots, "B or 0", batch)
    elif state_pool.shape[0] != batch:
        raise ValueError(
            f"state_pool has {state_pool.shape[0]} slots, expected {batch}, one a row, when slots is empty"
        )
    check_index("slots", slots)
    check_shape("ring_pseudo_value", ring_pseudo_value, "B, R, HV, V", batch, size, value_heads, value_dim)
    check_shape("ring_key", ring_key, "B, R, HK, K", batch, size, key_heads, key_dim)
    check_log_decay("ring_log_decay", ring_log_decay, "B, R, HV", batch, size, value_heads)
    check_shape("num_known", num_known, "B", batch)
    check_index("num_known", num_known)
    check_shape("node_pseudo_value", node_pseudo_value, "B, M, HV, V", batch, scratch, value_heads, value_dim)
    if scratch < max(num_nodes, last):
        raise ValueError(
            f"node_pseudo_value has {scratch} rows, expected at least {max(num_nodes, last)}: the nodes of this tree "
            "and of the last"
        )
    check_shape("query", query, "B, N, HK, K", batch, num_nodes, key_heads, key_dim)
    check_shape("key", key, "B, N, HK, K", batch, num_nodes, key_heads, key_dim)
    check_log_decay("log_decay", log_decay, "B, N, HV", batch, num_nodes, value_heads)
    check_shape("beta", beta, "B, N, HV", batch, num_nodes, value_heads)
    check_shape("parents", parents, "B, N", batch, num_nodes)
    check_index("parents", parents)
    check_shape("last_key", last_key, "B, L, HK, K", batch, last, key_heads, key_dim)
    check_log_decay("last_log_decay", last_log_decay, "B, L, HV", batch, last, value_heads)
    check_shape("path", path, "B, L", batch, last)
    check_index("path", path)
    check_shape("path_length", path_length, "B", batch)
    check_index("path_length", path_length)
    for name, tensor in (("ring_key", ring_key), ("last_key", last_key)):
        if tensor.dtype != key.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected that of key, {key.dtype}")
    if ring_pseudo_value.dtype != node_pseudo_value.dtype:
        raise ValueError(
            f"ring_pseudo_value has dtype {ring_pseudo_value.dtype}, expected that of node_pseudo_value, "
            f"{node_pseudo_value.dtype}"
        )
    if value.device.type == "cuda" and size > 16:
        raise ValueError(f"ring_key has {size} rows, the kernels take up to 16")
    results: tuple[Tensor, Tensor] = _tree_wy_verify_(
        *(state_pool, slots, ring_pseudo_value, ring_key, ring_log_decay, num_known, node_pseudo_value),
        *(value, query, key, log_decay, beta, parents, last_key, last_log_decay, path, path_length, scale, qk_l2norm),
    )
    return results
