"""Known rows as kernels see them: those of a ring, and behind them the path that was accepted in the last tree."""

# mypy: ignore-errors
# The language of kernels has no types.

import triton
import triton.language as tl

from treewy.ops._kernel_math import BLOCK, dot_split, sum_after


@triton.jit
def count_rows(num_known, path_length, R, LAST):
    """Return how many rows are in a ring of R, and how many with the path. Whatever comes in, reads stay in both."""
    known = tl.minimum(tl.maximum(tl.load(num_known).to(tl.int32), 0), R)
    return known, known + tl.minimum(tl.maximum(tl.load(path_length).to(tl.int32), 0), LAST)


@triton.jit
def load_path(path, LAST):
    """Load the beginning of the accepted path, before it is known where the ring has room for it."""
    i = tl.arange(0, BLOCK)
    return tl.load(path + i, mask=i < LAST, other=0).to(tl.int32)


@triton.jit
def _known_rows(rows, num_known, num_rows):
    """Return which rows are in the ring, and which on the accepted path after it."""
    return rows < num_known, (rows >= num_known) & (rows < num_rows)


@triton.jit
def locate_known_rows(path_nodes, num_known, num_rows):
    """Return the 16 rows of a ring, which are in it, which on the accepted path after it, and the path's nodes."""
    rows = tl.arange(0, BLOCK)
    in_ring, on_path = _known_rows(rows, num_known, num_rows)
    node = tl.gather(path_nodes, tl.maximum(rows - num_known, 0), 0)
    return rows, in_ring, on_path, tl.where(on_path, node, 0)


@triton.jit
def load_known_keys(
    rows, in_ring, on_path, node, ring_key, last_key, last_key_stride,
    HK: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Return the keys of known rows."""
    k = tl.arange(0, KP)[None, :]
    place = tl.where(in_ring, ring_key + rows * (HK * K), last_key + node * last_key_stride)[:, None] + k
    return tl.load(place, mask=(in_ring | on_path)[:, None] & (k < K), other=0.0)


@triton.jit
def load_known_gates(ring_log_decay, last_log_decay, rows, in_ring, on_path, node, HV: tl.constexpr):
    """Return the log decays of known rows, 0 where there is none."""
    gate = tl.load(ring_log_decay + rows * HV, mask=in_ring, other=0.0)
    return gate + tl.load(last_log_decay + node * HV, mask=on_path, other=0.0).to(tl.float32)


@triton.jit
def load_known_values(
    ring_value, last_value, rows, in_ring, on_path, node, columns, inside, HV: tl.constexpr, V: tl.constexpr
):
    """Return a tile of the pseudo-values of known rows."""
    place = tl.where(in_ring, ring_value + rows * (HV * V), last_value + node * (HV * V))[:, None] + columns[None, :]
    return tl.load(place, mask=(in_ring | on_path)[:, None] & inside, other=0.0)


@triton.jit
def fold(
    state, ring_value, ring_key, ring_log_decay, last_value, last_key, last_log_decay, path, num_known, num_rows,
    last_key_stride, columns, inside, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KEYS_EXACT: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """Write known rows into a tile of the state.

    Takes 32 rows at a time, since ring and path together often have more than 16 and the state should not come twice;
    and as many channels of the keys as registers hold easily.
    """
    ROWS: tl.constexpr = 2 * BLOCK
    SLICE: tl.constexpr = max(BLOCK, 1024 // columns.shape[0])
    for first_row in range(0, num_rows, ROWS):
        rows = tl.arange(0, ROWS) + first_row
        in_ring, on_path = _known_rows(rows, num_known, num_rows)
        node = tl.load(path + rows - num_known, mask=on_path, other=0).to(tl.int32)
        values = load_known_values(ring_value, last_value, rows, in_ring, on_path, node, columns, inside, HV, V)
        gate = load_known_gates(ring_log_decay, last_log_decay, rows, in_ring, on_path, node, HV)
        values = values * tl.exp(sum_after(gate))[:, None]
        decay = tl.exp(tl.sum(gate, 0))
        key_rows = tl.where(in_ring, ring_key + rows * (HK * K), last_key + node * last_key_stride)
        for first in tl.range(0, K, SLICE):
            k = tl.arange(0, SLICE) + first
            within = (k < K)[:, None]
            keys = tl.load(key_rows[None, :] + k[:, None], mask=(in_ring | on_path)[None, :] & within, other=0.0)
            place = state + k[:, None] * V + columns[None, :]
            old = tl.load(place, mask=inside & within, other=0.0).to(tl.float32)
            new = old * decay + dot_split(
                keys, values, tl.zeros([SLICE, columns.shape[0]], tl.float32), KEYS_EXACT, False, FLOAT32
            )
            tl.store(place, new.to(state.dtype.element_ty), mask=inside & within)
        tl.debug_barrier()  # another thread may read what this one wrote, for the next rows or for the solve
