"""The tables of a tree, for a pass over the states that finds them ready (`_pass_kernel.py`).

Of a value head, a row of the batch and a block of 16 nodes, as [j, i] in halves for tensor cores:

    C, D    what known row j, or node j of an earlier block, adds to the keys and to the queries of node i
    T       what the part of node j that no known row explains adds to the pseudo-value of node i, without the diagonal
    M       what it adds to the output of node i

and of a key head, keys and queries scaled by powers of two. See `_solve_kernel.py` for the equations.

Behind a ring, the programs also put the path that was accepted in the last tree where it belongs: those of the tables
hold its keys and gates in any case, and the states are not read before the next launch. With few rows there are further
programs for no more than this. With many these would take a quarter of the time of a multiprocessor, most of it waiting
for one load.
"""

# mypy: ignore-errors
# The language of kernels has no types.

import triton
import triton.language as tl

from treewy.ops._kernel_math import (
    BLOCK,
    diagonal,
    dot_split,
    halves,
    load_rows,
    norm_factors,
    scale_rows,
    split,
    split_factor,
    walk_to_roots,
)
from treewy.ops._ring_kernel import count_rows, fold, load_known_gates, load_known_keys, load_path, locate_known_rows
from treewy.ops._solve_kernel import block_before, own_block, prefix_chunk, ring_chunk


@triton.jit
def _store_rows(place, rows, KP: tl.constexpr, EXACT: tl.constexpr, FLOAT32: tl.constexpr):
    """Store keys or queries as halves; exact ones have one."""
    high, low = halves(rows, EXACT, FLOAT32)
    tl.store(place, high)
    if not (EXACT or FLOAT32):
        tl.store(place + BLOCK * KP, low)


@triton.jit
def _store_table(place, size, table, FLOAT32: tl.constexpr):
    """Store a table as halves, `size` numbers apart."""
    high, low = split(table, FLOAT32)
    tl.store(place, high)
    if not FLOAT32:
        tl.store(place + size, low)


