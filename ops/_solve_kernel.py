"""The solve of a tree as kernels: one pass over the states, with the small algebra inside it or before it.

For a block of 16 nodes with keys k_i, queries q_i and paths that start at state S0 (see `_solve.py` for the equations):

    r_i = v_i - exp(G_i) S0^T k_i - sum_j C_ij u_j     u = T b r     o_i = exp(G_i) S0^T q_i + sum_j Q_ij u_j + (M r)_i

where j runs over known rows only: those of a prefix or ring and of earlier blocks, with coefficients C and Q. What
remains is a triangular system of 16 nodes with the inverse T; M = P T b carries its pseudo-values straight into the
outputs. C, Q, T b and M depend on keys, queries, gates and paths but not on the state. They are tables, as [j, i].

`tree_solve_kernel` makes them where it needs them when programs are few, since then every launch counts. With many
programs each tile of columns would make them again, so `tree_tables_kernel` writes them first.

Everything that is read from memory is asked for before the first use of any of it: a program lives about as long as a
few of its loads take.
"""

# mypy: ignore-errors
# The language of kernels has no types.

import triton
import triton.language as tl

from treewy.ops._kernel_math import (
    BLOCK,
    dot_split,
    has_bit,
    load_rows,
    norm_factors,
    scale_rows,
    sum_after,
    unit_upper_inverse,
    walk_to_roots,
)
from treewy.ops._ring_kernel import (
    count_rows,
    fold,
    load_known_gates,
    load_known_keys,
    load_known_values,
    load_path,
    locate_known_rows,
)

GREATEST = tl.constexpr(3.4028234663852886e38)  # of float32


@triton.jit
def _finite(products):
    """Replace products of raw keys that overflow: the norm of one side does, and what comes of it is dropped or 0."""
    return tl.minimum(tl.maximum(products, -GREATEST), GREATEST)


