"""Kernels that advance states by known rows: the commit of an accepted path, and that of a ring that may take it in."""

# mypy: ignore-errors
# The language of kernels has no types.

import triton
import triton.language as tl

from treewy.ops._kernel_math import BLOCK, dot_split, sum_after
from treewy.ops._ring_kernel import load_known_gates, load_known_values, locate_known_rows


@triton.jit
def _advance(state_tile, keys, values, gate, KEYS_EXACT: tl.constexpr, FLOAT32: tl.constexpr):
    """Return a tile [K, V] of the state after 16 rows in order; rows that are absent have zeros everywhere."""
    values = values * tl.exp(sum_after(gate))[:, None]
    return dot_split(keys, values, state_tile * tl.exp(tl.sum(gate, 0)), KEYS_EXACT, False, FLOAT32)


@triton.jit(do_not_specialize=["N"])
def tree_commit_kernel(
    state, slots, pseudo_value, key, log_decay, parents, accepted_node, result, N,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, COLUMNS: tl.constexpr,
    NODES: tl.constexpr, IN_PLACE: tl.constexpr, KEYS_EXACT: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """Advance a tile of one state by the path to the accepted node. In place, a row without a path is left alone."""
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key_head = head // (HV // HK)
    parents += row * N
    node = tl.load(accepted_node + row).to(tl.int32)
    slot = row
    if IN_PLACE:
        slot = tl.load(slots + row).to(tl.int32)
        node = tl.where(slot >= 0, node, -1)
    if node >= 0:
        if tl.load(parents + node) == -2:
            node = -1
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = (columns < V)[None, :]
    i = tl.arange(0, BLOCK)
    k = tl.arange(0, KP)[:, None]
    offset = (slot.to(tl.int64) * HV + head) * (K * V) + k * V + columns[None, :]
    touched = K
    if IN_PLACE:
        touched = tl.where(node >= 0, K, 0)
    in_state = (k < touched) & inside
    old = tl.load(state + offset, mask=in_state, other=0.0)
    low = tl.full([1], 0, tl.int64)
    high = tl.full([1], 0, tl.int64)
    while node >= 0:
        bit = tl.full([1], 1, tl.int64) << (node & 63).to(tl.int64)
        low = tl.where(node < 64, low | bit, low)
        high = tl.where(node >= 64, high | bit, high)
        node = tl.load(parents + node).to(tl.int32)
    state_tile = old.to(tl.float32)
    for block in range(NODES // BLOCK):
        nodes = i + block * BLOCK
        word = tl.where(nodes < 64, low, high)
        on_path = ((word >> (nodes & 63).to(tl.int64)) & 1) != 0
        if tl.max(on_path.to(tl.int32), 0) != 0:
            place = (row * N + nodes).to(tl.int64)
            gate = tl.load(log_decay + place * HV + head, mask=on_path, other=0.0).to(tl.float32)
            values = tl.load(
                pseudo_value + (place[:, None] * HV + head) * V + columns[None, :],
                mask=on_path[:, None] & inside, other=0.0,
            ).to(tl.float32)  # fmt: skip
            keys = tl.load(key + (place[None, :] * HK + key_head) * K + k, mask=on_path[None, :] & (k < K), other=0.0)
            state_tile = _advance(state_tile, keys, values, gate, KEYS_EXACT, FLOAT32)
    new = state_tile.to(result.dtype.element_ty)
    if not IN_PLACE:
        # Bit for bit the old state where nothing is committed, also where it is not a number.
        committed = tl.max(((low | high) != 0).to(tl.int32), 0) != 0
        new = tl.where(committed, new, old)
    tl.store(result + offset, new, mask=in_state)


@triton.jit(do_not_specialize=["LAST", "SCRATCH"])
def tree_defer_kernel(
    state, slots, ring_value, ring_key, ring_log_decay, num_known, last_value, last_key, last_log_decay,
    path, path_length, known_after, LAST, SCRATCH, last_key_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, HEADS: tl.constexpr,
    COLUMNS: tl.constexpr, RING: tl.constexpr, HAS_SLOTS: tl.constexpr, KEYS_EXACT: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """Append an accepted path to the ring of its row; where it does not fit, fold ring and path into the state.

    Most calls append, which is little work: a program takes several heads, so that there are few programs.
    """
    first, row = tl.program_id(0) * HEADS, tl.program_id(1)
    known = tl.minimum(tl.load(num_known + row).to(tl.int32), RING)  # whatever comes in, reads stay in the ring
    num_rows = known + tl.load(path_length + row).to(tl.int32)
    if first == 0:
        tl.store(known_after + row, tl.where(num_rows <= RING, num_rows, 0))
    k = tl.arange(0, KP)
    path += row * LAST
    ring_value += row.to(tl.int64) * RING * HV * V
    ring_key += row.to(tl.int64) * RING * HK * K
    ring_log_decay += row * RING * HV
    last_value += row.to(tl.int64) * SCRATCH * HV * V
    last_key += row.to(tl.int64) * LAST * last_key_stride
    last_log_decay += row * LAST * HV
    if num_rows <= RING:
        rows = known + tl.arange(0, BLOCK)
        on_path = rows < num_rows
        node = tl.load(path + tl.arange(0, BLOCK), mask=on_path, other=0).to(tl.int32)
        for head in range(first, first + HEADS):
            for tile in range(0, tl.cdiv(V, COLUMNS)):
                columns = tl.arange(0, COLUMNS) + tile * COLUMNS
                inside = on_path[:, None] & (columns < V)[None, :]
                place = head * V + columns[None, :]
                values = tl.load(last_value + node[:, None] * (HV * V) + place, mask=inside, other=0.0)
                tl.store(ring_value + rows[:, None] * (HV * V) + place, values, mask=inside)
            gate = tl.load(last_log_decay + node * HV + head, mask=on_path, other=0.0).to(tl.float32)
            tl.store(ring_log_decay + rows * HV + head, gate, mask=on_path)
            if head % (HV // HK) == 0:
                in_keys = on_path[:, None] & (k < K)[None, :]
                key_place = (head // (HV // HK)) * K + k[None, :]
                keys = tl.load(last_key + node[:, None] * last_key_stride + key_place, mask=in_keys, other=0.0)
                tl.store(ring_key + rows[:, None] * (HK * K) + key_place, keys, mask=in_keys)
    else:
        slot = row.to(tl.int64)
        if HAS_SLOTS:
            slot = tl.load(slots + row).to(tl.int64)
        width = tl.where(slot >= 0, K, 0)  # a row without a slot has no state to write
        for task in range(0, HEADS * tl.cdiv(V, COLUMNS)):
            head = first + task // tl.cdiv(V, COLUMNS)
            key_head = head // (HV // HK)
            columns = tl.arange(0, COLUMNS) + (task % tl.cdiv(V, COLUMNS)) * COLUMNS
            inside = (columns < V)[None, :]
            place = state + (slot * HV + head) * (K * V) + k[:, None] * V + columns[None, :]
            in_state = (k < width)[:, None] & inside
            state_tile = tl.load(place, mask=in_state, other=0.0).to(tl.float32)
            for chunk in range(0, tl.cdiv(num_rows, BLOCK)):
                rows, in_ring, on_path, node = locate_known_rows(path, chunk, known, num_rows)
                values = load_known_values(
                    ring_value + head * V, last_value + head * V, rows, in_ring, on_path, node, columns, inside, HV, V
                )
                gate = load_known_gates(ring_log_decay + head, last_log_decay + head, rows, in_ring, on_path, node, HV)
                key_place = key_head * K + k[:, None]
                in_keys = (k < K)[:, None]
                keys = tl.load(
                    ring_key + rows[None, :] * (HK * K) + key_place, mask=in_ring[None, :] & in_keys, other=0.0
                )
                keys += tl.load(
                    last_key + node[None, :] * last_key_stride + key_place, mask=on_path[None, :] & in_keys, other=0.0
                )
                state_tile = _advance(state_tile, keys, values, gate, KEYS_EXACT, FLOAT32)
            tl.store(place, state_tile.to(state.dtype.element_ty), mask=in_state)
