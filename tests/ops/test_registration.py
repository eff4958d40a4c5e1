"""The operators as PyTorch sees them: schema, fakes, compile, export, gradients, imports."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from operator_arguments import TREES, WITH_PREFIX, arguments
from parents import chain, widths
from tolerances import FLOAT32, relative_error
from treewy import ops
from treewy.ops import PADDING
from treewy.testing import OpCase

NAMES = (
    "tree_wy_solve",
    "tree_wy_commit",
    "tree_wy_commit_",
    "tree_wy_verify_",
    "tree_conv",
    "tree_conv_commit_",
    "tree_attention",
    "tree_kv_commit_",
    "tree_snapshots",
    "tree_sample",
)
FUNCTIONAL = tuple(name for name in NAMES if not name.endswith("_"))
LIKE_THE_FIRST = tuple(name for name in FUNCTIONAL if name != "tree_sample")
"""Those whose first result has the shape and dtype of the first argument; a sample is indices."""
IN_PLACE = tuple(name for name in NAMES if name.endswith("_"))


def operator(name: str) -> Any:
    return getattr(torch.ops.treewy, name).default


def written(name: str, values: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The arguments that the operator writes."""
    arguments = operator(name)._schema.arguments
    return tuple(x for x, argument in zip(values, arguments, strict=True) if argument.is_write)


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    """Results that may be none, one or several."""
    return () if results is None else results if isinstance(results, tuple) else (results,)


def as_views(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same numbers as transposed views, or as slices of something wider."""

    def view(x: Tensor) -> Tensor:
        if x.ndim >= 3:
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        return torch.cat([x, x], dim=-1)[..., : x.shape[-1]]

    return tuple(view(x) if isinstance(x, Tensor) else x for x in values)


def as_splits(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same numbers as the middle of a wider tensor that was split, as layers split queries, keys and values."""

    def split(x: Tensor) -> Tensor:
        return torch.cat([x, x, x], dim=-1).tensor_split(3, dim=-1)[1]

    return tuple(split(x) if isinstance(x, Tensor) else x for x in values)


LAYOUTS: dict[str, Callable[[str], tuple[Any, ...]]] = {
    "contiguous": arguments,
    "views with a prefix": lambda name: as_views(arguments(name, WITH_PREFIX)),
    "splits of one node, bfloat16": lambda name: as_splits(arguments(name, OpCase(((-1,),) * 2), torch.bfloat16)),
}
WITH_DYNAMIC_SHAPES = "views with a prefix"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str, layout: str) -> None:
    """Case F24: prime-rl#3567. A fake had the strides of its input, the result had others: schema, autograd keys, fakes
    and dynamic shapes.

    The last, which trace the operator's own code for seconds, in one layout: strides are the matter of the fakes.
    """
    utilities = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if layout == WITH_DYNAMIC_SHAPES:
        utilities.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(operator(name), LAYOUTS[layout](name), test_utils=utilities)


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_with_inputs_that_require_gradients(name: str) -> None:
    """Case F24: prime-rl#3567. But for the backward pass, which raises."""
    values = arguments(name)
    pools = written(name, values)  # a leaf that requires gradients cannot be written in place
    values = tuple(x.requires_grad_() if is_floating(x) and not any(x is y for y in pools) else x for x in values)
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator(name), values, test_utils=utilities)


def is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FUNCTIONAL)
def test_results_are_contiguous_as_the_fakes_say(name: str, layout: str) -> None:
    """Case F24: prime-rl#3567. A compiled graph asserts the strides that the fake promised."""
    values = LAYOUTS[layout](name)
    with FakeTensorMode() as mode:
        fakes = operator(name)(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in values))
    results = operator(name)(*values)
    for fake, real in zip(*(as_tuple(x) for x in (fakes, results)), strict=True):
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
        assert fake.is_contiguous()
        assert real.is_contiguous()


