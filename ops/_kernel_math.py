"""What the kernels of the solve, the round and the commit share: products, paths, decays and small inverses.

Precision. Tensor cores multiply bfloat16. A float32 number is the sum of two bfloat16 numbers up to 2^-17 of its size,
so a product of float32 matrices is three products of halves (that of both low halves is below what is kept), and two
where one side is bfloat16 already, as keys and queries of a model are. With `FLOAT32` the operands stay as they
are and the product takes three passes of tf32, which keeps about 22 bits.

Keys. Normalised keys would be float32. Scaling a key by a power of two is exact in bfloat16, so keys are scaled by the
power of two below 1 / norm, and the factor that is left, in [1, 2), meets the results. No product can overflow then,
whatever the norm.

Blocks. Nodes and known rows go in blocks of 16, the smallest tile of a tensor core. Blocks before a node's own act on
it as known rows.
"""

# mypy: ignore-errors
# The language of kernels has no types.

import triton
import triton.language as tl

BLOCK = tl.constexpr(16)
LEAST_GATE = tl.constexpr(-1000.0)  # exp is 0 long before; sums of such gates stay exact to 1e-12 in float64


@triton.jit
def split(x, FLOAT32: tl.constexpr):
    """Return two bfloat16 halves whose sum is x up to 2^-17 of its size; with `FLOAT32`, x itself twice.

    The high half is rounded in integers: the compiler then packs both conversions, where a conversion there and back
    goes through a unit of a quarter of the speed.
    """
    if FLOAT32:
        return x, x
    else:  # Triton compiles what stands behind a return, but not the other branch
        bits = x.to(tl.int32, bitcast=True)
        # Away from the greatest numbers, which would round to infinity.
        rounded = tl.where((bits & 0x7F7F8000) == 0x7F7F8000, bits, bits + 0x8000)
        high = (rounded & -65536).to(tl.float32, bitcast=True)
        return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def split_state(x, FLOAT32: tl.constexpr):
    """Return the halves of x up to 2^-16 of its size: the high half is cut off, which is three operations, not eight.

    Low halves are then up to twice as large and of one sign, so that they add up where great terms cancel. That is
    harmless beside keys and queries, which are exact or rounded, and not in an inverse: with 16 equal keys it cost a
    factor of 20.
    """
    if FLOAT32:
        return x, x
    else:
        high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def dot_halves(left, left_low, right, right_low, total, LEFT_EXACT: tl.constexpr, RIGHT_EXACT: tl.constexpr):
    """Return total + left @ right of halves; an exact side has no low half."""
    if left.dtype == tl.float32:
        total = tl.dot(left, right, total, input_precision="tf32x3")
    else:
        total = tl.dot(left, right, total)
        if not LEFT_EXACT:
            total = tl.dot(left_low, right, total)
        if not RIGHT_EXACT:
            total = tl.dot(left, right_low, total)
    return total


@triton.jit
def halves(x, EXACT: tl.constexpr, FLOAT32: tl.constexpr):
    """Return what `dot_halves` takes of x; an exact x holds bfloat16 numbers and has no low half."""
    if EXACT and not FLOAT32:
        x = x.to(tl.bfloat16)
        low = x
    else:
        x, low = split(x.to(tl.float32), FLOAT32)
    return x, low


@triton.jit
def dot_split(left, right, total, LEFT_EXACT: tl.constexpr, RIGHT_EXACT: tl.constexpr, FLOAT32: tl.constexpr):
    """Return total + left @ right; an exact side holds bfloat16 numbers."""
    if left.dtype == tl.float16 and right.dtype == tl.float16:
        total = tl.dot(left, right, total)  # products of these are exact as they are
    else:
        left, left_low = halves(left, LEFT_EXACT, FLOAT32)
        right, right_low = halves(right, RIGHT_EXACT, FLOAT32)
        total = dot_halves(left, left_low, right, right_low, total, LEFT_EXACT, RIGHT_EXACT)
    return total


