"""The solve of a tree for many programs: tables first, then a pass over the states that finds them ready.

See `_solve_kernel.py` for the tables, and for the same in one launch.
"""

# mypy: ignore-errors
# The language of kernels has no types.

import triton
import triton.language as tl

from treewy.ops._kernel_math import (
    BLOCK,
    dot_halves,
    dot_split,
    halves,
    load_rows,
    norm_factors,
    scale_rows,
    split,
    split_half,
    walk_to_roots,
)
from treewy.ops._solve_kernel import block_before, own_block, prefix_chunk, ring_chunk


@triton.jit
def _scale_block(
    query, key, parents, scaled_rows, row_factors, key_as_used, nodes, N, scale, query_stride, key_stride,
    HK: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, L2NORM: tl.constexpr, RAW_KEYS: tl.constexpr,
):  # fmt: skip
    """Write keys and queries of a block scaled by powers of two, and the factors that are left."""
    i = tl.arange(0, BLOCK)
    k = tl.arange(0, KP)
    present = tl.load(parents + nodes, mask=nodes < N, other=-2)[:, None] != -2
    keys = tl.where(present, load_rows(key, key_stride, nodes, nodes < N, K, KP), 0.0)
    queries = tl.where(present, load_rows(query, query_stride, nodes, nodes < N, K, KP), 0.0)
    keys_rest = tl.full([BLOCK], 1.0, tl.float32)
    keys_power, queries_rest, queries_power = keys_rest, keys_rest, keys_rest
    if L2NORM:
        keys_power, keys_rest = norm_factors(keys)
        queries_power, queries_rest = norm_factors(queries)
        keys = scale_rows(keys, keys_power)
        queries = scale_rows(queries, queries_power)
    place = scaled_rows + i[:, None] * KP + k[None, :]
    tl.store(place, keys)
    tl.store(place + BLOCK * KP, queries)
    queries_rest = queries_rest * scale
    tl.store(row_factors + i, 2.0 * keys_rest)  # the pass reads half the state
    tl.store(row_factors + BLOCK + i, 2.0 * queries_rest)
    tl.store(row_factors + 2 * BLOCK + i, queries_rest * queries_power)
    if RAW_KEYS:
        tl.store(row_factors + 3 * BLOCK + i, keys_rest * keys_power)
    else:
        tl.store(row_factors + 3 * BLOCK + i, tl.full([BLOCK], 1.0, tl.float32))
        used = keys.to(tl.float32) * keys_rest[:, None]
        place = key_as_used + nodes[:, None] * (HK * K) + k[None, :]
        tl.store(place, used, mask=(nodes < N)[:, None] & (k < K)[None, :])


