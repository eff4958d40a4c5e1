"""The kernels of the attention, interpreted, against the oracle. Scratch, and what they may not read, holds NaN."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="kernels need the triton package")

import oracle
from attention_calls import attention_call
from gpu_solves import random_tree
from interpreted import run_interpreted
from parents import chain, widths
from tolerances import FLOAT32, FLOAT64, KERNEL_OVER_REFERENCE, relative_error
from treewy import ops
from treewy.ops import PADDING
from treewy.ops import _launch as kernel_choices
from treewy.testing import AttentionInputs, OpCase, op_cases

# The merge looks for the greatest of what nobody has written for nodes of padding, and numpy says so.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice")

BLOCK = 32  # columns


def attend(inputs: AttentionInputs, parts: int = 64) -> Tensor:
    """Run the kernels with at most `parts` parts: the tree, and shares of the prefix."""
    with mock.patch.object(kernel_choices, "_MOST_PARTS", parts):
        return run_interpreted(ops.tree_attention, *inputs)


def assert_equals_oracle(inputs: AttentionInputs, parts: int = 64) -> None:
    result = attend(inputs, parts)
    assert relative_error(result, oracle.attention(*inputs)) <= FLOAT32
    assert (result[inputs.parents == PADDING] == 0).all()


@given(op_cases(max_prefix=0), st.data())
@settings(max_examples=40, deadline=None)
def test_equals_attention_over_each_path_whatever_padding_holds(case: OpCase, data: st.DataObject) -> None:
    lengths = tuple(data.draw(st.integers(0, 4 * BLOCK), label="length") for _ in case.parents)
    about_a_length = st.builds(lambda length, more: max(length + more, 1), st.sampled_from(lengths), st.integers(-3, 9))
    windows = st.one_of(st.sampled_from([0, 1, 2, 3, 2**31, 2**63 - 1]), st.integers(1, 4 * BLOCK), about_a_length)
    inputs = attention_call(
        case.parents,
        lengths,
        head_dim=case.value_dim,
        key_heads=case.key_heads,
        ratio=case.value_heads // case.key_heads,
        seed=case.seed,
        window=data.draw(windows, label="window"),
    )
    assert_equals_oracle(inputs, data.draw(st.sampled_from([2, 4, 8]), label="parts"))


@pytest.mark.parametrize("parts", [2, 4, 64])
def test_prefixes_that_end_at_a_block_before_it_and_behind_it(parts: int) -> None:
    lengths = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 7 * BLOCK + 3)
    assert_equals_oracle(attention_call((widths(2, 2),) * len(lengths), lengths, key_heads=1, ratio=2), parts)


@pytest.mark.parametrize("window", [0, 1, 2, BLOCK, 5 * BLOCK + 3, 11 * BLOCK])
def test_shares_of_several_blocks_which_are_not_all_of_one_size(window: int) -> None:
    lengths = (11 * BLOCK - 5, 6 * BLOCK, 17)
    assert_equals_oracle(attention_call((widths(3),) * 3, lengths, key_heads=1, window=window), 4)


@pytest.mark.parametrize("ratio", [1, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_heads_of_any_width_and_ratio(head_dim: int, ratio: int) -> None:
    trees = (widths(2, 3), (*chain(5), PADDING, PADDING, 4, 7))
    assert_equals_oracle(attention_call(trees, (70, 33), head_dim=head_dim, ratio=ratio), 4)


TREES = {
    "one node": ((-1,), (-1,)),
    "chain of 70": (chain(70),),
    "chain of 128": (chain(128),),
    "widths 3, 3, 3": (widths(3, 3, 3),),
    "side by side": ((-1,) * 33, (*(-1,) * 30, 3, 30, 29)),
    "any node may be the parent": (random_tree(100, 1, 100), random_tree(100, 2, 100)),
    "padding at the end, as holes, and alone": (
        (*widths(2, 2), PADDING),
        (-1, PADDING, 0, 2, PADDING, 2, 0, PADDING),
        (PADDING,) * 8,
    ),
    "tiles of padding": ((*chain(3), *(PADDING,) * 60), (*(PADDING,) * 60, -1, 60, 60)),
}


@pytest.mark.parametrize("tree", TREES)
def test_trees(tree: str) -> None:
    assert_equals_oracle(attention_call(TREES[tree], (40, 3, 50)[: len(TREES[tree])]), 4)


@pytest.mark.parametrize(
    ("tree", "window"),
    [
        *(("chain of 70", window) for window in (1, 6, 66, 90)),
        ("any node may be the parent", 3),
        ("tiles of padding", 40),
    ],
)
def test_windows_that_end_within_a_tree_or_before_it(tree: str, window: int) -> None:
    """Of whose nodes some tiles see nothing of the prefix, and some nodes of a tile less than others."""
    assert_equals_oracle(attention_call(TREES[tree], (40, 3)[: len(TREES[tree])], key_heads=1, window=window), 4)


def test_a_window_shares_out_no_more_than_a_prefix_that_begins_with_it() -> None:
    """It gives the same bits."""
    window, inputs = 70, attention_call((chain(12), random_tree(12, 1)), (300, 77))
    unseen = inputs.prefix_length - window + 1
    cut = {"prefix_start": inputs.prefix_start + unseen, "prefix_length": inputs.prefix_length - unseen}
    inputs = inputs._replace(window=window)
    assert torch.equal(attend(inputs, 4), attend(inputs._replace(**cut), 4))


def test_a_column_that_a_node_does_not_see_changes_no_bit_of_it() -> None:
    length, column, window = 90, 60, 40
    inputs = attention_call((chain(20),), (length,), window=window)
    changed = inputs._replace(value_cache=inputs.value_cache.index_fill(2, torch.tensor(column), 9.0))
    num_seeing = window - (length - column)  # a node's depth is its number
    before, after = attend(inputs, 4)[0], attend(changed, 4)[0]
    assert torch.equal(before[num_seeing:], after[num_seeing:])
    assert (before != after).flatten(1).any(-1)[:num_seeing].all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_loses_no_more_than_twice_the_rounding_of_the_output(dtype: torch.dtype) -> None:
    inputs = attention_call((widths(2, 2), random_tree(7, 3)), (70, 200), dtype=dtype)
    exact = oracle.attention(*inputs)
    allowed = KERNEL_OVER_REFERENCE * relative_error(exact.to(dtype), exact) + FLOAT32
    result = attend(inputs, 8)
    assert result.dtype == dtype
    assert relative_error(result, exact) <= allowed


def test_a_row_does_not_depend_on_the_others() -> None:
    trees, lengths = (widths(2, 3), chain(9), random_tree(9, 4)), (70, 130, 40)
    inputs = attention_call(trees, lengths)
    others = attention_call((trees[0], trees[2], chain(9)), (70, 5, 128), seed=1)

    def row_of_the_first(mine: Tensor, other: Tensor) -> Tensor:
        other = torch.nn.functional.pad(other, (0, 0, 0, mine.shape[2] - other.shape[2])) if mine.ndim == 4 else other
        return torch.cat([mine[:1], other[1:]])

    changed = AttentionInputs(
        *(row_of_the_first(x, y) if isinstance(x, Tensor) else x for x, y in zip(inputs, others, strict=True))
    )
    assert torch.equal(attend(changed, 4)[0], attend(inputs, 4)[0])


def test_views_give_the_bits_of_contiguous_tensors() -> None:
    inputs = attention_call((widths(2, 3), widths(2, 3)), (70, 33))
    head_first = {
        name: getattr(inputs, name).transpose(1, 2).contiguous().transpose(1, 2)
        for name in ("query", "key", "value", "key_cache", "value_cache")
    }
    wide = torch.cat([inputs.query, inputs.key, inputs.value], dim=2)
    key, value = wide[:, :, 6:8], wide[:, :, 8:]
    pools = torch.full((3, 2, 4, 2, 100, 70), torch.nan)  # layers, keys and values, slots
    key_cache, value_cache = pools[1, :, 1:3, :, 2 : inputs.key_cache.shape[2] + 2, 3:67]
    key_cache.copy_(inputs.key_cache)
    value_cache.copy_(inputs.value_cache)
    expected = attend(inputs, 4)
    for views in (
        inputs._replace(**head_first),
        inputs._replace(query=wide[:, :, :6], key=key, value=value, key_cache=key_cache, value_cache=value_cache),
        inputs._replace(key_cache=inputs.key_cache.transpose(2, 3).contiguous().transpose(2, 3)),  # is copied
        inputs._replace(
            prefix_start=inputs.prefix_start.int(),
            prefix_length=torch.stack([inputs.prefix_length] * 2, 1)[:, 0],
            parents=inputs.parents[:1].int().expand(2, -1),
        ),
    ):
        assert torch.equal(attend(views, 4), expected)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((129, 64), "query has 129 nodes, the kernels take up to 128; split"),
        ((2, 257), "query has head dimension 257, the kernels take up to 256"),
    ],
)
def test_the_kernels_refuse_what_they_cannot_take(size: tuple[int, int], message: str) -> None:
    inputs = attention_call((chain(size[0]),), (3,), head_dim=size[1])
    with pytest.raises(ValueError, match=message):
        attend(inputs)


def test_float64_and_mixed_dtypes_take_the_reference() -> None:
    def finite(dtype: torch.dtype) -> AttentionInputs:
        inputs = attention_call((widths(2, 3),), (9,), dtype=dtype)
        return inputs._replace(**{name: getattr(inputs, name).nan_to_num() for name in ("key_cache", "value_cache")})

    double, single, half = finite(torch.float64), finite(torch.float32), finite(torch.bfloat16)
    assert relative_error(attend(double), oracle.attention(*double)) <= FLOAT64
    mixed = single._replace(key_cache=half.key_cache, value_cache=half.value_cache)
    assert relative_error(attend(mixed), oracle.attention(*mixed)) <= FLOAT32
