"""The Triton kernels of `tree_attention`: shares of the columns first, then their sum.

A tree has few nodes and a prefix many columns, so the columns are shared out. Part s of them gives each query the
greatest of its scores there, and relative to that the sum of the weights and the weighted sum of the values:

    m_s = max_c x_c          l_s = sum_c exp(x_c - m_s)          a_s = sum_c exp(x_c - m_s) v_c

Columns may come in any order and any grouping, since with m = max_s m_s the softmax over all of them is

    o = sum_s exp(m_s - m) a_s / sum_s exp(m_s - m) l_s

`tree_attention_parts_kernel` finds m_s, l_s and a_s. The last part is the tree itself, whose keys are in no cache; the
others share the prefix, in blocks of columns, as evenly as its length on the device allows. So the time follows from
the length of a row's prefix, not from the room that its cache has, and no multiprocessor waits for a long row that
another one reads alone. `tree_attention_merge_kernel` adds the parts up.

Rows of a product are pairs of node and query head that share a key head, node by node, so that a key is read once for
all of them, and nodes that a tree does not have, which are mostly the last ones, make up whole tiles that read nothing.

With a window, node i sees columns behind `length + depth(i) - WINDOW` of its row's prefix, and of its path the WINDOW
nearest nodes, itself included. What comes before the windows of all nodes of a tile is cut off its prefix before this
is shared out, so that time follows from the window. Without one (`WINDOW = 0`) nothing of that is compiled.

Scores are in units of log 2, `scale` holding the factor, since `exp2` is what the hardware has.
"""

# mypy: ignore-errors
# The language of kernels has no types.

import triton
import triton.language as tl


@triton.jit
def take_columns(query, key, value, visible, greatest, total, values, scale):
    """Return m, l and a of columns so far and a block of them more, `visible [rows, columns]`."""
    scores = tl.dot(query, tl.trans(key), input_precision="tf32x3") * scale
    scores = tl.where(visible, scores, float("-inf"))
    now_greatest = tl.maximum(greatest, tl.max(scores, 1))
    # Where nothing was visible yet, -inf - (-inf) would be NaN; exp2(-inf - 0) is 0.
    origin = tl.where(now_greatest > float("-inf"), now_greatest, 0.0)
    weights = tl.exp2(scores - origin[:, None])
    kept = tl.exp2(greatest - origin)
    total = total * kept + tl.sum(weights, 1)
    values = tl.dot(weights.to(value.dtype), value, values * kept[:, None], input_precision="tf32x3")
    return now_greatest, total, values


@triton.jit
def mark_paths(parents_ptr, parents_node_stride, node, parent, present, WINDOW: tl.constexpr):
    """Return two words that mark which of nodes 0 to 63 and 64 to 127 are the given node or its ancestors.

    Of a path longer than a window they mark the last WINDOW nodes.
    """
    one = tl.full(node.shape, 1, tl.int64)
    bit = one << (node & 63).to(tl.int64)
    low, high = tl.where(present & (node < 64), bit, 0), tl.where(present & (node >= 64), bit, 0)
    current = tl.where(present, parent, -1)
    steps = 0
    while tl.max(current, 0) >= 0:
        for _ in tl.static_range(4):  # a look whether all have arrived takes longer than a step
            if WINDOW > 0:
                steps += 1
                current = tl.where(steps < WINDOW, current, -1)
            on_path = current >= 0
            bit = one << (current & 63).to(tl.int64)
            low = tl.where(on_path & (current < 64), low | bit, low)
            high = tl.where(current >= 64, high | bit, high)
            current = tl.load(parents_ptr + current * parents_node_stride, mask=on_path, other=-1).to(tl.int32)
    return low, high


@triton.jit
def count_ancestors(parents_ptr, parents_node_stride, parent):
    """Return the depths of the nodes that have the given parents."""
    depth = tl.zeros(parent.shape, tl.int32)
    while tl.max(parent, 0) >= 0:
        for _ in tl.static_range(4):
            on_path = parent >= 0
            depth += on_path.to(tl.int32)
            parent = tl.load(parents_ptr + parent * parents_node_stride, mask=on_path, other=-1).to(tl.int32)
    return depth


