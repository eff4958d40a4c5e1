"""The kernel that commits accepted paths to states."""

# mypy: ignore-errors
# The language of kernels has no types.

import triton
import triton.language as tl

from treewy.ops._kernel_math import BLOCK, dot_split, sum_after


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
