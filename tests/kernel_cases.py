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


def _conv(num_nodes: int, dtype: torch.dtype = BFLOAT16) -> Case:
    channels, taps = 8192, 4
    x, window = _tensor(2, num_nodes, channels, dtype=dtype), _tensor(2, channels, 4, dtype=dtype)
    weight, bias = _tensor(channels, taps, dtype=dtype), _tensor(0, dtype=dtype)
    return ops.tree_conv, (x, window, weight, bias, _tensor(2, num_nodes), "silu")


def _conv_commit(num_nodes: int) -> Case:
    layers, channels = 3, 8192
    pool, x = _tensor(layers, 4, channels, 4, dtype=BFLOAT16), _tensor(layers, 2, num_nodes, channels, dtype=BFLOAT16)
    return ops.tree_conv_commit_, (pool, _tensor(2), x, _tensor(2, num_nodes), _tensor(2))


def _kv_commit(num_nodes: int, head_dim: int) -> Case:
    keys, values = (_tensor(3, 4, 2, 1024, head_dim, dtype=BFLOAT16) for _ in range(2))
    return ops.tree_kv_commit_, (keys, values, _tensor(2), _tensor(2), _tensor(2, num_nodes), _tensor(2))


def _attention(
    num_nodes: int, head_dim: int, dtype: torch.dtype = BFLOAT16, *, batch: int = 2, window: int = 0
) -> Case:
    query, key, value = (_tensor(batch, num_nodes, heads, head_dim, dtype=dtype) for heads in (16, 4, 4))
    cache = _tensor(batch, 4, 4096, head_dim, dtype=dtype)
    rows = *(_tensor(batch),) * 2, _tensor(batch, num_nodes)
    return ops.tree_attention, (query, key, value, cache, cache, *rows, 0.1, window)