@triton.jit
def coefficients(
    rows, rows_factor, keys, keys_factor, queries, decay, marked,
    ROWS_EXACT: tl.constexpr, KEYS_EXACT: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """Return what rows j contribute to the keys and to the queries of nodes i, [j, i] each.

    Rows of padding may hold anything: each product has one row of either side, and is dropped where it is not marked.
    """
    zeros = tl.zeros([BLOCK, BLOCK], tl.float32)
    decay = decay * rows_factor[:, None]
    for_keys = dot_split(rows, tl.trans(keys), zeros, ROWS_EXACT, KEYS_EXACT, FLOAT32)
    for_queries = dot_split(rows, tl.trans(queries), zeros, ROWS_EXACT, KEYS_EXACT, FLOAT32)
    for_keys = _finite(for_keys) * (decay * keys_factor[None, :])
    return tl.where(marked, for_keys, 0.0), tl.where(marked, _finite(for_queries) * decay, 0.0)


@triton.jit
def own_block(
    products, for_queries, keys_factor, low, high, path_decay, strength, first,
    NODES: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """Return T b, without its diagonal b, and M of a block of nodes, transposed.

    Takes the products of keys and of keys with queries. A key whose norm overflows has a factor of 0, and neither row
    nor column.
    """
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    marked = has_bit(low, high, tl.arange(0, BLOCK) + first, NODES) & (keys_factor > 0.0)[:, None]
    behind = (path_decay[None, :] - path_decay[:, None]).to(tl.float32)
    decay = tl.exp(tl.minimum(behind, 0.0)) * keys_factor[:, None]
    for_queries = tl.where(marked, for_queries * decay, 0.0)
    between = marked & (row < column) & (keys_factor > 0.0)[None, :]
    for_keys = tl.where(between, products * (decay * (keys_factor * strength)[None, :]), 0.0)
    inverse = unit_upper_inverse(for_keys, FLOAT32)
    solution = inverse * strength[:, None]
    mix = dot_split(solution, for_queries, tl.zeros([BLOCK, BLOCK], tl.float32), False, False, FLOAT32)
    return tl.where(row == column, 0.0, solution), mix


@triton.jit
def block_before(
    keys, keys_factor, queries, low, high, path_decay, key, log_decay, parents, before, N, key_stride,
    HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, NODES: tl.constexpr, L2NORM: tl.constexpr,
    RAW_KEYS: tl.constexpr, KEYS_EXACT: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """Return C and Q of an earlier block of nodes, transposed."""
    nodes = tl.arange(0, BLOCK) + before * BLOCK
    parent = tl.load(parents + nodes, mask=nodes < N, other=-2).to(tl.int32)
    own_gate = tl.load(log_decay + nodes * HV, mask=nodes < N, other=0.0).to(tl.float32)
    _, _, rows_decay = walk_to_roots(parents, log_decay, nodes, parent, own_gate, HV, NODES)
    behind = (path_decay[None, :] - rows_decay[:, None]).to(tl.float32)
    marked = has_bit(low, high, nodes, NODES)
    rows = load_rows(key, key_stride, nodes, nodes < N, K, KP)
    factor = tl.full([BLOCK], 1.0, tl.float32)
    if L2NORM and not RAW_KEYS:
        power, rest = norm_factors(rows)
        factor = power * rest
    marked = marked & (factor > 0.0)[:, None] & (keys_factor > 0.0)[None, :]
    decay = tl.exp(tl.minimum(behind, 0.0))
    return coefficients(rows, factor, keys, keys_factor, queries, decay, marked, KEYS_EXACT, KEYS_EXACT, FLOAT32)


@triton.jit
def prefix_chunk(
    keys, keys_factor, queries, present, path_decay, prefix_key, prefix_log_decay, prefix_mask, chunk, nodes, P,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, KEYS_EXACT: tl.constexpr,
    PREFIX_EXACT: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """Return C and Q of 16 rows of the prefix, transposed, the log decays with them, and which rows a node sees.

    The log decays behind a row are summed as such, shifted by one row, in numbers of one sign.
    """
    rows = tl.arange(0, BLOCK) + chunk * BLOCK
    after = rows + 1
    within = (after < chunk * BLOCK + BLOCK) & (after < P)
    mask = prefix_mask + nodes[None, :] * P
    marked = tl.load(mask + rows[:, None], mask=(rows < P)[:, None] & present[None, :], other=0) != 0
    marked_after = tl.load(mask + after[:, None], mask=within[:, None] & present[None, :], other=0) != 0
    gate = tl.load(prefix_log_decay + rows * HV, mask=rows < P, other=0.0).to(tl.float32)
    gate_after = tl.load(prefix_log_decay + after * HV, mask=within, other=0.0).to(tl.float32)
    behind = tl.cumsum(tl.where(marked_after, gate_after[:, None], 0.0), 0, reverse=True)
    decay = tl.exp(behind + path_decay.to(tl.float32)[None, :])
    path_decay += tl.sum(tl.where(marked, gate[:, None], 0.0), 0).to(tl.float64)
    seen = tl.max(marked.to(tl.int32), 1) != 0
    prefix_keys = load_rows(prefix_key, HK * K, rows, seen, K, KP)
    ones = tl.full([BLOCK], 1.0, tl.float32)
    marked = marked & (keys_factor > 0.0)[None, :]
    for_keys, for_queries = coefficients(
        prefix_keys, ones, keys, keys_factor, queries, decay, marked, PREFIX_EXACT, KEYS_EXACT, FLOAT32
    )
    return for_keys, for_queries, path_decay, seen


@triton.jit
def ring_chunk(products, for_queries, keys_factor, present, path_decay, gate, known):
    """Return C and Q of known rows that every node follows, transposed, and the log decays with them.

    Takes the products of those rows with keys and queries. Rows that are not known may hold anything.
    """
    gate = tl.where(known, gate, 0.0)
    decay = tl.exp(sum_after(gate)[:, None] + path_decay.to(tl.float32)[None, :])
    marked = (present & (keys_factor > 0.0))[None, :] & known[:, None]
    for_keys = tl.where(marked, _finite(products) * (decay * keys_factor[None, :]), 0.0)
    for_queries = tl.where(marked, _finite(for_queries) * decay, 0.0)
    return for_keys, for_queries, path_decay + tl.sum(gate, 0).to(tl.float64)


@triton.jit
def _load_nodes(
    value, query, key, log_decay, beta, parents, nodes, columns, inside, N, value_stride, query_stride, key_stride,
    HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Load all that nodes bring along."""
    within = nodes < N
    keys = load_rows(key, key_stride, nodes, within, K, KP)
    queries = load_rows(query, query_stride, nodes, within, K, KP)
    place = value + nodes[:, None] * value_stride + columns[None, :]
    values = tl.load(place, mask=within[:, None] & inside, other=0.0).to(tl.float32)
    strength = tl.load(beta + nodes * HV, mask=within, other=0.0).to(tl.float32)
    parent = tl.load(parents + nodes, mask=within, other=-2).to(tl.int32)
    gate = tl.load(log_decay + nodes * HV, mask=within, other=0.0).to(tl.float32)
    return keys, queries, values, strength, parent, gate


@triton.jit(do_not_specialize=["N", "P", "LAST", "SCRATCH"])
def tree_solve_kernel(
    value, query, key, log_decay, beta, state, slots, parents, prefix_value, prefix_key, prefix_log_decay, prefix_mask,
    ring_value, ring_key, ring_log_decay, num_known, last_key, last_log_decay, path, path_length,
    known_after, output, pseudo_value, key_as_used, path_log_decay,
    N, P, LAST, SCRATCH, scale, value_stride, query_stride, key_stride, last_key_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, COLUMNS: tl.constexpr,
    NODES: tl.constexpr, CHUNKS: tl.constexpr, RING: tl.constexpr, HAS_SLOTS: tl.constexpr, L2NORM: tl.constexpr,
    RAW_KEYS: tl.constexpr, KEYS_EXACT: tl.constexpr, PREFIX_EXACT: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """Solve a tree for a tile of value columns of one value head and row, reading the tile of the state once.

    With `RAW_KEYS` this is a verification behind a ring of known rows and an accepted path, which the ring takes in.
    Where the path does not fit, the state takes in both instead. Pseudo-values are kept for the keys as given, in a
    scratch that until then holds those of the last tree. Otherwise the rows of a prefix are known, each to the nodes
    that its mask names.
    """
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    scale = tl.cast(scale, tl.float32)  # Inductor hands numbers over in float64
    key_head = head // (HV // HK)
    BLOCKS: tl.constexpr = NODES // BLOCK
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = (columns < V)[None, :]
    i = tl.arange(0, BLOCK)
    k = tl.arange(0, KP)
    slot = row
    width = V
    if HAS_SLOTS:
        slot = tl.load(slots + row).to(tl.int32)
        width = tl.where(slot >= 0, V, 0)  # a row without a slot has a state of zeros
    in_state = (columns < width)[None, :] & (k < K)[:, None]
    state_place = state + (slot.to(tl.int64) * HV + head) * (K * V) + k[:, None] * V + columns[None, :]
    state_tile = tl.load(state_place, mask=in_state, other=0.0).to(tl.float32)

    value += row.to(tl.int64) * N * value_stride + head * V
    key += row.to(tl.int64) * N * key_stride + key_head * K
    query += row.to(tl.int64) * N * query_stride + key_head * K
    output += (row.to(tl.int64) * N * HV + head) * V
    pseudo_value += (row.to(tl.int64) * SCRATCH * HV + head) * V
    parents += row * N
    log_decay += row * N * HV + head
    beta += row * N * HV + head

    raw_keys, raw_queries, values, strength, parent, own_gate = _load_nodes(
        value, query, key, log_decay, beta, parents, i, columns, inside, N,
        value_stride, query_stride, key_stride, HV, K, KP,
    )  # fmt: skip
    if RAW_KEYS:
        known, num_rows = count_rows(num_known + row, path_length + row, RING, LAST)
        path += row * LAST
        path_nodes = load_path(path, LAST)
        ring_value += (row.to(tl.int64) * RING * HV + head) * V
        ring_key += (row.to(tl.int64) * RING * HK + key_head) * K
        ring_log_decay += row * RING * HV + head
        last_key += row.to(tl.int64) * LAST * last_key_stride + key_head * K
        last_log_decay += row * LAST * HV + head
        if (tile == 0) & (head == 0):
            tl.store(known_after + row, tl.where(num_rows <= RING, num_rows, 0))
        rows, in_ring, on_path, node = locate_known_rows(path_nodes, known, num_rows)
        known_values = load_known_values(ring_value, pseudo_value, rows, in_ring, on_path, node, columns, inside, HV, V)
        if num_rows > RING:
            fold(
                state + (slot.to(tl.int64) * HV + head) * (K * V), ring_value, ring_key, ring_log_decay,
                pseudo_value, last_key, last_log_decay, path, known, num_rows, last_key_stride, columns,
                (columns < width)[None, :], HK, HV, K, V, KEYS_EXACT, FLOAT32,
            )  # fmt: skip
            state_tile = tl.load(state_place, mask=in_state, other=0.0).to(tl.float32)
        else:
            place = ring_value + rows[:, None] * (HV * V) + columns[None, :]
            tl.store(place, known_values, mask=on_path[:, None] & inside)
        tl.debug_barrier()  # the last tree's rows have been read: the scratch may be written

    square = tl.zeros([BLOCK, BLOCK], tl.float32)
    for block in range(BLOCKS):
        nodes = i + block * BLOCK
        if BLOCKS > 1:
            raw_keys, raw_queries, values, strength, parent, own_gate = _load_nodes(
                value, query, key, log_decay, beta, parents, nodes, columns, inside, N,
                value_stride, query_stride, key_stride, HV, K, KP,
            )  # fmt: skip
        keys = raw_keys
        queries = raw_queries
        low, high, path_decay = walk_to_roots(parents, log_decay, nodes, parent, own_gate, HV, NODES)
        present = parent != -2
        strength = tl.where(present, strength, 0.0)
        keys_rest = tl.full([BLOCK], 1.0, tl.float32)
        keys_power, queries_rest, queries_power = keys_rest, keys_rest, keys_rest
        scaled_keys = keys
        scaled_queries = queries
        if L2NORM:
            keys_power, keys_rest = norm_factors(keys)
            queries_power, queries_rest = norm_factors(queries)
            scaled_keys = scale_rows(keys, keys_power)
            scaled_queries = scale_rows(queries, queries_power)
            keys_rest = tl.where(present, keys_rest, 0.0)
            keys_power = tl.where(present, keys_power, 0.0)
        queries_rest = queries_rest * scale
        keys_factor = keys_rest
        queries_factor = queries_rest
        if KEYS_EXACT:
            keys = scaled_keys
            queries = scaled_queries
        else:  # scaled ones are float32, and products of float16 are precise
            keys_factor = keys_rest * keys_power
            queries_factor = queries_rest * queries_power
        products = dot_split(keys, tl.trans(keys), square, KEYS_EXACT, KEYS_EXACT, FLOAT32)
        for_queries = dot_split(keys, tl.trans(queries), square, KEYS_EXACT, KEYS_EXACT, FLOAT32)
        solution, mix = own_block(
            products, for_queries, keys_factor, low, high, path_decay, strength, block * BLOCK, NODES, FLOAT32
        )
        solution = tl.trans(solution)
        mix = tl.trans(mix)

        known_to_keys = tl.zeros([BLOCK, COLUMNS], tl.float32)
        known_to_queries = tl.zeros([BLOCK, COLUMNS], tl.float32)
        for before in range(block - 1, -1, -1):
            for_keys, for_queries = block_before(
                keys, keys_factor, queries, low, high, path_decay, key, log_decay, parents, before, N,
                key_stride, HV, K, KP, NODES, L2NORM, RAW_KEYS, KEYS_EXACT, FLOAT32,
            )  # fmt: skip
            for_keys = tl.trans(for_keys)
            for_queries = tl.trans(for_queries)
            solved_before = tl.load(
                pseudo_value + (i + before * BLOCK)[:, None] * (HV * V) + columns[None, :], mask=inside, other=0.0
            )
            known_to_keys = dot_split(for_keys, solved_before, known_to_keys, False, False, FLOAT32)
            known_to_queries = dot_split(for_queries, solved_before, known_to_queries, False, False, FLOAT32)
        if RAW_KEYS:
            if num_rows <= RING:
                known_keys = load_known_keys(
                    rows, in_ring, on_path, node, ring_key, last_key, last_key_stride, HK, K, KP
                )
                gate = load_known_gates(ring_log_decay, last_log_decay, rows, in_ring, on_path, node, HV)
                if (block == 0) & (tile == 0):
                    tl.store(ring_log_decay + rows * HV, gate, mask=on_path)
                    if head % (HV // HK) == 0:
                        place = ring_key + rows[:, None] * (HK * K) + k[None, :]
                        tl.store(place, known_keys, mask=on_path[:, None] & (k < K)[None, :])
                products = dot_split(known_keys, tl.trans(keys), square, KEYS_EXACT, KEYS_EXACT, FLOAT32)
                for_queries = dot_split(known_keys, tl.trans(queries), square, KEYS_EXACT, KEYS_EXACT, FLOAT32)
                for_keys, for_queries, path_decay = ring_chunk(
                    products, for_queries, keys_factor, present, path_decay, gate, in_ring | on_path
                )
                for_keys = tl.trans(for_keys)
                for_queries = tl.trans(for_queries)
                known_to_keys = dot_split(for_keys, known_values, known_to_keys, False, False, FLOAT32)
                known_to_queries = dot_split(for_queries, known_values, known_to_queries, False, False, FLOAT32)
        else:
            for chunk in range(CHUNKS - 1, -1, -1):
                for_keys, for_queries, path_decay, seen = prefix_chunk(
                    keys, keys_factor, queries, present, path_decay,
                    prefix_key + (row * P * HK + key_head).to(tl.int64) * K, prefix_log_decay + row * P * HV + head,
                    prefix_mask + row * N * P, chunk, nodes, P, HK, HV, K, KP, KEYS_EXACT, PREFIX_EXACT, FLOAT32,
                )  # fmt: skip
                for_keys = tl.trans(for_keys)
                for_queries = tl.trans(for_queries)
                rows = i + chunk * BLOCK
                # What no node sees may be anything, also not a number.
                known_values = tl.load(
                    prefix_value + ((row * P + rows[:, None]) * HV + head).to(tl.int64) * V + columns[None, :],
                    mask=(seen & (rows < P))[:, None] & inside, other=0.0,
                ).to(tl.float32)  # fmt: skip
                known_to_keys = dot_split(for_keys, known_values, known_to_keys, False, False, FLOAT32)
                known_to_queries = dot_split(for_queries, known_values, known_to_queries, False, False, FLOAT32)

        path_decay = path_decay.to(tl.float32)
        decay = tl.exp(path_decay)
        zeros = tl.zeros([BLOCK, COLUMNS], tl.float32)
        read_by_keys = dot_split(scaled_keys, state_tile, zeros, KEYS_EXACT, False, FLOAT32)
        read_by_queries = dot_split(scaled_queries, state_tile, zeros, KEYS_EXACT, False, FLOAT32)
        read_by_keys = tl.where((keys_rest > 0.0)[:, None], read_by_keys * (decay * keys_rest)[:, None], 0.0)
        left = values - known_to_keys - read_by_keys
        left = tl.where(present[:, None], left, 0.0)  # inputs and state of padding may be anything
        # The diagonal is the greatest part, and precise.
        solved = dot_split(solution, left, left * strength[:, None], False, False, FLOAT32)
        result = dot_split(mix, left, known_to_queries, False, False, FLOAT32)
        result = result * queries_factor[:, None] + read_by_queries * (decay * queries_rest)[:, None]
        result = tl.where((present & (queries_rest != 0.0))[:, None], result, 0.0)
        if RAW_KEYS:
            solved = solved * (keys_rest * keys_power)[:, None]
        place = nodes[:, None] * (HV * V) + columns[None, :]
        tl.store(output + place, result.to(output.dtype.element_ty), mask=(nodes < N)[:, None] & inside)
        tl.store(pseudo_value + place, solved, mask=(nodes < N)[:, None] & inside)
        if BLOCKS > 1:
            tl.debug_barrier()  # later blocks read these pseudo-values
        if not RAW_KEYS:
            if tile == 0:
                tl.store(path_log_decay + (row * N + nodes) * HV + head, path_decay, mask=nodes < N)
                if head % (HV // HK) == 0:
                    key_place = key_as_used + ((row * N + nodes[:, None]) * HK + key_head).to(tl.int64) * K + k[None, :]
                    used = tl.where(present[:, None], scaled_keys.to(tl.float32) * keys_rest[:, None], 0.0)
                    tl.store(key_place, used, mask=(nodes < N)[:, None] & (k < K)[None, :])
