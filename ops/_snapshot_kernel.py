"""The kernel of `tree_snapshots`: one program walks the tree of a row for a tile of columns of one value head's state.

The columns of a state do not meet: u_i and o_i of a column need that column of S_p alone. So a program keeps its tile
`[K, COLUMNS]` in registers and stores a tile a node. What it costs is the stores; the rest keeps out of their way.

Order. A node needs its parent's state. Breadth first, most nodes of a tree would read it back, from so long ago that it
has left the cache. Depth first, a first child finds it in the registers, and so does the next sibling of a leaf if the
registers keep the state *before* the leaf, whose own is stored and not needed again. What remains to be read back was
stored shortly before. For a tree of widths 3, 3, 3 that is 8 tiles of 40 instead of 38. Only nodes with two children
and a grandchild can be read back; the states of others need not stay in the cache and are stored as first to go.

The order needs no stack. A node becomes ready when its parent is walked, and gets the time of that as its rank; of the
nodes that are ready, the one of the highest rank is next, the first of its siblings. Padding is never ready.

Algebra. With the raw keys, the norms as factors of the columns, and both products taken from the state before the node,

    u = b (v - exp(g) S_p^T k)          o = scale [exp(g) S_p^T q + (k . q) u]          S = exp(g) S_p + k u^T

so nothing waits for a norm, and S is needed only to be stored. The inputs of the next node are loaded while this one is
computed.

A tile that is read back was written by this program. Elements may have been written by another thread of it, where the
tile is smaller than the threads, so a barrier, which orders memory within a program, comes in between.
"""

# mypy: ignore-errors
# The language of kernels has no types.

import triton
import triton.language as tl


