"""The kernels of the attention on a CUDA device, against the reference in float64. What they may not read holds NaN."""

from typing import Any

import pytest
import torch
from torch import Tensor

from attention_calls import attention_call
from gpu_solves import random_tree
from parents import chain, widths
from tolerances import BFLOAT16_PAIR, FLOAT32, FLOAT64_PAIR, KERNEL_OVER_REFERENCE, relative_error
from treewy import ops
from treewy.ops import PADDING
from treewy.testing import AttentionInputs

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PADDED = (-1, 0, PADDING, 0, 1, PADDING, 4, 6, 6)
# Name: parents and length of the prefix of each row, and how the heads differ from 2 key heads, ratio 3 and width 64.
SIZES: dict[str, tuple[tuple[tuple[int, ...], ...], tuple[int, ...], dict[str, int]]] = {
    "one node": (((-1,),) * 3, (0, 1, 700), {}),
    "4 nodes": ((chain(4), widths(3)), (31, 33), {"head_dim": 256, "ratio": 4}),
    "16 nodes": ((chain(16), widths(5, 2)), (1000, 64), {"head_dim": 256, "key_heads": 4, "ratio": 4}),
    "padded, odd width": ((PADDED, widths(2, 3), (PADDING,) * 9), (40, 650, 9), {"head_dim": 80}),
    "40 nodes": ((widths(3, 3, 3), random_tree(40, 1, 40)), (320, 4000), {"head_dim": 128, "ratio": 2}),
    "48 nodes, ratio 8": ((random_tree(48, 2),), (530,), {"head_dim": 256, "ratio": 8}),
    "128 nodes": ((chain(128), random_tree(128, 3)), (5000, 0), {"ratio": 1}),
    "many rows": (tuple(random_tree(16, seed) for seed in range(40)), tuple(range(0, 600, 15)), {"key_heads": 4}),
    "mostly padding": (((*chain(3), *(PADDING,) * 125),), (99,), {"head_dim": 128, "ratio": 5}),
}

# Trees and lengths of two calls of the same shapes.
FIRST = (widths(2, 3), PADDED, random_tree(9, 1)), (70, 600, 5)
SECOND = (chain(9), random_tree(9, 2), (PADDING,) * 9), (605, 3, 44)

WINDOWS = [1, 3, 40, 600, 2**40]
"""Of one token, less than trees are deep, about a block of columns, about a prefix, and more than there is."""


def on_gpu(inputs: AttentionInputs) -> AttentionInputs:
    return AttentionInputs(*(x.cuda() if isinstance(x, Tensor) else x for x in inputs))


def finite(inputs: AttentionInputs) -> AttentionInputs:
    """The reference multiplies the values outside the prefix by 0."""
    return AttentionInputs(*(x.nan_to_num() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs))


def in_float64(inputs: AttentionInputs) -> AttentionInputs:
    return AttentionInputs(*(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs))