@triton.jit
def _write_tables(
    block, head, row, query, key, log_decay, beta, parents, prefix_key, prefix_log_decay, prefix_mask,
    num_known, tables, factors, path_log_decay, N, P, query_stride, key_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, NODES: tl.constexpr, CHUNKS: tl.constexpr,
    L2NORM: tl.constexpr, RAW_KEYS: tl.constexpr, KEYS_EXACT: tl.constexpr, PREFIX_EXACT: tl.constexpr,
    FLOAT32: tl.constexpr,
):  # fmt: skip
    """Write the tables of one block of nodes, for a value head and a row of the batch."""
    BLOCKS: tl.constexpr = NODES // BLOCK
    i = tl.arange(0, BLOCK)
    nodes = i + block * BLOCK
    key_head = head // (HV // HK)
    parents += row * N
    log_decay += row * N * HV + head
    key += row.to(tl.int64) * N * key_stride + key_head * K
    query += row.to(tl.int64) * N * query_stride + key_head * K
    program = ((row * HV + head) * BLOCKS + block).to(tl.int64)
    tables += program * ((CHUNKS + BLOCKS) * 2 * BLOCK * BLOCK) + i[None, :] * BLOCK + i[:, None]
    factors += program * (4 * BLOCK) + i
    keys = load_rows(key, key_stride, nodes, nodes < N, K, KP)
    queries = load_rows(query, query_stride, nodes, nodes < N, K, KP)
    strength = tl.load(beta + (row * N + nodes) * HV + head, mask=nodes < N, other=0.0).to(tl.float32)
    known = i < 0
    if RAW_KEYS:
        known = i < tl.load(num_known + row).to(tl.int32)
        known_keys = load_rows(prefix_key + (row * P * HK + key_head).to(tl.int64) * K, HK * K, i, i < P, K, KP)
        known_gate = tl.load(prefix_log_decay + (row * P + i) * HV + head, mask=i < P, other=0.0).to(tl.float32)
    low, high, path_decay, depth = walk_to_roots(parents, log_decay, nodes, block * BLOCK, N, HV, NODES)
    present = depth >= 0
    strength = tl.where(present, strength, 0.0)
    ones = tl.full([BLOCK], 1.0, tl.float32)
    solution, mix, inverse_norm = own_block(
        keys, ones, queries, low, high, path_decay, depth, strength, block * BLOCK, NODES, L2NORM, KEYS_EXACT, FLOAT32
    )
    own = tables + (CHUNKS + block) * (2 * BLOCK * BLOCK)
    tl.store(own, solution)
    tl.store(own + BLOCK * BLOCK, mix)
    if BLOCKS > 1:
        for before in range(block - 1, -1, -1):
            for_keys, for_queries = block_before(
                keys, inverse_norm, queries, low, high, path_decay, key, log_decay, parents, before, N,
                key_stride, HV, K, KP, NODES, L2NORM, RAW_KEYS, KEYS_EXACT, FLOAT32,
            )  # fmt: skip
            earlier = tables + (CHUNKS + before) * (2 * BLOCK * BLOCK)
            tl.store(earlier, for_keys)
            tl.store(earlier + BLOCK * BLOCK, for_queries)
    if RAW_KEYS:
        for_keys, for_queries, path_decay = ring_chunk(
            keys, inverse_norm, queries, present, path_decay, known_keys, known_gate, known, KEYS_EXACT, FLOAT32
        )
        tl.store(tables, for_keys)
        tl.store(tables + BLOCK * BLOCK, for_queries)
    else:
        for chunk in range(CHUNKS - 1, -1, -1):
            for_keys, for_queries, path_decay = prefix_chunk(
                keys, inverse_norm, queries, present, path_decay,
                prefix_key + (row * P * HK + key_head).to(tl.int64) * K, prefix_log_decay + row * P * HV + head,
                prefix_mask + row * N * P, chunk, nodes, P, HK, HV, K, KP, KEYS_EXACT, PREFIX_EXACT, FLOAT32,
            )  # fmt: skip
            known_rows = tables + chunk * (2 * BLOCK * BLOCK)
            tl.store(known_rows, for_keys)
            tl.store(known_rows + BLOCK * BLOCK, for_queries)
        tl.store(path_log_decay + (row * N + nodes) * HV + head, path_decay.to(tl.float32), mask=nodes < N)
    tl.store(factors, tl.exp(path_decay.to(tl.float32)))
    tl.store(factors + BLOCK, present.to(tl.float32))
    tl.store(factors + 2 * BLOCK, known.to(tl.float32))
    tl.store(factors + 3 * BLOCK, strength)


@triton.jit(do_not_specialize=["N", "P"])
def tree_tables_kernel(
    query, key, log_decay, beta, parents, prefix_key, prefix_log_decay, prefix_mask, num_known,
    scaled_rows, row_factors, tables, factors, key_as_used, path_log_decay, N, P, scale, query_stride, key_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, NODES: tl.constexpr, CHUNKS: tl.constexpr,
    L2NORM: tl.constexpr, RAW_KEYS: tl.constexpr, KEYS_EXACT: tl.constexpr, PREFIX_EXACT: tl.constexpr,
    FLOAT32: tl.constexpr,
):  # fmt: skip
    """Write what the pass needs of one block of nodes and a row of the batch.

    A program for each value head writes the tables, and one for each key head the scaled keys and queries.
    """
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    BLOCKS: tl.constexpr = NODES // BLOCK
    i = tl.arange(0, BLOCK)
    nodes = i + block * BLOCK
    if head >= HV:
        key_head = head - HV
        part = (row * HK + key_head) * BLOCKS + block
        _scale_block(
            query + row.to(tl.int64) * N * query_stride + key_head * K,
            key + row.to(tl.int64) * N * key_stride + key_head * K, parents + row * N,
            scaled_rows + part.to(tl.int64) * (2 * BLOCK * KP), row_factors + part * (4 * BLOCK),
            key_as_used + (row.to(tl.int64) * N * HK + key_head) * K, nodes, N, scale, query_stride, key_stride,
            HK, K, KP, L2NORM, RAW_KEYS,
        )  # fmt: skip
    else:
        _write_tables(
            block, head, row, query, key, log_decay, beta, parents, prefix_key, prefix_log_decay, prefix_mask,
            num_known, tables, factors, path_log_decay, N, P, query_stride, key_stride,
            HK, HV, K, KP, NODES, CHUNKS, L2NORM, RAW_KEYS, KEYS_EXACT, PREFIX_EXACT, FLOAT32,
        )  # fmt: skip


