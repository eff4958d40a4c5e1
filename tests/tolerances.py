"""Every tolerance of the tests, with the measure that they bound. No test writes a number of its own.

Measured values are maxima on CPU over the tests themselves and 500 random trees of up to 64 nodes.
"""

from treewy.testing._bounds import TIE_FLOAT32
from treewy.testing._bounds import relative_error as relative_error

# An operator in float64 against the literal recurrence in float64: about 90 roundings of 2^-53. Measured 3.7e-15.
# (With 64 near-identical keys and write strengths of 2, which both forms amplify, 2.8e-13: compared in float32 only.)
FLOAT64 = 1e-14

# In float32, for write strengths up to 1: about 16 roundings of 2^-24. Measured 5.5e-7.
FLOAT32 = 1e-6

# With write strengths of 2 and near-identical keys the recurrence itself amplifies rounding. The closed form in float32
# may have this multiple of the error of the recurrence in float32, beside the bound above. Measured 7.3.
AMPLIFIED = 16.0

# The same for the kernels, interpreted in float32: their inner products are not summed in float64. Measured 22.
KERNEL_AMPLIFIED = 32.0

# Kernels multiply float32 numbers as two halves of bfloat16 where inputs have 16 bits, which keeps about 17 bits of
# each factor, 16 of a state: pseudo-values, and states after commits, relative to the maximum. Measured, interpreted:
# 4.3e-6 with float16, 3.1e-6 with bfloat16, 6.7e-6 with 16 equal keys.
KERNEL_HALVES = 1e-5

# With write strengths of 2 and near-identical keys the recurrence amplifies that too, as it does float32's rounding.
# Measured, with 16 such keys: 1.1e-4.
KERNEL_HALVES_AMPLIFIED = 1.5e-4

# Two float64 computations that each keep to FLOAT64 (a commit in two parts, a tree in levels) differ by their sum.
# Measured 5.1e-16.
FLOAT64_PAIR = 2 * FLOAT64

# The state after one commit, relative, with bfloat16 inputs and float32 pseudo-values: float32 arithmetic remains.
# Pseudo-values rounded to bfloat16 give 1.6e-3. Measured 1e-7.
COMMITTED_STATE_BFLOAT16_INPUTS = 1e-5

# Rounding a result to bfloat16 moves it by up to 2^-8 of its value, so by no more than 2^-8 of the greatest value.
# Measured 2.4e-3.
BFLOAT16_ROUNDING = 2.0**-8

# Two results that were each rounded to bfloat16.
BFLOAT16_PAIR = 2 * BFLOAT16_ROUNDING

# As before, then through an activation that is rounded too; the slope of SiLU is at most 1.1.
BFLOAT16_ACTIVATED_PAIR = 1.1 * BFLOAT16_PAIR + BFLOAT16_PAIR

# A kernel may have this multiple of the error that the reference has in the same dtype, beside float32 rounding: it
# rounds to that dtype where the reference does, but exponentials and the order of sums may differ (design.md).
KERNEL_OVER_REFERENCE = 2.0

# Greedy text in float32: where the plain model's two greatest logits are closer than this, another order of summation
# may choose the other token. A token of the tiny random models is such a tie about once in 5,000 (design.md). Measured:
# 0 ties in 200 generations of each of seven families.
TOP_TWO_GAP_OF_A_TIE = TIE_FLOAT32  # 1e-4

# At most two in the 200 generations of a family, which run in two halves.
TIES_IN_100_GENERATIONS = 1

# Stores of a tiny float32 model after many rounds against its token-by-token run: other orders of summation, carried on
# by four layers and the state. Relative to the tensor's maximum. Measured 9e-6, and 3.4e-5 at one token, in a column
# that Hugging Face's own prefill wrote.
STORES_FLOAT32 = 2e-4

# Logits of a node likewise, relative to the greatest of the vocabulary. Measured 8e-6.
LOGITS_FLOAT32 = 1e-4

# The state after 20 rounds against the float64 recurrence over the same keys, values, decays and write strengths: only
# what verification and commit round in float32. Relative to the row's maximum. Measured 4.2e-7.
STATE_AFTER_ROUNDS = 2e-6

# The state after 1 and after 2,500 commits of bfloat16 inputs against the float64 recurrence over the same inputs, for
# every policy and decays to 0.999. Relative to the maximum. Measured 1.9e-7.
STATE_AFTER_COMMITS = 1e-5

# The distribution of the emitted token by enumeration of all drafts, in float64. Measured 0.
PROBABILITIES_FLOAT64 = 1e-12

# Sampling tests have fixed seeds; a right distribution fails one of 10,000 choices of a seed (design.md).
CHI_SQUARE_P_VALUE = 1e-4

# A rate of acceptance observed against its expectation, in standard errors of the mean: as improbable as the above.
STANDARD_ERRORS = 4.0

# Probabilities in float32: sums of a few roundings of 2^-24.
PROBABILITIES_FLOAT32 = 1e-6

# Of at most 64 cells (design.md). Measured 0.
TOTAL_VARIATION_OF_200_000_DRAWS = 0.01
