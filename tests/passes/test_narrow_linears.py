"""Projections onto a few numbers become sums, and others stay."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from tolerances import BFLOAT16_ROUNDING, LOGITS_FLOAT32, relative_error
from treewy.passes._narrow_linear_pass import sum_narrow_linears

pytestmark = pytest.mark.usefixtures("nothing_compiled_is_kept")


def rewritten(function: Any, *inputs: Tensor) -> tuple[Any, int]:
    """The result of a function whose graph was rewritten, and how many projections are left."""
    left = []

    def backend(graph_module: GraphModule, _: list[Tensor]) -> Any:
        sum_narrow_linears(graph_module.graph)
        graph_module.graph.lint()
        graph_module.recompile()
        left.append(len(graph_module.graph.find_nodes(op="call_function", target=torch._C._nn.linear)))
        return graph_module.forward

    result = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return result, left[0]


@pytest.mark.parametrize("bias", [False, True])
def test_narrow_projections_become_sums_in_float32(bias: bool) -> None:
    """What is left is rounded once, as a product of matrices is."""
    generator = torch.Generator().manual_seed(0)
    narrow, wide = (torch.nn.Linear(96, size, bias=bias, dtype=torch.bfloat16) for size in (6, 70))
    x = torch.randn(2, 5, 96, generator=generator).bfloat16()
    (few, many), left = rewritten(lambda x: (narrow(x), wide(x)), x)
    assert left == 1
    exact = torch.nn.functional.linear(x.double(), *(p.double() for p in narrow.parameters()))
    assert few.dtype == torch.bfloat16
    assert relative_error(few, exact) <= BFLOAT16_ROUNDING
    assert torch.equal(many, wide(x))


def test_float32_keeps_its_accuracy() -> None:
    narrow, x = torch.nn.Linear(96, 6), torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(0))
    result, left = rewritten(narrow, x)
    assert left == 0
    assert relative_error(result, narrow(x)) <= LOGITS_FLOAT32


def test_many_rows_stay() -> None:
    narrow = torch.nn.Linear(8, 64)
    assert rewritten(narrow, torch.ones(256, 8))[1] == 0
    assert rewritten(narrow, torch.ones(257, 8))[1] == 1


def test_other_dtypes_under_autocast_stay() -> None:
    narrow, x = torch.nn.Linear(8, 6), torch.ones(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        result, left = rewritten(narrow, x)
        assert torch.equal(result, narrow(x))
    assert left == 1


@pytest.mark.parametrize("by_name", ["bias", "weight", "input"])
def test_arguments_may_be_given_by_name(by_name: str) -> None:
    narrow, x = torch.nn.Linear(96, 6), torch.randn(2, 96, generator=torch.Generator().manual_seed(0))
    given = {"input": x, "weight": narrow.weight, "bias": narrow.bias}
    names = list(given)
    first = names[: names.index(by_name)]

    def project(x: Tensor) -> Tensor:
        named = {name: value for name, value in (given | {"input": x}).items() if name not in first}
        return torch.nn.functional.linear(*((given | {"input": x})[name] for name in first), **named)

    result, left = rewritten(project, x)
    assert left == 0
    assert relative_error(result, narrow(x)) <= LOGITS_FLOAT32


def test_what_is_no_plain_projection_stays() -> None:
    double, x = torch.nn.Linear(8, 6).double(), torch.ones(2, 8)
    assert rewritten(double, x.double())[1] == 1
    vector = torch.ones(8)
    result, left = rewritten(lambda x: torch.nn.functional.linear(x, vector), x)
    assert (left, result.shape) == (1, (2,))
