"""Mistakes in the kernels of the solve, the commit and the round; caught in the interpreter."""

from faults.fault import Fault

_SOLVE = "tests/ops/test_solve_interpreted.py::"
_TREES = _SOLVE + "test_equals_the_recurrence_whatever_padding_holds"
_VERIFY = "tests/ops/test_verify.py::test_the_kernels_equal_the_recurrence"

KERNELS = [
    Fault(
        "the kernels drop the decay between the nodes of a block",
        "ops/_solve_kernel.py",
        "decay = tl.exp(tl.minimum(behind, 0.0)) * keys_factor[:, None]",
        "decay = tl.exp(0.0 * behind) * keys_factor[:, None]",
        (_TREES + "[tree and padding-torch.float32]",),
    ),
    Fault(
        "the kernels drop the decay between blocks of nodes",
        "ops/_solve_kernel.py",
        "decay = tl.exp(tl.minimum(behind, 0.0))\n",
        "decay = tl.exp(0.0 * behind)\n",
        (_TREES + "[tree of 37-torch.float32]",),
    ),
    Fault(
        "the kernels lose the low half of a number",
        "ops/_kernel_math.py",
        "return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)\n\n\n@triton.jit\ndef split_state",
        "return high.to(tl.bfloat16), (x - x).to(tl.bfloat16)\n\n\n@triton.jit\ndef split_state",
        (_TREES + "[tree and padding-torch.bfloat16]",),
    ),
    Fault(
        "the kernels multiply by the high half of the right side alone",
        "ops/_kernel_math.py",
        "if not RIGHT_EXACT:\n            total",
        "if RIGHT_EXACT:\n            total",
        (_TREES + "[tree and padding-torch.bfloat16]",),
    ),
    Fault(
        "the pass rounds pseudo-values to bfloat16 for later blocks",
        "ops/_pass_kernel.py",
        "solved_before = solved_before + split(solved, FLOAT32)",
        "solved_before = solved_before + split(solved.to(tl.bfloat16).to(tl.float32), FLOAT32)",
        (_TREES + "[tree of 37-torch.float32]",),
    ),
    Fault(
        "the kernel rounds pseudo-values to bfloat16",
        "ops/_solve_kernel.py",
        "tl.store(pseudo_value + place, solved, mask=(nodes < N)[:, None] & inside)",
        "tl.store(pseudo_value + place, solved.to(tl.bfloat16).to(tl.float32), mask=(nodes < N)[:, None] & inside)",
        (_TREES + "[tree and padding-torch.bfloat16]",),
    ),
    Fault(
        "the inverse of a block stops one level short",
        "ops/_kernel_math.py",
        "for level in range(1, tl.max(depth, 0) + 1):",
        "for level in range(1, tl.max(depth, 0)):",
        (_TREES + "[tree and padding-torch.float32]",),
    ),
    Fault(
        "the kernels leave the factor of the norm that is no power of two",
        "ops/_kernel_math.py",
        "return power, tl.where(power > 0.0, factor / power, 0.0)",
        "return power, tl.where(power > 0.0, 1.0, 0.0)",
        (_TREES + "[tree and padding-torch.float32]",),
    ),
    Fault(
        "the kernels take every prefix row for an ancestor",
        "ops/_solve_kernel.py",
        "marked = tl.load(mask + rows[:, None], mask=(rows < P)[:, None] & present[None, :], other=0) != 0",
        "marked = (rows < P)[:, None] & present[None, :]",
        (_TREES + "[sparse prefix-torch.float32]",),
    ),
    Fault(
        "the kernel tiles value heads over the key heads",
        "ops/_solve_kernel.py",
        "key_head = head // (HV // HK)\n    BLOCKS: tl.constexpr = NODES // BLOCK\n    columns",
        "key_head = head % HK\n    BLOCKS: tl.constexpr = NODES // BLOCK\n    columns",
        (_TREES + "[tree and padding-torch.float32]",),
    ),
    Fault(
        "the pass tiles value heads over the key heads",
        "ops/_pass_kernel.py",
        "(row * HK + head // (HV // HK)) * BLOCKS + block",
        "(row * HK + head % HK) * BLOCKS + block",
        (_VERIFY + "[17 rows]",),
    ),
    Fault(
        "keys that wait in the scratch are taken for normalised ones",
        "ops/_solve_kernel.py",
        "solved = solved * (keys_rest * keys_power)[:, None]",
        "solved = solved * keys_rest[:, None]",
        (_VERIFY + "[ring of 5]",),
    ),
    Fault(
        "the kernel folds a path that just fits into the ring",
        "ops/_solve_kernel.py",
        "if num_rows > RING:",
        "if num_rows >= RING:",
        (_VERIFY + "[chains that just fit]",),
    ),
    Fault(
        "a ring that was folded stays known",
        "ops/_solve_kernel.py",
        "tl.store(known_after + row, tl.where(num_rows <= RING, num_rows, 0))",
        "tl.store(known_after + row, tl.where(num_rows <= RING, num_rows, known))",
        (_VERIFY + "[ring of 5]",),
    ),
    Fault(
        "with tables a ring that was folded stays known",
        "ops/_tables_kernel.py",
        "tl.store(known_after + row, tl.where(fits, num_rows, 0))",
        "tl.store(known_after + row, tl.where(fits, num_rows, known))",
        (_VERIFY + "[17 rows]",),
    ),
    Fault(
        "the kernel writes the ring again instead of appending the path",
        "ops/_solve_kernel.py",
        "tl.store(place, known_values, mask=on_path[:, None] & inside)",
        "tl.store(place, known_values, mask=in_ring[:, None] & inside)",
        (_VERIFY + "[ring of 5]",),
    ),
    Fault(
        "a row without a slot reads the state of another",
        "ops/_solve_kernel.py",
        "width = tl.where(slot >= 0, V, 0)  # a row without a slot has a state of zeros",
        "width = V\n        slot = tl.maximum(slot, 0)",
        (_VERIFY + "[ring of 5]",),
    ),
    Fault(
        "a fold writes the state of its row, not that of its slot",
        "ops/_tables_kernel.py",
        "slot = tl.load(slots + row).to(tl.int32)\n            width",
        "slot = row\n            width",
        (_VERIFY + "[17 rows]",),
    ),
    Fault(
        "the kernel that commits takes the nodes before a node for its ancestors",
        "ops/_commit_kernel.py",
        "node = tl.load(parents + node).to(tl.int32)\n    state_tile",
        "node = node - 1\n    state_tile",
        (_SOLVE + "test_a_commit_equals_writing_the_path_one_node_at_a_time[tree of 37-torch.float32]",),
    ),
    Fault(
        "the kernel that commits drops the decay of the old state",
        "ops/_commit_kernel.py",
        "state_tile * tl.exp(tl.sum(gate, 0))",
        "state_tile",
        (_SOLVE + "test_a_commit_equals_writing_the_path_one_node_at_a_time[one node-torch.float32]",),
    ),
    Fault(
        "the kernel that commits in place writes slot 0 for rows without a slot",
        "ops/_commit_kernel.py",
        "node = tl.where(slot >= 0, node, -1)",
        "slot = tl.maximum(slot, 0)",
        (_SOLVE + "test_a_commit_in_place_writes_the_slots_of_rows_that_commit_and_no_other",),
    ),
]