@triton.jit
def tree_attention_parts_kernel(
    query_ptr,  # [B, N, HQ, D], D dense, as in all that follows
    key_ptr,  # [B, N, HKV, D]
    value_ptr,  # [B, N, HKV, D]
    key_cache_ptr,  # [B, HKV, L, D]
    value_cache_ptr,  # [B, HKV, L, D]
    prefix_start_ptr,  # [B], contiguous
    prefix_length_ptr,  # [B], contiguous
    parents_ptr,  # [B, N]
    greatest_ptr,  # [B, N, HQ, PARTS], contiguous
    total_ptr,  # [B, N, HQ, PARTS], contiguous
    values_ptr,  # [B, N, HQ, PARTS, D], contiguous; not written by parts without columns
    num_nodes,
    scale,
    query_row_stride,
    query_node_stride,
    query_head_stride,
    key_row_stride,
    key_node_stride,
    key_head_stride,
    value_row_stride,
    value_node_stride,
    value_head_stride,
    key_cache_row_stride,
    key_cache_head_stride,
    key_cache_column_stride,
    value_cache_row_stride,
    value_cache_head_stride,
    value_cache_column_stride,
    parents_row_stride,
    parents_node_stride,
    RATIO: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    part, key_head = tl.program_id(0), (tl.program_id(1) % KEY_HEADS).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    scale = tl.cast(scale, tl.float32)  # Inductor hands numbers over in float64
    place = (tl.program_id(1) // KEY_HEADS) * ROWS + tl.arange(0, ROWS)
    node, head = place // RATIO, key_head * RATIO + place % RATIO
    parents_ptr += row * parents_row_stride
    start = tl.load(prefix_start_ptr + row).to(tl.int64)
    length = tl.load(prefix_length_ptr + row).to(tl.int32)
    parent = tl.load(parents_ptr + node * parents_node_stride, mask=node < num_nodes, other=-2).to(tl.int32)
    present = parent != -2
    last = tl.max(tl.where(present, node, -1), 0)
    if last < 0:
        return

    d, column = tl.arange(0, DP), tl.arange(0, COLUMNS)
    in_head = (d < D)[None, :]
    query_ptr += row * query_row_stride
    query_place = node.to(tl.int64) * query_node_stride + head * query_head_stride
    query = tl.load(query_ptr + query_place[:, None] + d[None, :], mask=present[:, None] & in_head, other=0.0)
    # Where the columns of this part lie, and in two words which of the first 128 a row sees; of a prefix it sees all,
    # within a window all from `begin` on.
    if part == PARTS - 1:
        first, stop = 0, last + 1
        low, high = mark_paths(parents_ptr, parents_node_stride, node, parent, present, WINDOW)
        if WINDOW > 0:
            begin = tl.zeros([ROWS], tl.int32)
        key_ptr += row * key_row_stride + key_head * key_head_stride
        value_ptr += row * value_row_stride + key_head * value_head_stride
        key_stride, value_stride = tl.cast(key_node_stride, tl.int64), tl.cast(value_node_stride, tl.int64)
    else:
        if WINDOW > 0:
            begin = length + 1 - WINDOW + count_ancestors(parents_ptr, parents_node_stride, parent)
            unseen = tl.min(tl.where(present, begin, length), 0)
            unseen = tl.minimum(tl.maximum(unseen, 0), length)
            start, length, begin = start + unseen, length - unseen, begin - unseen
        blocks = tl.cdiv(length, COLUMNS)
        first = (part * blocks // (PARTS - 1)) * COLUMNS
        stop = tl.minimum(((part + 1) * blocks // (PARTS - 1)) * COLUMNS, length)
        low, high = tl.full([ROWS], -1, tl.int64), tl.full([ROWS], -1, tl.int64)
        key_stride = tl.cast(key_cache_column_stride, tl.int64)
        value_stride = tl.cast(value_cache_column_stride, tl.int64)
        key_ptr = key_cache_ptr + row * key_cache_row_stride + key_head * key_cache_head_stride + start * key_stride
        value_ptr = value_cache_ptr + row * value_cache_row_stride + key_head * value_cache_head_stride
        value_ptr += start * value_stride
    # Keys that no row sees are not loaded: nodes of padding may hold NaN, and 0 times NaN is NaN.
    seen_low, seen_high = tl.reduce_or(low, 0), tl.reduce_or(high, 0)

    greatest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, DP], tl.float32)
    key_place = column.to(tl.int64)[:, None] * key_stride + d[None, :]
    value_place = column.to(tl.int64)[:, None] * value_stride + d[None, :]
    for block in tl.range(first, stop, COLUMNS, num_stages=STAGES):
        seen = (tl.where(block < 64, seen_low, seen_high) >> (block & 63)).to(tl.int32)
        exists = (block + column < stop) & ((seen >> column) & 1 != 0)
        loaded = exists[:, None] & in_head
        key = tl.load(key_ptr + block * key_stride + key_place, mask=loaded, other=0.0)
        value = tl.load(value_ptr + block * value_stride + value_place, mask=loaded, other=0.0)
        word = (tl.where(block < 64, low, high) >> (block & 63)).to(tl.int32)
        visible = exists[None, :] & ((word[:, None] >> column[None, :]) & 1 != 0)
        if WINDOW > 0:
            visible = visible & (block + column[None, :] >= begin[:, None])
        greatest, total, values = take_columns(query, key, value, visible, greatest, total, values, scale)

    result = ((row * num_nodes + node) * (KEY_HEADS * RATIO) + head) * PARTS + part
    tl.store(greatest_ptr + result, greatest, mask=present)
    tl.store(total_ptr + result, total, mask=present)
    written = present & (greatest > float("-inf"))
    tl.store(values_ptr + result[:, None] * D + d[None, :], values, mask=written[:, None] & in_head)


@triton.jit
def tree_attention_merge_kernel(
    greatest_ptr,  # [B, N, HQ, PARTS], contiguous, as all here is
    total_ptr,  # [B, N, HQ, PARTS]
    values_ptr,  # [B, N, HQ, PARTS, D]
    parents_ptr,  # [B, N]
    output_ptr,  # [B, N, HQ, D]
    num_nodes,
    parents_row_stride,
    parents_node_stride,
    QUERY_HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
):
    vector = tl.program_id(0).to(tl.int64)  # of a row, a node and a head
    node = vector // QUERY_HEADS
    parent = tl.load(parents_ptr + node // num_nodes * parents_row_stride + node % num_nodes * parents_node_stride)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    part = vector * PARTS + tl.arange(0, PARTS)
    greatest, total = tl.load(greatest_ptr + part), tl.load(total_ptr + part)
    # Nobody has written what belongs to nodes of padding, nor the values of parts without columns.
    written = (greatest > float("-inf"))[:, None] & (d < D)[None, :]
    values = tl.load(values_ptr + part[:, None] * D + d[None, :], mask=written, other=0.0)
    weights = tl.exp2(greatest - tl.max(greatest, 0))
    result = tl.sum(values * weights[:, None], 0) / tl.sum(total * weights, 0)
    result = tl.where(parent != -2, result, 0.0)
    tl.store(output_ptr + vector * D + d, result.to(output_ptr.dtype.element_ty), mask=d < D)