@triton.jit
def load_rows(pointer, row_stride, rows, present, K: tl.constexpr, KP: tl.constexpr):
    """Load keys or queries [rows, KP]."""
    k = tl.arange(0, KP)
    place = pointer + rows[:, None] * row_stride + k[None, :]
    return tl.load(place, mask=present[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def split_factor(factor):
    """Split a factor into a power of two and a rest in [1, 2), or 0 and 0."""
    # Clearing the mantissa leaves the power of two.
    power = (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return power, tl.where(power > 0.0, factor / power, 0.0)


@triton.jit
def norm_factors(rows):
    """Split 1 / norm of each row into a power of two and a rest in [1, 2), or 0 and 0 for a norm that overflows."""
    x = rows.to(tl.float32)
    power, rest = split_factor(tl.math.rsqrt(tl.sum(x * x, 1) + 1e-6))
    return power, rest


@triton.jit
def diagonal(square):
    """Return the diagonal of a matrix [16, 16]."""
    i = tl.arange(0, BLOCK)
    return tl.sum(tl.where(i[:, None] == i[None, :], square, 0.0), 0)


@triton.jit
def scale_rows(rows, power):
    """Scale rows by a power of two each: exact in bfloat16; float16 becomes float32, in which it is exact."""
    dtype = rows.dtype if rows.dtype == tl.bfloat16 else tl.float32
    return rows.to(dtype) * power.to(dtype)[:, None]


@triton.jit
def walk_to_roots(parents, log_decay, nodes, parent, own_gate, HV: tl.constexpr, NODES: tl.constexpr):
    """Walk from each of 16 nodes, with what is loaded already of its parent and gate, up to its root.

    Returns two words that mark the ancestors and the node itself, of 32 bits where all nodes fit in one, and the sum of
    the log decays on the way in float64. Differences of such sums keep their digits: in float32 they would not
    (`decays_behind` in `_algebra.py`).
    """
    WORD: tl.constexpr = tl.int32 if NODES <= 32 else tl.int64
    BITS: tl.constexpr = 31 if NODES <= 32 else 63
    present = parent != -2
    total = tl.where(present, tl.maximum(own_gate, LEAST_GATE), 0.0).to(tl.float64)
    current = tl.where(present, parent, -1)
    one = tl.full([BLOCK], 1, WORD)
    own_bit = one << (nodes & BITS).to(WORD)
    low = tl.where(present & (nodes < 64), own_bit, 0)
    high = tl.where(present & (nodes >= 64), own_bit, 0)
    while tl.max(current, 0) >= 0:
        for _ in tl.static_range(4):  # a look whether all have arrived takes longer than a step
            on_path = current >= 0
            bit = one << (current & BITS).to(WORD)
            low = tl.where(on_path & (current < 64), low | bit, low)
            if NODES > 64:
                high = tl.where(current >= 64, high | bit, high)
            gate = tl.load(log_decay + current * HV, mask=on_path, other=0.0).to(tl.float32)
            total += tl.maximum(gate, LEAST_GATE).to(tl.float64)
            current = tl.load(parents + current, mask=on_path, other=-1).to(tl.int32)
    return low, high, total


@triton.jit
def has_bit(low, high, rows, NODES: tl.constexpr):
    """Tell whether row j is marked for node i, as [j, i]."""
    row = rows[:, None]
    word = low[None, :]
    if NODES > 64:
        word = tl.where(row < 64, low[None, :], high[None, :])
    return ((word >> (row & (31 if NODES <= 32 else 63)).to(low.dtype)) & 1) != 0


@triton.jit
def sum_after(gate):
    """Sum the gates behind each one: after[j] = sum_{k > j} gate[k], without a subtraction."""
    row = tl.arange(0, gate.shape[0])
    return tl.sum(tl.where(row[:, None] > row[None, :], gate[:, None], 0.0), 0)


@triton.jit
def unit_upper_inverse(upper, FLOAT32: tl.constexpr):
    """Invert I + upper for a strictly upper triangular matrix [16, 16].

    Blocks of 2, 4, 8 and 16 rows and columns in turn, each from the two inverses on its diagonal:

        [A  B]^-1   [A^-1  -A^-1 B C^-1]
        [0  C]    = [0      C^-1       ]

    Each inverse on the way is that of some of the nodes alone, so it is as small as theirs. A series in powers of
    `upper` would be shorter still and is off by 1e9 on chains of near-identical keys.
    """
    i = tl.arange(0, BLOCK)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0) - tl.where((i[:, None] ^ 1) == i[None, :], upper, 0.0)
    zeros = tl.zeros([BLOCK, BLOCK], tl.float32)
    high, low = split(upper, FLOAT32)
    for log_size in tl.static_range(1, 4):
        across = ((i[:, None] >> log_size) ^ 1) == (i[None, :] >> log_size)  # B; what mirrors it is zero
        inverse_high, inverse_low = split(inverse, FLOAT32)
        across_high = tl.where(across, high, 0.0)
        across_low = tl.where(across, low, 0.0)
        step = dot_halves(inverse_high, inverse_low, across_high, across_low, zeros, False, False)
        step_high, step_low = split(step, FLOAT32)
        inverse -= dot_halves(step_high, step_low, inverse_high, inverse_low, zeros, False, False)
    return inverse