@triton.jit
def _write_keys(
    key, present, power, rest, scaled_keys, key_as_used, nodes, N, key_stride,
    HK: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L2NORM: tl.constexpr, RAW_KEYS: tl.constexpr,
    KEYS_EXACT: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """Write a block's keys scaled by powers of two; without `RAW_KEYS` also as used."""
    k = tl.arange(0, KP)
    keys = load_rows(key, key_stride, nodes, present, K, KP)
    if L2NORM:
        keys = scale_rows(keys, power)
    place = scaled_keys + tl.arange(0, BLOCK)[:, None] * KP + k[None, :]
    _store_rows(place, keys, KP, KEYS_EXACT, FLOAT32)
    if not RAW_KEYS:
        used = keys.to(tl.float32) * rest[:, None]
        used_place = key_as_used + nodes[:, None] * (HK * K) + k[None, :]
        tl.store(used_place, used, mask=(nodes < N)[:, None] & (k < K)[None, :])


@triton.jit
def _write_queries(
    query, present, scale, scaled_queries, row_factors, nodes, query_stride,
    K: tl.constexpr, KP: tl.constexpr, L2NORM: tl.constexpr, KEYS_EXACT: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """Write a block's queries scaled by powers of two, and their factors: what is left, and all."""
    i = tl.arange(0, BLOCK)
    queries = load_rows(query, query_stride, nodes, present, K, KP)
    rest = tl.full([BLOCK], 1.0, tl.float32)
    power = rest
    if L2NORM:
        power, rest = norm_factors(queries)
        queries = scale_rows(queries, power)
    tl.store(row_factors + i, rest * scale)
    tl.store(row_factors + BLOCK + i, rest * power * scale)
    place = scaled_queries + i[:, None] * KP + tl.arange(0, KP)[None, :]
    _store_rows(place, queries, KP, KEYS_EXACT, FLOAT32)


@triton.jit
def _take_path(
    part, row, head, state, slots, ring_value, ring_key, ring_log_decay, last_value, last_key, last_log_decay,
    path, path_nodes, known, num_rows, P, last_key_stride, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, HAS_SLOTS: tl.constexpr, KEYS_EXACT: tl.constexpr,
    FLOAT32: tl.constexpr,
):  # fmt: skip
    """Append the path's pseudo-values to the ring, or fold ring and path into the state, by parts of the columns."""
    slot = row
    width = V
    if HAS_SLOTS:
        slot = tl.load(slots + row).to(tl.int32)
        width = tl.where(slot >= 0, V, 0)  # a row without a slot has no state to write
    state += (slot.to(tl.int64) * HV + head) * (K * V)
    WIDTH: tl.constexpr = 2 * COLUMNS if V > COLUMNS else COLUMNS  # a copy needs fewer registers than a fold
    if num_rows <= P:
        rows, _, on_path, node = locate_known_rows(path_nodes, known, num_rows)
        for first in range(part * WIDTH, V, PARTS * WIDTH):
            columns = first + tl.arange(0, WIDTH)
            appended = on_path[:, None] & (columns < V)[None, :]
            values = tl.load(last_value + node[:, None] * (HV * V) + columns[None, :], mask=appended, other=0.0)
            tl.store(ring_value + rows[:, None] * (HV * V) + columns[None, :], values, mask=appended)
    else:
        for first in range(part * COLUMNS, V, PARTS * COLUMNS):
            columns = first + tl.arange(0, COLUMNS)
            fold(
                state, ring_value, ring_key, ring_log_decay, last_value, last_key, last_log_decay, path, known,
                num_rows, last_key_stride, columns, (columns < width)[None, :], HK, HV, K, V, KEYS_EXACT, FLOAT32,
            )  # fmt: skip


@triton.jit
def _write_tables(
    block, head, row, query, key, log_decay, beta, parents, prefix_key, prefix_log_decay, prefix_mask,
    last_key, last_log_decay, path_nodes, num_known, num_rows,
    scaled_rows, row_factors, tables, factors, key_as_used, path_log_decay,
    N, P, scale, query_stride, key_stride, last_key_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    NODES: tl.constexpr, KNOWN: tl.constexpr, L2NORM: tl.constexpr, RAW_KEYS: tl.constexpr,
    KEYS_EXACT: tl.constexpr, PREFIX_EXACT: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """Write what the pass needs of a block of nodes and a value head; append keys and gates of the path to the ring."""
    BLOCKS: tl.constexpr = NODES // BLOCK
    HALVES: tl.constexpr = 1 if FLOAT32 else 2
    ROW_HALVES: tl.constexpr = 1 if KEYS_EXACT or FLOAT32 else 2
    TABLE: tl.constexpr = (KNOWN + NODES) * BLOCK
    key_head = head // (HV // HK)
    i = tl.arange(0, BLOCK)
    k = tl.arange(0, KP)
    nodes = i + block * BLOCK
    parents += row * N
    log_decay += row * N * HV + head
    beta += row * N * HV + head
    key += row.to(tl.int64) * N * key_stride + key_head * K
    query += row.to(tl.int64) * N * query_stride + key_head * K
    keys = load_rows(key, key_stride, nodes, nodes < N, K, KP)
    queries = load_rows(query, query_stride, nodes, nodes < N, K, KP)
    parent = tl.load(parents + nodes, mask=nodes < N, other=-2).to(tl.int32)
    present = parent != -2
    own_gate = tl.load(log_decay + nodes * HV, mask=nodes < N, other=0.0).to(tl.float32)
    strength = tl.load(beta + nodes * HV, mask=nodes < N, other=0.0).to(tl.float32)
    strength = tl.where(present, strength, 0.0)
    zeros = tl.zeros([BLOCK, BLOCK], tl.float32)
    if RAW_KEYS:
        taken = num_rows <= P  # or the state takes all in, and nothing is known
        rows, in_ring, on_path, node = locate_known_rows(
            path_nodes, tl.where(taken, num_known, 0), tl.where(taken, num_rows, 0)
        )
    products = dot_split(keys, tl.trans(keys), zeros, KEYS_EXACT, KEYS_EXACT, FLOAT32)
    if RAW_KEYS:
        # All that is wide comes first, and is let go: registers.
        known_keys = load_known_keys(rows, in_ring, on_path, node, prefix_key, last_key, last_key_stride, HK, K, KP)
        known_products = dot_split(known_keys, tl.trans(keys), zeros, KEYS_EXACT, KEYS_EXACT, FLOAT32)
        known_for_queries = dot_split(known_keys, tl.trans(queries), zeros, KEYS_EXACT, KEYS_EXACT, FLOAT32)
        if (block == 0) & (head % (HV // HK) == 0):
            known_place = prefix_key + rows[:, None] * (HK * K) + k[None, :]
            tl.store(known_place, known_keys, mask=on_path[:, None] & (k < K)[None, :])
    for_queries = dot_split(keys, tl.trans(queries), zeros, KEYS_EXACT, KEYS_EXACT, FLOAT32)
    keys_rest = tl.full([BLOCK], 1.0, tl.float32)
    keys_power = keys_rest
    if L2NORM:
        keys_power, keys_rest = split_factor(tl.math.rsqrt(diagonal(products) + 1e-6))
    keys_power = tl.where(present, keys_power, 0.0)  # whatever padding holds
    keys_rest = tl.where(present, keys_rest, 0.0)
    keys_factor = keys_power * keys_rest
    kept = tl.full([BLOCK], 1.0, tl.float32)
    if RAW_KEYS:
        kept = keys_factor

    unit = ((row * HV + head) * BLOCKS + block).to(tl.int64)
    table = tables + unit * (2 * HALVES * TABLE) + i[:, None] * BLOCK + i[None, :]
    own_factors = factors + unit * (4 * BLOCK + KNOWN) + i
    if RAW_KEYS:
        gate = load_known_gates(prefix_log_decay, last_log_decay, rows, in_ring, on_path, node, HV)
    low, high, path_decay = walk_to_roots(parents, log_decay, nodes, parent, own_gate, HV, NODES)
    solution, mix = own_block(
        products, for_queries, keys_factor, low, high, path_decay, strength, block * BLOCK, NODES, FLOAT32
    )
    own = table + (KNOWN + block * BLOCK) * BLOCK
    _store_table(own, TABLE, solution * kept[None, :], FLOAT32)
    _store_table(own + HALVES * TABLE, TABLE, mix, FLOAT32)
    total_decay = path_decay
    if RAW_KEYS:
        to_keys, to_queries, total_decay = ring_chunk(
            known_products, known_for_queries, keys_factor, present, path_decay, gate, in_ring | on_path
        )
        _store_table(table, TABLE, to_keys, FLOAT32)
        _store_table(table + HALVES * TABLE, TABLE, to_queries, FLOAT32)
        tl.store(own_factors + 4 * BLOCK, (in_ring | on_path).to(tl.float32))
        if block == 0:
            tl.store(prefix_log_decay + rows * HV, gate, mask=on_path)
    else:
        for chunk in range(KNOWN // BLOCK - 1, -1, -1):
            to_keys, to_queries, total_decay, seen = prefix_chunk(
                keys, keys_factor, queries, present, total_decay, prefix_key, prefix_log_decay,
                prefix_mask + row * N * P, chunk, nodes, P, HK, HV, K, KP, KEYS_EXACT, PREFIX_EXACT, FLOAT32,
            )  # fmt: skip
            known_rows = table + chunk * (BLOCK * BLOCK)
            _store_table(known_rows, TABLE, to_keys, FLOAT32)
            _store_table(known_rows + HALVES * TABLE, TABLE, to_queries, FLOAT32)
            tl.store(own_factors + (4 + chunk) * BLOCK, seen.to(tl.float32))
        path_place = path_log_decay + (row * N + nodes) * HV + head
        tl.store(path_place, total_decay.to(tl.float32), mask=nodes < N)
    if BLOCKS > 1:
        for before in range(block - 1, -1, -1):
            # Again, from the nearest cache: held until here they cost too many registers.
            own_keys = load_rows(key, key_stride, nodes, nodes < N, K, KP)
            own_queries = load_rows(query, query_stride, nodes, nodes < N, K, KP)
            to_keys, to_queries = block_before(
                own_keys, keys_factor, own_queries, low, high, path_decay, key, log_decay, parents, before, N,
                key_stride, HV, K, KP, NODES, L2NORM, RAW_KEYS, KEYS_EXACT, FLOAT32,
            )  # fmt: skip
            earlier = table + (KNOWN + before * BLOCK) * BLOCK
            _store_table(earlier, TABLE, to_keys, FLOAT32)
            _store_table(earlier + HALVES * TABLE, TABLE, to_queries, FLOAT32)
    decay = tl.exp(total_decay.to(tl.float32))
    tl.store(own_factors, decay * keys_rest)
    tl.store(own_factors + BLOCK, decay)
    tl.store(own_factors + 2 * BLOCK, strength * kept)
    tl.store(own_factors + 3 * BLOCK, present.to(tl.float32))
    key_part = (row * HK + key_head) * BLOCKS + block
    scaled_rows += key_part.to(tl.int64) * (2 * ROW_HALVES * BLOCK * KP)
    # Shared between the first and the last program of a key head.
    if head % (HV // HK) == 0:
        _write_keys(
            key, present, keys_power, keys_rest, scaled_rows, key_as_used + (row.to(tl.int64) * N * HK + key_head) * K,
            nodes, N, key_stride, HK, K, KP, L2NORM, RAW_KEYS, KEYS_EXACT, FLOAT32,
        )  # fmt: skip
    if (head + 1) % (HV // HK) == 0:
        _write_queries(
            query, present, scale, scaled_rows + ROW_HALVES * BLOCK * KP, row_factors + key_part * (2 * BLOCK),
            nodes, query_stride, K, KP, L2NORM, KEYS_EXACT, FLOAT32,
        )  # fmt: skip


@triton.jit(do_not_specialize=["N", "P", "LAST", "SCRATCH"])
def tree_tables_kernel(
    query, key, log_decay, beta, parents, prefix_key, prefix_log_decay, prefix_mask,
    state, slots, ring_value, num_known, last_value, last_key, last_log_decay, path, path_length, known_after,
    scaled_rows, row_factors, tables, factors, key_as_used, path_log_decay,
    N, P, LAST, SCRATCH, scale, query_stride, key_stride, last_key_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    NODES: tl.constexpr, KNOWN: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    HAS_SLOTS: tl.constexpr, L2NORM: tl.constexpr, RAW_KEYS: tl.constexpr, KEYS_EXACT: tl.constexpr,
    PREFIX_EXACT: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """Write the tables of a block of nodes and a value head, for a row of the batch.

    With `RAW_KEYS` the known rows are those of a ring and of an accepted path, which the ring takes in. Where the path
    does not fit, the state takes in both, and no row is known; the programs of a head share the columns of its state,
    and there may be more of them than blocks. Otherwise the known rows are those of a prefix, by its mask.
    """
    BLOCKS: tl.constexpr = NODES // BLOCK
    part, head, row = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS, tl.program_id(1)
    scale = tl.cast(scale, tl.float32)  # Inductor hands numbers over in float64
    key_head = head // (HV // HK)
    path += row * LAST
    path_nodes = tl.zeros([BLOCK], tl.int32)
    known = 0
    num_rows = 0
    if RAW_KEYS:
        path_nodes = load_path(path, LAST)
        known, num_rows = count_rows(num_known + row, path_length + row, P, LAST)
        ring_value += (row.to(tl.int64) * P * HV + head) * V
        last_value += (row.to(tl.int64) * SCRATCH * HV + head) * V
        last_key += row.to(tl.int64) * LAST * last_key_stride + key_head * K
        last_log_decay += row * LAST * HV + head
        if (head == 0) & (part == 0):
            tl.store(known_after + row, tl.where(num_rows <= P, num_rows, 0))
    prefix_key += (row.to(tl.int64) * P * HK + key_head) * K
    prefix_log_decay += row * P * HV + head
    if part < BLOCKS:
        _write_tables(
            part, head, row, query, key, log_decay, beta, parents, prefix_key, prefix_log_decay, prefix_mask,
            last_key, last_log_decay, path_nodes, known, num_rows,
            scaled_rows, row_factors, tables, factors, key_as_used, path_log_decay,
            N, P, scale, query_stride, key_stride, last_key_stride,
            HK, HV, K, V, KP, NODES, KNOWN, L2NORM, RAW_KEYS, KEYS_EXACT, PREFIX_EXACT, FLOAT32,
        )  # fmt: skip
    if RAW_KEYS:
        _take_path(
            part, row, head, state, slots, ring_value, prefix_key, prefix_log_decay, last_value, last_key,
            last_log_decay, path, path_nodes, known, num_rows, P, last_key_stride,
            HK, HV, K, V, COLUMNS, PARTS, HAS_SLOTS, KEYS_EXACT, FLOAT32,
        )  # fmt: skip