@triton.jit(do_not_specialize=["N", "P", "SCRATCH", "TASKS"])
def tree_pass_kernel(
    value, state, slots, prefix_value, scaled_rows, row_factors, tables, factors, output, pseudo_value,
    N, P, SCRATCH, TASKS, value_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, COLUMNS: tl.constexpr,
    NODES: tl.constexpr, CHUNKS: tl.constexpr, RAW_KEYS: tl.constexpr, KEYS_EXACT: tl.constexpr, FLOAT32: tl.constexpr,
    HAS_SLOTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Read each tile of the states once and solve, with tables that are there.

    Programs stay and take tile after tile, so that the next tiles are on their way while one is worked on. That needs
    a loop without loops inside, and without barriers: blocks are unrolled.
    """
    BLOCKS: tl.constexpr = NODES // BLOCK
    TILES: tl.constexpr = (V + COLUMNS - 1) // COLUMNS
    TABLE: tl.constexpr = BLOCK * BLOCK
    i = tl.arange(0, BLOCK)
    k = tl.arange(0, KP)
    for task in tl.range(tl.program_id(0), TASKS, tl.num_programs(0), num_stages=STAGES):
        unit = task // TILES
        row = unit // HV
        head = unit % HV
        columns = (task % TILES) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (columns < V)[None, :]
        slot = row
        width = V
        if HAS_SLOTS:
            slot = tl.load(slots + row).to(tl.int32)
            width = tl.where(slot >= 0, V, 0)  # a row without a slot has a state of zeros
        in_state = (columns < width)[None, :] & (k < K)[:, None]
        place = state + (slot.to(tl.int64) * HV + head) * (K * V) + k[:, None] * V + columns[None, :]
        state_high, state_low = split_half(tl.load(place, mask=in_state, other=0.0).to(tl.float32), FLOAT32)
        zeros = tl.zeros([BLOCK, COLUMNS], tl.float32)
        if RAW_KEYS:
            ring_place = prefix_value + ((row * P + i[:, None]) * HV + head).to(tl.int64) * V + columns[None, :]
            known_values = tl.load(ring_place, mask=(i < P)[:, None] & inside, other=0.0)
            known = tl.load(factors + unit * BLOCKS * (4 * BLOCK) + 2 * BLOCK + i)[:, None] != 0.0
            known_high, known_low = split(tl.where(known, known_values, 0.0), FLOAT32)
        solved_before = ()
        for block in tl.static_range(BLOCKS):
            nodes = i + block * BLOCK
            part = unit * BLOCKS + block
            row_part = (row * HK + head // (HV // HK)) * BLOCKS + block
            rows_place = scaled_rows + row_part.to(tl.int64) * (2 * BLOCK * KP) + i[:, None] * KP + k[None, :]
            keys, keys_low = halves(tl.load(rows_place), KEYS_EXACT, FLOAT32)
            queries, queries_low = halves(tl.load(rows_place + BLOCK * KP), KEYS_EXACT, FLOAT32)
            value_place = value + (row * N + nodes[:, None]).to(tl.int64) * value_stride + head * V + columns[None, :]
            left = tl.load(value_place, mask=(nodes < N)[:, None] & inside, other=0.0).to(tl.float32)
            own_factors = factors + part * (4 * BLOCK) + i
            own_row_factors = row_factors + row_part * (4 * BLOCK) + i
            decay = tl.load(own_factors)
            present = tl.load(own_factors + BLOCK)[:, None] != 0.0
            strength = tl.load(own_factors + 3 * BLOCK)[:, None]
            to_state = (decay * tl.load(own_row_factors))[:, None]
            queries_to_state = (decay * tl.load(own_row_factors + BLOCK))[:, None]
            queries_factor = tl.load(own_row_factors + 2 * BLOCK)[:, None]
            kept_factor = tl.load(own_row_factors + 3 * BLOCK)[:, None]
            own = tables + part.to(tl.int64) * ((CHUNKS + BLOCKS) * 2 * TABLE) + i[:, None] * BLOCK + i[None, :]
            left -= dot_halves(keys, keys_low, state_high, state_low, zeros, KEYS_EXACT, False) * to_state
            read = dot_halves(queries, queries_low, state_high, state_low, zeros, KEYS_EXACT, False) * queries_to_state
            result = zeros
            if RAW_KEYS:
                to_keys, to_keys_low = split(tl.load(own), FLOAT32)
                to_queries, to_queries_low = split(tl.load(own + TABLE), FLOAT32)
                left -= dot_halves(to_keys, to_keys_low, known_high, known_low, zeros, False, False)
                result = dot_halves(to_queries, to_queries_low, known_high, known_low, result, False, False)
            else:
                for chunk in tl.static_range(CHUNKS):
                    to_keys = tl.load(own + chunk * 2 * TABLE)
                    to_queries = tl.load(own + (chunk * 2 + 1) * TABLE)
                    # What no node sees may be anything, also not a number.
                    marked = tl.max((to_keys != 0.0).to(tl.int32) | (to_queries != 0.0).to(tl.int32), 0) != 0
                    rows = i + chunk * BLOCK
                    rows_value = tl.load(
                        prefix_value + ((row * P + rows[:, None]) * HV + head).to(tl.int64) * V + columns[None, :],
                        mask=(marked & (rows < P))[:, None] & inside, other=0.0,
                    ).to(tl.float32)  # fmt: skip
                    left -= dot_split(to_keys, rows_value, zeros, False, False, FLOAT32)
                    result = dot_split(to_queries, rows_value, result, False, False, FLOAT32)
            for before in tl.static_range(block):
                to_keys, to_keys_low = split(tl.load(own + (CHUNKS + before) * 2 * TABLE), FLOAT32)
                to_queries, to_queries_low = split(tl.load(own + ((CHUNKS + before) * 2 + 1) * TABLE), FLOAT32)
                high = solved_before[2 * before]
                low = solved_before[2 * before + 1]
                left -= dot_halves(to_keys, to_keys_low, high, low, zeros, False, False)
                result = dot_halves(to_queries, to_queries_low, high, low, result, False, False)
            left = tl.where(present, left, 0.0)  # inputs and state of padding may be anything
            left_high, left_low = split(left, FLOAT32)
            solution, solution_low = split(tl.load(own + (CHUNKS + block) * 2 * TABLE), FLOAT32)
            mix, mix_low = split(tl.load(own + ((CHUNKS + block) * 2 + 1) * TABLE), FLOAT32)
            # The diagonal is the greatest part, and precise.
            solved = (
                dot_halves(solution, solution_low, left_high, left_low, left * strength, False, False) * kept_factor
            )
            result = dot_halves(mix, mix_low, left_high, left_low, result, False, False) * queries_factor + read
            result = tl.where(present & (queries_factor != 0.0), result, 0.0)
            solved_before = solved_before + split(solved, FLOAT32)
            output_place = output + ((row * N + nodes[:, None]) * HV + head).to(tl.int64) * V + columns[None, :]
            scratch_place = (
                pseudo_value + ((row * SCRATCH + nodes[:, None]) * HV + head).to(tl.int64) * V + columns[None, :]
            )
            tl.store(output_place, result.to(output.dtype.element_ty), mask=(nodes < N)[:, None] & inside)
            tl.store(scratch_place, solved, mask=(nodes < N)[:, None] & inside)
