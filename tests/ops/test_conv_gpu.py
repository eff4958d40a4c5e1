"""The convolution and the commits of the two small stores on a CUDA device, against the reference and the oracle."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
from parents import chain, widths
from store_commits import Accepted, conv_commit_inputs, kv_commit_inputs, same_bits
from tolerances import FLOAT32, FLOAT64, KERNEL_OVER_REFERENCE, relative_error
from treewy import ops
from treewy.ops import PADDING
from treewy.testing import ConvInputs, OpCase

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PADDED = (-1, 0, PADDING, 0, 1, PADDING, 4, 6, 6)
# Name: parents of each row, channels, taps, columns of the window.
SIZES: dict[str, tuple[tuple[tuple[int, ...], ...], int, int, int]] = {
    "one node": (((-1,),), 64, 4, 4),
    "4 nodes, 8192 channels": ((chain(4), widths(3)), 8192, 4, 4),
    "padded, odd channels": ((PADDED, widths(2, 3), (PADDING,) * 9), 70, 4, 3),
    "16 nodes": ((chain(16), widths(5, 2)), 1024, 4, 4),
    "40 nodes": ((widths(3, 3, 3), chain(40)), 200, 4, 4),
    "128 nodes, 8 taps": ((chain(128), widths(3, 3, 3, 3) + (PADDING,) * 7), 96, 8, 6),
    "2 taps, no window": ((widths(2, 2),) * 3, 33, 2, 0),
    "1 tap": ((widths(2, 2),), 130, 1, 5),
}
COMMITS = {
    "one node": Accepted(OpCase(((-1,),)), (0,), (0,), 1),
    "mixed rows": Accepted(OpCase((PADDED, widths(2, 3), chain(9), chain(9))), (8, 5, -1, 4), (3, 0, 1, -1), 6),
    "40 nodes": Accepted(OpCase((widths(3, 3, 3), (-1, -1, *range(38)))), (39, 39), (2, 0), 3),
    "128 nodes": Accepted(OpCase((chain(128), (-1, -1, *range(126)), (PADDING,) * 128)), (127, 127, 5), (0, 2, 1), 3),
    "nothing": Accepted(OpCase((chain(3),) * 2), (-1, 2), (1, -1), 2),
}


def on_gpu(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.cuda() if isinstance(x, Tensor) else x for x in values)


def conv_case(size: str, dtype: torch.dtype, **options: Any) -> ConvInputs:
    parents, channels, taps, window = SIZES[size]
    return OpCase(parents).conv_inputs(dtype, channels=channels, taps=taps, window=window, **options)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_the_convolution_is_as_exact_as_the_reference(size: str, dtype: torch.dtype, bias: bool) -> None:
    inputs = conv_case(size, dtype, bias=bias)
    absent = inputs.parents == PADDING
    inputs.x[absent] = torch.nan
    exact = oracle.conv(*inputs)
    result = ops.tree_conv(*on_gpu(inputs))
    assert result.is_contiguous()
    assert result.dtype == dtype
    assert (result.cpu()[absent] == 0).all()
    allowed = KERNEL_OVER_REFERENCE * relative_error(ops.tree_conv(*inputs), exact) + FLOAT32
    assert relative_error(result.cpu(), exact) <= allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_without_an_activation_low_precision_rounds_bit_for_bit_as_on_the_cpu(size: str, dtype: torch.dtype) -> None:
    """Products are exact in float32, and the kernel adds them in the order of the reference."""
    inputs = conv_case(size, dtype)._replace(activation="")
    assert torch.equal(ops.tree_conv(*on_gpu(inputs)).cpu(), ops.tree_conv(*inputs))


@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_inputs_and_weights_of_different_dtypes(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    inputs = conv_case("16 nodes", torch.float32)
    inputs = inputs._replace(
        x=inputs.x.to(x_dtype), weight=inputs.weight.to(weight_dtype), bias=inputs.bias.to(weight_dtype)
    )
    exact = oracle.conv(*inputs)
    result = ops.tree_conv(*on_gpu(inputs))
    assert result.dtype == x_dtype
    allowed = KERNEL_OVER_REFERENCE * relative_error(ops.tree_conv(*inputs), exact) + FLOAT32
    assert relative_error(result.cpu(), exact) <= allowed


def test_float64_is_computed_in_float64() -> None:
    inputs = conv_case("padded, odd channels", torch.float64)
    assert relative_error(ops.tree_conv(*on_gpu(inputs)).cpu(), oracle.conv(*inputs)) <= FLOAT64


def test_views_give_the_bits_of_contiguous_tensors() -> None:
    inputs = ConvInputs(*on_gpu(conv_case("16 nodes", torch.bfloat16)))
    channels = inputs.x.shape[2]
    nodes = torch.cat([inputs.window, inputs.x.transpose(1, 2)], dim=-1)  # side by side, as Hugging Face has them
    side_by_side = inputs._replace(x=nodes[:, :, 4:].transpose(1, 2), window=nodes[:, :, :4])
    wide = torch.cat([inputs.x, inputs.x, inputs.x], dim=-1)
    aligned, unaligned = wide[:, :, channels : 2 * channels], torch.cat([inputs.x[..., :1], wide], -1)[..., 1:]
    expected = ops.tree_conv(*inputs)
    for views in (
        side_by_side,
        inputs._replace(x=aligned),
        inputs._replace(x=unaligned[:, :, :channels]),
        inputs._replace(parents=inputs.parents.int()),
    ):
        assert torch.equal(ops.tree_conv(*views), expected)


def test_rows_may_share_parents_and_give_the_bits_that_they_give_alone() -> None:
    inputs = ConvInputs(*on_gpu(conv_case("40 nodes", torch.bfloat16)))
    inputs = inputs._replace(parents=inputs.parents[:1].expand(2, -1))
    whole = ops.tree_conv(*inputs)
    assert torch.equal(whole, ops.tree_conv(*inputs))
    for row in range(2):
        rows = slice(row, row + 1)
        alone = inputs._replace(x=inputs.x[rows], window=inputs.window[rows], parents=inputs.parents[rows])
        assert torch.equal(ops.tree_conv(*alone), whole[rows])


def test_an_empty_batch_launches_nothing() -> None:
    inputs = conv_case("16 nodes", torch.float32)
    empty = inputs._replace(x=inputs.x[:0], window=inputs.window[:0], parents=inputs.parents[:0])
    assert ops.tree_conv(*on_gpu(empty)).shape == (0, 16, 1024)


@pytest.mark.parametrize("window", [1, 3, 4, 8])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("commit", COMMITS)
def test_windows_advance_bit_for_bit(commit: str, dtype: torch.dtype, window: int) -> None:
    inputs = conv_commit_inputs(COMMITS[commit], dtype, window=window, channels=700)
    expected = oracle.conv_commit(*inputs)
    pool, *rest = on_gpu(inputs)
    ops.tree_conv_commit_(pool, *rest)
    assert same_bits(pool.cpu(), expected)


@pytest.mark.parametrize("head_dim", [64, 96, 256])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("commit", COMMITS)
def test_keys_and_values_move_bit_for_bit(commit: str, dtype: torch.dtype, head_dim: int) -> None:
    inputs = kv_commit_inputs(COMMITS[commit], dtype, head_dim=head_dim)
    expected = oracle.kv_commit(inputs.key_pool, *inputs[2:]), oracle.kv_commit(inputs.value_pool, *inputs[2:])
    keys, values, *rest = on_gpu(inputs)
    ops.tree_kv_commit_(keys, values, *rest)
    assert same_bits(keys.cpu(), expected[0])
    assert same_bits(values.cpu(), expected[1])


CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "tree_conv": lambda: on_gpu(conv_case("padded, odd channels", torch.bfloat16)),
    "tree_conv_commit_": lambda: on_gpu(conv_commit_inputs(COMMITS["mixed rows"])),
    "tree_kv_commit_": lambda: on_gpu(kv_commit_inputs(COMMITS["mixed rows"])),
}


def outcome(name: str, values: tuple[Any, ...], result: Tensor | None) -> list[Tensor]:
    """The result, or what was written in place."""
    arguments = getattr(torch.ops.treewy, name).default._schema.arguments
    return [x for x, argument in zip(values, arguments, strict=True) if argument.is_write] or [result]


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.treewy, name).default, CALLS[name]())


@pytest.mark.parametrize("name", CALLS)
def test_compiled_gives_the_bits_of_eager(name: str) -> None:
    function, eager, compiled = getattr(ops, name), CALLS[name](), CALLS[name]()
    expected = outcome(name, eager, function(*eager))
    result = torch.compile(function, fullgraph=True)(*compiled)
    for x, y in zip(outcome(name, compiled, result), expected, strict=True):
        assert same_bits(x, y)


@pytest.mark.parametrize("name", CALLS)
def test_a_captured_graph_replays_for_another_tree(name: str) -> None:
    function, values, other = getattr(ops, name), CALLS[name](), CALLS[name]()
    function(*CALLS[name]())  # compiles the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(*values)
    position = next(
        i for i, x in enumerate(getattr(torch.ops.treewy, name).default._schema.arguments) if x.name == "parents"
    )
    chains = torch.tensor([chain(9)]).expand_as(other[position])
    for x, y in zip(values, other, strict=True):
        if isinstance(x, Tensor):
            x.copy_(y)
    for changed in (values, other):
        changed[position].copy_(chains)
    graph.replay()
    expected = outcome(name, other, function(*other))
    for x, y in zip(outcome(name, values, result), expected, strict=True):
        assert same_bits(x, y)


@pytest.mark.parametrize("name", ["tree_conv_commit_", "tree_kv_commit_"])
def test_a_compiled_commit_does_not_clone_the_pool(name: str) -> None:
    commit = COMMITS["mixed rows"]
    spacious = commit._replace(num_slots=20_000)
    make = conv_commit_inputs if name == "tree_conv_commit_" else kv_commit_inputs
    values = on_gpu(make(spacious))
    compiled = torch.compile(getattr(ops, name), fullgraph=True)
    compiled(*values)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    compiled(*values)
    assert torch.cuda.max_memory_allocated() - before < values[0].nbytes // 2