def drawn(size: str, dtype: torch.dtype, window: int = 0) -> AttentionInputs:
    parents, lengths, heads = SIZES[size]
    return attention_call(parents, lengths, dtype=dtype, window=window, **heads)


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("window", [0, *WINDOWS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_the_kernels_are_as_exact_as_the_reference(size: str, dtype: torch.dtype, window: int) -> None:
    inputs = drawn(size, dtype, window)
    exact = ops.tree_attention(*in_float64(finite(inputs)))
    result = ops.tree_attention(*on_gpu(inputs))
    assert result.is_contiguous()
    assert result.dtype == dtype
    assert (result.cpu()[inputs.parents == PADDING] == 0).all()
    allowed = KERNEL_OVER_REFERENCE * relative_error(ops.tree_attention(*finite(inputs)), exact) + FLOAT32
    assert relative_error(result.cpu(), exact) <= allowed


def test_float64_is_computed_in_float64() -> None:
    inputs = in_float64(finite(drawn("padded, odd width", torch.float32)))
    assert relative_error(ops.tree_attention(*on_gpu(inputs)).cpu(), ops.tree_attention(*inputs)) <= FLOAT64_PAIR


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", ["16 nodes", "128 nodes"])
def test_a_window_shares_out_no_more_than_a_prefix_that_begins_with_it(size: str, dtype: torch.dtype) -> None:
    """It gives the same bits."""
    window, inputs = 100, on_gpu(drawn(size, dtype))
    unseen = (inputs.prefix_length - window + 1).clamp(min=0)
    cut = {"prefix_start": inputs.prefix_start + unseen, "prefix_length": inputs.prefix_length - unseen}
    inputs = inputs._replace(window=window)
    assert torch.equal(ops.tree_attention(*inputs), ops.tree_attention(*inputs._replace(**cut)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_give_the_bits_of_contiguous_tensors(dtype: torch.dtype) -> None:
    inputs = on_gpu(drawn("16 nodes", dtype))
    batch, _, columns, head_dim = inputs.key_cache.shape
    head_first = {
        name: getattr(inputs, name).transpose(1, 2).contiguous().transpose(1, 2)
        for name in ("query", "key", "value", "key_cache", "value_cache")
    }
    query, key, value = torch.cat([inputs.query, inputs.key, inputs.value], dim=2).split([16, 4, 4], dim=2)
    pools = inputs.query.new_full((3, 2, batch + 2, 4, columns + 9, head_dim), torch.nan)  # layers, keys and values
    key_cache, value_cache = pools[1, :, 1:-1, :, 2 : columns + 2]
    key_cache.copy_(inputs.key_cache)
    value_cache.copy_(inputs.value_cache)
    expected = ops.tree_attention(*inputs)
    for views in (
        inputs._replace(**head_first),
        inputs._replace(query=query, key=key, value=value, key_cache=key_cache, value_cache=value_cache),
        inputs._replace(
            prefix_start=inputs.prefix_start.int(),
            prefix_length=inputs.prefix_length.int(),
            parents=inputs.parents.int(),
        ),
    ):
        assert torch.equal(ops.tree_attention(*views), expected)


def test_a_pool_may_be_larger_than_32_bits_can_address() -> None:
    slots, columns = 9, 530_000
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of memory")
    inputs = on_gpu(attention_call((widths(2, 3), chain(9)), (100, 300), dtype=torch.bfloat16, head_dim=256))
    inputs = inputs._replace(value_cache=inputs.key_cache)  # one pool is enough
    moved = columns - inputs.key_cache.shape[2]
    cache = torch.empty(slots, 2, columns, 256, dtype=torch.bfloat16, device="cuda")[:: slots - 1]
    assert cache.stride(0) > 2**31
    cache[:, :, moved:] = inputs.key_cache
    far = inputs._replace(key_cache=cache, value_cache=cache, prefix_start=inputs.prefix_start + moved)
    assert torch.equal(ops.tree_attention(*far), ops.tree_attention(*inputs))


@pytest.mark.parametrize("window", [0, 40])
def test_a_row_gives_the_bits_that_it_gives_among_others(window: int) -> None:
    inputs, others = (on_gpu(attention_call(*call, dtype=torch.bfloat16, window=window)) for call in (FIRST, SECOND))
    whole = ops.tree_attention(*inputs)
    assert torch.equal(whole, ops.tree_attention(*inputs))
    for row in range(3):
        mine = torch.arange(3, device="cuda") == row

        def among_others(x: Any, y: Any, mine: Tensor = mine) -> Any:
            return torch.where(mine.view(-1, *[1] * (x.ndim - 1)), x, y) if isinstance(x, Tensor) else x

        mixed = AttentionInputs(*(among_others(x, y) for x, y in zip(inputs, others, strict=True)))
        assert torch.equal(ops.tree_attention(*mixed)[row], whole[row])


def test_an_empty_batch_launches_nothing() -> None:
    inputs = on_gpu(drawn("16 nodes", torch.bfloat16))
    empty = AttentionInputs(*(x[:0] if isinstance(x, Tensor) else x for x in inputs))
    assert ops.tree_attention(*empty).shape == (0, 16, 16, 256)


@pytest.mark.parametrize(("nodes", "head_dim"), [(129, 64), (2, 257)])
def test_the_kernels_refuse_what_they_cannot_take(nodes: int, head_dim: int) -> None:
    inputs = on_gpu(attention_call((chain(nodes),), (3,), head_dim=head_dim))
    with pytest.raises(ValueError, match="the kernels take up to"):
        ops.tree_attention(*inputs)


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype, window: int) -> None:
    inputs = finite(on_gpu(attention_call(*FIRST, dtype=dtype, window=window)))
    torch.library.opcheck(torch.ops.treewy.tree_attention.default, tuple(inputs))


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_it_gives_the_numbers_of_eager(dynamic: bool, window: int) -> None:
    """Not the bits: what a compiler knows of strides may change the order of sums."""
    compiled = torch.compile(ops.tree_attention, fullgraph=True, dynamic=dynamic)
    for call in (FIRST, SECOND):
        inputs = on_gpu(attention_call(*call, dtype=torch.bfloat16, window=window))
        assert relative_error(compiled(*inputs), ops.tree_attention(*inputs)) <= BFLOAT16_PAIR


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_captured_graph_replays_for_other_trees_and_lengths(dtype: torch.dtype, window: int) -> None:
    inputs, others = (on_gpu(attention_call(*call, dtype=dtype, window=window)) for call in (FIRST, SECOND))
    ops.tree_attention(*inputs)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = ops.tree_attention(*inputs)
    for values in (inputs, others):
        expected = ops.tree_attention(*values)
        for captured, x in zip(inputs, values, strict=True):
            if isinstance(captured, Tensor):
                captured.copy_(x)
        result.fill_(torch.nan)
        graph.replay()
        assert torch.equal(result, expected)