@triton.jit
def tree_snapshots_kernel(
    value,
    query,
    key,
    log_decay,
    beta,
    committed_state,  # [B, HV, K, V], contiguous
    parents,  # [B, N], contiguous
    earlier_states,  # [B, M, HV, K, V], contiguous
    output,  # [B, N, HV, V], contiguous
    states,  # [B, N, HV, K, V], contiguous
    value_row,  # strides, in elements; the last dimension is contiguous
    value_node,
    value_head,
    query_row,
    query_node,
    query_head,
    key_row,
    key_node,
    key_head,
    decay_row,
    decay_node,
    decay_head,
    beta_row,
    beta_node,
    beta_head,
    num_nodes,
    num_earlier,
    scale,
    VALUE_HEADS: tl.constexpr,
    HEAD_RATIO: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    QK_L2NORM: tl.constexpr,
    NODES: tl.constexpr,  # powers of two, at least num_nodes and KEY_DIM
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    TILES: tl.constexpr = (VALUE_DIM + COLUMNS - 1) // COLUMNS
    scale = tl.cast(scale, tl.float32)  # Inductor hands numbers over in float64
    row = (tl.program_id(0) // (TILES * VALUE_HEADS)).to(tl.int64)
    head = tl.program_id(0) // TILES % VALUE_HEADS
    column = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)
    channel = tl.arange(0, KEYS)
    tile = channel[:, None] * VALUE_DIM + column[None, :]
    in_column = column < VALUE_DIM
    in_channel = channel < KEY_DIM
    in_tile = in_channel[:, None] & in_column[None, :]

    value += row * value_row + head * value_head
    query += row * query_row + (head // HEAD_RATIO) * query_head
    key += row * key_row + (head // HEAD_RATIO) * key_head
    log_decay += row * decay_row + head * decay_head
    beta += row * beta_row + head * beta_head
    committed_state += (row * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
    earlier_states += (row * num_earlier * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
    parents += row * num_nodes
    output += (row * num_nodes * VALUE_HEADS + head) * VALUE_DIM
    states += (row * num_nodes * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
    node_stride = tl.full((), VALUE_HEADS * KEY_DIM * VALUE_DIM, tl.int64)

    # A tree nearly always begins with a child of the committed state: it is on its way while the order is found.
    state = tl.load(committed_state + tile, mask=in_tile, other=0.0).to(tl.float32)
    index = tl.arange(0, NODES)
    tree = tl.load(parents + index, mask=index < num_nodes, other=-2).to(tl.int32)
    above = tl.load(parents + tree - num_earlier, mask=tree >= num_earlier, other=-2).to(tl.int32)
    num_real = tl.sum((tree != -2).to(tl.int32), 0)
    # Ranks: roots and children of earlier nodes are ready with 0, all others not, with -1.
    first = tl.min(tl.where((tree != -2) & (tree < num_earlier), index, NODES), 0)
    rank = tl.where((tree != -2) & (tree < num_earlier), 0, -1)
    node = tl.where(num_real > 0, first, 0)

    parent = tl.load(parents + node).to(tl.int32)
    k_raw = tl.load(key + node * key_node + channel, mask=in_channel, other=0.0)
    q_raw = tl.load(query + node * query_node + channel, mask=in_channel, other=0.0)
    v_raw = tl.load(value + node * value_node + column, mask=in_column, other=0.0)
    gate = tl.load(log_decay + node * decay_node)
    strength = tl.load(beta + node * beta_node)
    if parent >= 0:
        state = tl.load(earlier_states + parent * node_stride + tile, mask=in_tile, other=0.0).to(tl.float32)

    for step in range(num_real):
        rank = tl.where(index == node, -1, tl.where(tree == node + num_earlier, step + 1, rank))
        best = tl.max(tl.where(rank >= 0, rank * NODES + NODES - 1 - index, -1), 0)
        following = tl.where(best >= 0, NODES - 1 - best % NODES, node)
        num_children = tl.sum((tree == node + num_earlier).to(tl.int32), 0)
        num_grandchildren = tl.sum((above == node + num_earlier).to(tl.int32), 0)
        following_parent = tl.load(parents + following).to(tl.int32)
        next_k = tl.load(key + following * key_node + channel, mask=in_channel, other=0.0)
        next_q = tl.load(query + following * query_node + channel, mask=in_channel, other=0.0)
        next_v = tl.load(value + following * value_node + column, mask=in_column, other=0.0)
        next_gate = tl.load(log_decay + following * decay_node)
        next_strength = tl.load(beta + following * beta_node)

        k = k_raw.to(tl.float32)
        q = q_raw.to(tl.float32)
        k_factor = 1.0
        q_factor = scale
        if QK_L2NORM:
            k_factor = 1.0 / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
            q_factor = scale / tl.sqrt(tl.sum(q * q, 0) + 1e-6)
        decay = tl.exp(gate.to(tl.float32))
        # In this order, and with the counts above it, no compiler runs out of registers.
        from_query = tl.sum(state * q[:, None], 0)
        from_key = tl.sum(state * k[:, None], 0)
        written = strength.to(tl.float32) * (v_raw.to(tl.float32) - decay * k_factor * from_key) * k_factor
        after = (decay * state + k[:, None] * written[None, :]).to(states.dtype.element_ty)
        read = q_factor * (decay * from_query + tl.sum(k * q, 0) * written)
        tl.store(output + node * (VALUE_HEADS * VALUE_DIM) + column, read.to(output.dtype.element_ty), mask=in_column)
        if (num_children > 1) & (num_grandchildren > 0):
            tl.store(states + node * node_stride + tile, after, mask=in_tile)
        else:
            tl.store(states + node * node_stride + tile, after, mask=in_tile, eviction_policy="evict_first")

        if following_parent == node + num_earlier:
            state = after.to(tl.float32)
        elif following_parent != parent:
            before = committed_state
            if following_parent >= num_earlier:
                tl.debug_barrier()
                before = states + (following_parent - num_earlier) * node_stride
            elif following_parent >= 0:
                before = earlier_states + following_parent * node_stride
            state = tl.load(before + tile, mask=in_tile, other=0.0).to(tl.float32)
        node = following
        parent = following_parent
        k_raw = next_k
        q_raw = next_q
        v_raw = next_v
        gate = next_gate
        strength = next_strength

    if num_real < num_nodes:
        nothing = tl.zeros((KEYS, COLUMNS), states.dtype.element_ty)
        for absent in range(num_nodes):
            if tl.load(parents + absent) == -2:
                zeros = tl.zeros((COLUMNS,), output.dtype.element_ty)
                tl.store(output + absent * (VALUE_HEADS * VALUE_DIM) + column, zeros, mask=in_column)
                tl.store(states + absent * node_stride + tile, nothing, mask=in_tile)