def _nodes(batch: int, num_nodes: int, dims: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Value, query, key, log decay, beta, committed state and parents of some rows."""
    key_heads, value_heads, (key_dim, value_dim) = 16, 32, dims
    value = _tensor(batch, num_nodes, value_heads, value_dim, dtype=dtype)
    query, key = (_tensor(batch, num_nodes, key_heads, key_dim, dtype=dtype) for _ in range(2))
    log_decay = _tensor(batch, num_nodes, value_heads, dtype=FLOAT32)
    beta = _tensor(batch, num_nodes, value_heads, dtype=dtype)
    state = _tensor(batch, value_heads, key_dim, value_dim, dtype=FLOAT32)
    return value, query, key, log_decay, beta, state, _tensor(batch, num_nodes)


def _solve(
    num_nodes: int, dims: tuple[int, int], dtype: torch.dtype = BFLOAT16, *, batch: int = 2, prefix: int = 0
) -> Case:
    nodes = value, _, key, log_decay, *_ = _nodes(batch, num_nodes, dims, dtype)
    known_value = _tensor(batch, prefix, *value.shape[2:], dtype=FLOAT32)
    known_key = _tensor(batch, prefix, *key.shape[2:], dtype=FLOAT32)
    known_decay = _tensor(batch, prefix, log_decay.shape[2], dtype=FLOAT32)
    mask = _tensor(batch, num_nodes, prefix, dtype=torch.bool)
    return ops.tree_wy_solve, (*nodes, known_value, known_key, known_decay, mask, dims[0] ** -0.5, True)


def _commit(num_nodes: int, dims: tuple[int, int], dtype: torch.dtype = FLOAT32) -> Case:
    value, _, key, log_decay, _, state, parents = _nodes(2, num_nodes, dims, dtype)
    written = value.float(), key, log_decay, parents, _tensor(2)
    return ops.tree_wy_commit, (state, *written)


def _commit_in_place(num_nodes: int, dims: tuple[int, int], dtype: torch.dtype = FLOAT32) -> Case:
    _, (state, *written) = _commit(num_nodes, dims, dtype)
    return ops.tree_wy_commit_, (state, _tensor(2), *written)


def _verify(
    num_nodes: int, dims: tuple[int, int], dtype: torch.dtype = BFLOAT16, *, batch: int = 2, ring: int = 16
) -> Case:
    value, query, key, log_decay, beta, state, parents = _nodes(batch, num_nodes, dims, dtype)
    known = (
        _tensor(batch, ring, *value.shape[2:], dtype=FLOAT32),
        _tensor(batch, ring, *key.shape[2:], dtype=dtype),
        _tensor(batch, ring, log_decay.shape[2], dtype=FLOAT32),
        _tensor(batch),
    )
    tree = value.float(), value, query, key, log_decay, beta, parents
    last = key, log_decay, parents, _tensor(batch)
    return ops.tree_wy_verify_, (state, _tensor(batch), *known, *tree, *last, dims[0] ** -0.5, True)


def _snapshots(rows: int, num_nodes: int, dims: tuple[int, int], dtype: torch.dtype = BFLOAT16) -> Case:
    nodes = _nodes(rows, num_nodes, dims, dtype)
    return ops.tree_snapshots, (*nodes, _tensor(rows, 0, *nodes[5].shape[1:], dtype=FLOAT32), dims[0] ** -0.5, True)


def _sample(sampling: str) -> Case:
    nodes, vocab_size = _tensor(2, 16), 151936
    probs = _tensor(2, 16, vocab_size, dtype=FLOAT32)
    drafts = probs[:, :0] if sampling == "top" else probs
    noise = _tensor(2, 16, dtype=FLOAT32), _tensor(2, vocab_size, dtype=FLOAT32)
    return ops.tree_sample, (probs, nodes, nodes, drafts, nodes, *noise, sampling)


# The first case of a function is also compiled by Inductor.
CASES = {
    "conv, 4 nodes": _conv(4),
    "conv, 8 nodes": _conv(8),
    "conv, 16 to 64 nodes": _conv(64),
    "conv, 16 to 64 nodes, float32": _conv(64, FLOAT32),
    "commit of windows": _conv_commit(16),
    "commit of keys and values, 16 nodes": _kv_commit(16, 256),
    "commit of keys and values, 64 nodes": _kv_commit(64, 256),
    "commit of keys and values, 128 nodes": _kv_commit(128, 256),
    "attention, 64": _attention(16, 64),
    "attention, 128": _attention(16, 128),
    "attention, 256": _attention(16, 256),
    "attention, 256, 48 nodes, many rows": _attention(48, 256, batch=40),
    "attention, 256, 2 nodes": _attention(2, 256),
    "attention, 128, window": _attention(16, 128, window=512),
    "attention, 256, window": _attention(16, 256, window=512),
    "attention, 128, float32, window": _attention(16, 128, FLOAT32, window=512),
    "attention, 256, float16": _attention(16, 256, torch.float16),
    "attention, 64, float32": _attention(16, 64, FLOAT32),
    "attention, 128, float32": _attention(16, 128, FLOAT32),
    "attention, 256, float32": _attention(16, 256, FLOAT32),
    "sample": _sample("without_replacement"),
    "sample, with replacement": _sample("with_replacement"),
    "sample, top": _sample("top"),
    "snapshots, 64 x 64": _snapshots(2, 16, (64, 64)),
    "snapshots, 64 x 64, many rows": _snapshots(32, 16, (64, 64)),
    "snapshots, 128 x 128": _snapshots(2, 16, (128, 128)),
    "snapshots, 128 x 128, many rows": _snapshots(32, 16, (128, 128)),
    "snapshots, 128 x 128, 64 nodes": _snapshots(2, 64, (128, 128)),
    "snapshots, 128 x 128, many rows, 64 nodes": _snapshots(32, 64, (128, 128)),
    "snapshots, 128 x 128, float32": _snapshots(2, 16, (128, 128), FLOAT32),
    "snapshots, 128 x 128, many rows, float32": _snapshots(32, 16, (128, 128), FLOAT32),
    "snapshots, 96 x 192": _snapshots(2, 16, (96, 192)),
    "snapshots, 96 x 192, many rows": _snapshots(32, 16, (96, 192)),
    "snapshots, 256 x 256": _snapshots(2, 16, (256, 256)),
    "snapshots, 256 x 256, many rows": _snapshots(32, 16, (256, 256)),
    "solve": _solve(16, (128, 128)),
    "solve, 64 x 64": _solve(16, (64, 64)),
    "solve, float16": _solve(16, (128, 128), torch.float16),
    "solve, 128 nodes": _solve(128, (128, 128)),
    "tables, 64 x 64": _solve(16, (64, 64), batch=9),
    "tables, 128 x 128": _solve(16, (128, 128), batch=9),
    "tables, 96 x 192": _solve(16, (96, 192), batch=9),
    "tables, float16": _solve(16, (128, 128), torch.float16, batch=9),
    "tables, few rows": _solve(16, (128, 128), batch=3),
    "tables, 40 nodes": _solve(40, (128, 128), batch=9),
    "tables, 64 nodes": _solve(64, (128, 128), batch=9),
    "tables, prefix of 16": _solve(16, (128, 128), prefix=16),
    "tables, prefix of 32": _solve(16, (128, 128), prefix=32),
    "tables, 32 nodes, float16, prefix of 32": _solve(32, (128, 128), torch.float16, prefix=32),
    "tables, 64 x 128, float16": _solve(16, (64, 128), torch.float16, batch=9),
    "commit": _commit(16, (128, 128)),
    "commit in place": _commit_in_place(16, (128, 128)),
    "commit in place, 256 x 256": _commit_in_place(16, (256, 256)),
    "verify": _verify(16, (128, 128)),
    "verify, 64 x 64": _verify(16, (64, 64)),
    "verify, no ring": _verify(16, (128, 128), ring=0),
    "verify, tables, 64 x 64": _verify(16, (64, 64), batch=9),
    "verify, tables, 128 x 128": _verify(16, (128, 128), batch=9),
    "verify, tables, few rows": _verify(16, (128, 128), batch=3),
    "verify, tables, 40 nodes": _verify(40, (128, 128), batch=9),
    "verify, tables, 40 nodes, few rows": _verify(40, (128, 128)),
    "verify, tables, 256 x 256, float16, 40 nodes": _verify(40, (256, 256), torch.float16, batch=9),
}