def test_splits_inside_a_compiled_function_give_results_that_can_be_viewed() -> None:
    """Case F24: prime-rl#3567. Under compile the strides of the splits are the graph's own."""

    def flat(*values: Any) -> list[Tensor]:
        return [x.view(-1) for x in ops.tree_wy_solve(*as_splits(values))]

    values = arguments("tree_wy_solve", WITH_PREFIX)
    compiled = torch.compile(flat, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(*values), flat(*values), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("lay_out", [as_views, as_splits])
@pytest.mark.parametrize("name", NAMES)
def test_views_give_the_same_numbers_as_contiguous_tensors(
    name: str, lay_out: Callable[[tuple[Any, ...]], tuple[Any, ...]]
) -> None:
    plain, views = arguments(name, WITH_PREFIX), lay_out(arguments(name, WITH_PREFIX))
    results = operator(name)(*plain), operator(name)(*views)
    if name in IN_PLACE:
        results = written(name, plain), written(name, views)
    for a, b in zip(*(as_tuple(x) for x in results), strict=True):
        assert relative_error(b, a) <= FLOAT32


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_compiles_to_one_graph_that_equals_eager(name: str) -> None:
    function = getattr(ops, name)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for case in (TREES, OpCase((widths(1, 5), chain(7), widths(2, 2)), seed=1)):
        values = arguments(name, case)
        expected, results = function(*values), compiled(*values)
        for a, b in zip(*(as_tuple(x) for x in (expected, results)), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_commit_in_place_writes_the_pool_itself_under_compile(name: str) -> None:
    values, expected = arguments(name), arguments(name)
    results = getattr(ops, name)(*expected)
    addresses = [pool.data_ptr() for pool in written(name, values)]
    compiled = torch.compile(getattr(ops, name), fullgraph=True, backend="aot_eager")
    for a, b in zip(as_tuple(compiled(*values)), as_tuple(results), strict=True):
        assert torch.equal(a, b)
    for pool, address, right, before in zip(
        written(name, values), addresses, written(name, expected), written(name, arguments(name)), strict=True
    ):
        assert pool.data_ptr() == address
        assert torch.equal(pool, right)
        assert not torch.equal(pool, before)


def commit_of_a_clone_and_the_original(x: Tensor, *rest: Tensor) -> Tensor:
    """The clone is the pool, the original the pseudo-values: the two have one shape here."""
    slots, key, log_decay, parents, accepted = rest
    y = x.clone()
    ops.tree_wy_commit_(y, slots, x, key, log_decay, parents, accepted)
    return y


def commit_of_the_original_and_a_clone(x: Tensor, *rest: Tensor) -> Tensor:
    slots, key, log_decay, parents, accepted = rest
    y = x.clone()
    ops.tree_wy_commit_(x, slots, y, key, log_decay, parents, accepted)
    return y


def commit_of_a_clone_and_then_of_the_original(x: Tensor, *rest: Tensor) -> Tensor:
    slots, key, log_decay, parents, accepted = rest
    y = x.clone()
    ops.tree_wy_commit_(y, slots, x, key, log_decay, parents, accepted)
    ops.tree_wy_commit_(x, slots, y, key, log_decay, parents, accepted)
    return y


@pytest.mark.parametrize(
    ("function", "backend"),
    [
        (commit_of_a_clone_and_the_original, "inductor"),
        (commit_of_a_clone_and_the_original, "aot_eager"),
        (commit_of_the_original_and_a_clone, "aot_eager"),
        (commit_of_a_clone_and_then_of_the_original, "aot_eager"),
    ],
)
def test_a_compiled_commit_does_not_read_what_it_writes(function: Callable[..., Tensor], backend: str) -> None:
    """Case F23: pytorch#198031, triton#6547. In `y = x.clone(); op(y, x)` the clone was removed when compiled, or the
    kernel ran twice over what it had written."""
    generator = torch.Generator().manual_seed(0)
    batch, size, width = 3, 4, 5  # `size` is nodes, value heads and width of a key, so that x may be both arguments
    original = torch.randn(batch, size, size, width, generator=generator)
    key, log_decay = torch.randn(2, batch, size, 2, size, generator=generator).unbind()
    rest = (
        torch.tensor([2, 0, 1]),
        key,
        -log_decay.flatten(2)[..., :size].abs(),
        torch.tensor([chain(4), widths(1, 2), (-1, PADDING, 0, 2)]),
        torch.tensor([3, 2, -1]),
    )

    def call(f: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        x = original.clone()
        return f(x, *rest), x

    expected = call(function)
    assert not torch.equal(expected[0], expected[1])
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for _ in range(2):  # from equal state
        for a, b in zip(call(compiled), expected, strict=True):
            assert relative_error(a, b) <= FLOAT32


def test_a_commit_of_a_clone_reads_what_was_there_before_the_write() -> None:
    def commit_twice(pool: Tensor, *rest: Tensor) -> Tensor:
        before = pool.clone()
        ops.tree_wy_commit_(pool, *rest)
        return before

    pool, *rest = arguments("tree_wy_commit_")
    original = pool.clone()
    before = torch.compile(commit_twice, fullgraph=True, backend="aot_eager")(pool, *rest)
    assert torch.equal(before, original)
    assert not torch.equal(pool, original)


@pytest.mark.parametrize("name", NAMES)
def test_exports_with_any_number_of_rows_and_nodes(name: str) -> None:
    class Call(torch.nn.Module):
        def forward(self, *values: Any) -> Any:
            results = getattr(ops, name)(*values)
            return values[0] * 1 if results is None else results

    values, other = arguments(name, WITH_PREFIX), arguments(name, OpCase((widths(2, 1),) * 5, seed=3))
    batch, nodes = torch.export.Dim("batch"), torch.export.Dim("nodes")
    prefix = torch.export.Dim("prefix")
    dynamic = []
    for position, x in enumerate(values):
        rows, columns = {0: batch}, {0: batch, 1: nodes}
        if not isinstance(x, Tensor):
            dynamic.append(None)
        elif name == "tree_wy_solve" and 7 <= position < 11:
            dynamic.append({**columns, 2: prefix} if position == 10 else {0: batch, 1: prefix})
        elif name == "tree_wy_verify_" and 2 <= position <= 4:
            dynamic.append({0: batch})
        elif name == "tree_wy_verify_" and position == 6:
            dynamic.append({0: batch, 1: torch.export.Dim("scratch")})
        elif name == "tree_wy_verify_" and 13 <= position <= 15:
            dynamic.append({0: batch, 1: torch.export.Dim("last")})
        elif name == "tree_snapshots" and position == 7:
            dynamic.append({0: batch, 1: torch.export.Dim("earlier")})
        elif name == "tree_conv" and position in (2, 3):
            dynamic.append({})
        elif name in ("tree_wy_commit_", "tree_wy_verify_") and position == 0:
            dynamic.append({0: torch.export.Dim("slots")})
        elif name in STACKED and position in STACKED[name]:
            dynamic.append({1: torch.export.Dim("slots")})
        elif name == "tree_conv_commit_" and position == 2:
            dynamic.append({1: batch, 2: nodes})
        elif x.ndim == 1 or (name, position) in ROWS_ONLY:
            dynamic.append(rows)
        else:
            dynamic.append(columns)
    exported = torch.export.export(Call(), values, dynamic_shapes=(tuple(dynamic),))
    targets = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert operator(name) in targets
    expected, results = getattr(ops, name)(*clone(other)), exported.module()(*clone(other))
    if expected is not None:
        for a, b in zip(*(as_tuple(x) for x in (expected, results)), strict=True):
            assert torch.equal(a, b)


STACKED = {"tree_conv_commit_": (0,), "tree_kv_commit_": (0, 1)}  # pools with the layer in front
ROWS_ONLY = {
    ("tree_wy_solve", 5),
    ("tree_wy_commit", 0),
    ("tree_conv", 1),
    ("tree_snapshots", 5),
    ("tree_attention", 3),
    ("tree_attention", 4),
    ("tree_sample", 6),
}


def clone(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.clone() if isinstance(x, Tensor) else x for x in values)


@pytest.mark.parametrize("name", LIKE_THE_FIRST)
def test_the_fake_is_shapes_only(name: str) -> None:
    """An engine's plugin generator asks for no less: float32 for every tensor, a fresh symbol for every dimension."""
    environment = ShapeEnv()
    values = arguments(name, WITH_PREFIX)
    with FakeTensorMode(shape_env=environment):
        fakes: list[Any] = []
        for position, x in enumerate(values):
            if not isinstance(x, Tensor):
                fakes.append(x)
                continue
            sizes = []
            for dimension in range(x.ndim):
                source = LocalSource(f"size_{position}_{dimension}")
                symbol = environment.create_symbol(5, source=source, dynamic_dim=DimDynamic.DYNAMIC)
                sizes.append(environment.create_symintnode(symbol, hint=5, source=source))
            fakes.append(torch.empty(sizes))
        results = operator(name)(*fakes)
    assert not environment.guards
    assert not environment.replacements
    first = results[0] if isinstance(results, tuple) else results
    assert first.dtype == fakes[0].dtype
    assert first.shape == fakes[0].shape


@pytest.mark.parametrize("name", LIKE_THE_FIRST)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_first_result_has_the_dtype_of_the_first_argument(name: str, dtype: torch.dtype) -> None:
    results = getattr(ops, name)(*arguments(name, dtype=dtype))
    assert (results[0] if isinstance(results, tuple) else results).dtype == dtype


@pytest.mark.parametrize("name", LIKE_THE_FIRST)
def test_backward_raises(name: str) -> None:
    first, *rest = arguments(name)
    results = getattr(ops, name)(first.requires_grad_(), *rest)
    first_result = results[0] if isinstance(results, tuple) else results
    with pytest.raises(RuntimeError, match="no autograd formula"):
        first_result.sum().backward()


def test_importing_the_operators_imports_nothing_above_them() -> None:
    program = (
        "import sys, treewy.ops\n"
        "above = ('transformers', 'treewy.passes', 'treewy_compile')\n"
        "found = [name for name in sys.modules if name.startswith(above)]\n"
        "assert not found, found\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def test_the_public_names_are_the_exported_ones() -> None:
    assert set(NAMES) < set(ops.__all__)
    assert all(getattr(ops, name).__doc__ for name in ops.__all__ if name != "PADDING")
