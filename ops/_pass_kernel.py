"""The pass over the states: each tile of a state is read once and meets the tables of its tree.

With the tables of `_tables_kernel.py`, a block of 16 nodes i and columns v of a value head are six products, where rows
of earlier blocks are known rows:

    R[i, v] = value[i, v] - (K S)[i, v] a_i - (C known)[i, v]
    pseudo_value[i, v] = (T R)[i, v] + b_i R[i, v]
    output[i, v] = f_i (M R + D known)[i, v] + (Q S)[i, v] e_i

Nodes come before columns, though columns would suit the tall side of a tensor core: its asynchronous products wait for
each other at every step of this chain. With columns first the pass took as long for one block of nodes, and 1.4 times
as long for three.
"""

# mypy: ignore-errors
# The language of kernels has no types.

import triton
import triton.language as tl

from treewy.ops._kernel_math import BLOCK, dot_halves, split, split_state


@triton.jit
def _load_halves(place, size, HALVES: tl.constexpr):
    """Load the high and the low halves of a table, or what is whole twice."""
    high = tl.load(place)
    return high, tl.load(place + size) if HALVES == 2 else high


@triton.jit(do_not_specialize=["N", "P", "SCRATCH", "TASKS"])
def tree_pass_kernel(
    value, state, slots, known_value, scaled_rows, row_factors, tables, factors, output, pseudo_value,
    N, P, SCRATCH, TASKS, value_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, COLUMNS: tl.constexpr,
    NODES: tl.constexpr, KNOWN: tl.constexpr, KEYS_EXACT: tl.constexpr, FLOAT32: tl.constexpr,
    HAS_SLOTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Read each tile of the states once and solve, with tables that are there.

    Programs stay and take tile after tile, so that the next tiles are on their way while one is worked on. That needs
    a loop without loops inside, and without barriers: blocks are unrolled.
    """
    BLOCKS: tl.constexpr = NODES // BLOCK
    TILES: tl.constexpr = (V + COLUMNS - 1) // COLUMNS
    HALVES: tl.constexpr = 1 if FLOAT32 else 2
    ROW_HALVES: tl.constexpr = 1 if KEYS_EXACT or FLOAT32 else 2
    TABLE: tl.constexpr = (KNOWN + NODES) * BLOCK
    FACTORS: tl.constexpr = 4 * BLOCK + KNOWN
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
        state_high, state_low = split_state(tl.load(place, mask=in_state, other=0.0).to(tl.float32), FLOAT32)
        zeros = tl.zeros([BLOCK, COLUMNS], tl.float32)
        if KNOWN > 0:
            j = tl.arange(0, KNOWN)
            known_place = known_value + ((row * P + j[:, None]) * HV + head).to(tl.int64) * V + columns[None, :]
            known = tl.load(known_place, mask=(j < P)[:, None] & inside, other=0.0).to(tl.float32)
            seen = tl.zeros([KNOWN], tl.int1)
            for block in tl.static_range(BLOCKS):
                seen = seen | (tl.load(factors + (unit * BLOCKS + block) * FACTORS + 4 * BLOCK + j) != 0.0)
            # What no node sees may be anything, also not a number.
            known_high, known_low = split(tl.where(seen[:, None], known, 0.0), FLOAT32)
        solved_before = ()
        for block in tl.static_range(BLOCKS):
            nodes = i + block * BLOCK
            key_part = (row * HK + head // (HV // HK)) * BLOCKS + block
            rows_place = scaled_rows + key_part.to(tl.int64) * (2 * ROW_HALVES * BLOCK * KP)
            rows_place += i[:, None] * KP + k[None, :]
            keys, keys_low = _load_halves(rows_place, BLOCK * KP, ROW_HALVES)
            queries, queries_low = _load_halves(rows_place + ROW_HALVES * BLOCK * KP, BLOCK * KP, ROW_HALVES)
            own_factors = factors + (unit * BLOCKS + block) * FACTORS + i
            own_row_factors = row_factors + key_part * (2 * BLOCK) + i
            to_state = tl.load(own_factors)[:, None]
            queries_to_state = (tl.load(own_factors + BLOCK) * tl.load(own_row_factors))[:, None]
            strength = tl.load(own_factors + 2 * BLOCK)[:, None]
            present = tl.load(own_factors + 3 * BLOCK)[:, None] != 0.0
            queries_factor = tl.load(own_row_factors + BLOCK)[:, None]
            table = tables + (unit * BLOCKS + block).to(tl.int64) * (2 * HALVES * TABLE)
            own_table = table + i[None, :] * BLOCK + i[:, None]
            in_tree = (nodes < N)[:, None] & inside
            value_place = value + (row * N + nodes[:, None]).to(tl.int64) * value_stride + head * V + columns[None, :]
            left = tl.load(value_place, mask=in_tree, other=0.0).to(tl.float32)

            read = dot_halves(keys, keys_low, state_high, state_low, zeros, KEYS_EXACT, False)
            left -= read * to_state
            read = dot_halves(queries, queries_low, state_high, state_low, zeros, KEYS_EXACT, False)
            read *= queries_to_state
            explained = zeros
            result = zeros
            if KNOWN > 0:
                known_table = table + j[None, :] * BLOCK + i[:, None]
                to_keys, to_keys_low = _load_halves(known_table, TABLE, HALVES)
                to_queries, to_queries_low = _load_halves(known_table + HALVES * TABLE, TABLE, HALVES)
                explained = dot_halves(to_keys, to_keys_low, known_high, known_low, explained, False, False)
                result = dot_halves(to_queries, to_queries_low, known_high, known_low, result, False, False)
            for before in tl.static_range(block):
                earlier = own_table + (KNOWN + before * BLOCK) * BLOCK
                to_keys, to_keys_low = _load_halves(earlier, TABLE, HALVES)
                to_queries, to_queries_low = _load_halves(earlier + HALVES * TABLE, TABLE, HALVES)
                high = solved_before[2 * before]
                low = solved_before[2 * before + 1]
                explained = dot_halves(to_keys, to_keys_low, high, low, explained, False, False)
                result = dot_halves(to_queries, to_queries_low, high, low, result, False, False)
            left = tl.where(present, left - explained, 0.0)  # inputs and state of padding may be anything
            left_high, left_low = split(left, FLOAT32)
            own_table += (KNOWN + block * BLOCK) * BLOCK
            solution, solution_low = _load_halves(own_table, TABLE, HALVES)
            mix, mix_low = _load_halves(own_table + HALVES * TABLE, TABLE, HALVES)
            # The diagonal is the greatest part, and precise.
            solved = dot_halves(solution, solution_low, left_high, left_low, left * strength, False, False)
            result = dot_halves(mix, mix_low, left_high, left_low, result, False, False)
            result = tl.where(present & (queries_factor != 0.0), result * queries_factor + read, 0.0)
            solved_before = solved_before + split(solved, FLOAT32)
            place_of_row = ((row * N + nodes[:, None]) * HV + head).to(tl.int64) * V + columns[None, :]
            tl.store(output + place_of_row, result.to(output.dtype.element_ty), mask=in_tree)
            place_of_row = ((row * SCRATCH + nodes[:, None]) * HV + head).to(tl.int64) * V + columns[None, :]
            tl.store(pseudo_value + place_of_row, solved, mask=in_tree)
