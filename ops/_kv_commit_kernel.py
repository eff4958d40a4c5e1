"""The Triton kernel of `tree_kv_commit_`.

One program moves the path of one row, layer and head over a block of the head's dimensions, keys and values alike. It
walks from the accepted node to the root once: lane e of its tiles learns the e-th ancestor, so with n nodes on the path
the entry of lane e goes to place n - 1 - e. Places on the path overlap with nodes on it, so a program loads everything
before it stores anything, and programs share out heads and dimensions, never nodes. Nodes that lie in their place
already, as the whole of an accepted chain does, are neither read nor written.
"""

# mypy: ignore-errors
# The language of kernels has no types.

import triton
import triton.language as tl


@triton.jit
def tree_kv_commit_kernel(
    key_pool_ptr,  # [L, S, HKV, T, D]
    value_pool_ptr,  # [L, S, HKV, T, D]
    slots_ptr,  # [B], contiguous
    start_ptr,  # [B], contiguous
    parents_ptr,  # [B, N]
    accepted_node_ptr,  # [B], contiguous
    num_rows,
    num_heads,
    head_dim,
    key_layer_stride,
    key_slot_stride,
    key_head_stride,
    key_column_stride,
    key_dim_stride,
    value_layer_stride,
    value_slot_stride,
    value_head_stride,
    value_column_stride,
    value_dim_stride,
    parents_row_stride,
    parents_node_stride,
    BLOCK_NODES: tl.constexpr,
    BLOCK_DIMS: tl.constexpr,
):
    layer = (tl.program_id(0) // num_rows).to(tl.int64)
    row = (tl.program_id(0) % num_rows).to(tl.int64)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    dim = (tl.program_id(1) // num_heads) * BLOCK_DIMS + tl.arange(0, BLOCK_DIMS)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    node = tl.load(accepted_node_ptr + row).to(tl.int32)
    if (slot < 0) | (node < 0):
        return
    parents_ptr += row * parents_row_stride
    if tl.load(parents_ptr + node * parents_node_stride) == -2:
        return

    lane = tl.arange(0, BLOCK_NODES)
    source = tl.zeros([BLOCK_NODES], tl.int32)
    length = 0
    while node >= 0:
        source = tl.where(lane == length, node, source)
        length += 1
        node = tl.load(parents_ptr + node * parents_node_stride).to(tl.int32)
    place = length - 1 - lane
    moves = ((lane < length) & (source != place))[:, None] & (dim < head_dim)[None, :]

    start = tl.load(start_ptr + row).to(tl.int64)
    key_ptr = key_pool_ptr + layer * key_layer_stride + slot * key_slot_stride + head * key_head_stride
    value_ptr = value_pool_ptr + layer * value_layer_stride + slot * value_slot_stride + head * value_head_stride
    key_ptr += dim[None, :] * key_dim_stride
    value_ptr += dim[None, :] * value_dim_stride
    source_column, column = (start + source)[:, None], (start + place)[:, None]
    key = tl.load(key_ptr + source_column * key_column_stride, mask=moves)
    value = tl.load(value_ptr + source_column * value_column_stride, mask=moves)
    tl.debug_barrier()
    tl.store(key_ptr + column * key_column_stride, key, mask=moves)
    tl.store(value_ptr + column * value_column_stride, value, mask=moves)
