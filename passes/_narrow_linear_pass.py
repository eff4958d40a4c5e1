"""The pass that writes projections onto a few numbers as sums, which a compiler fuses with what follows.

    before   y = linear(x, weight, bias)                             weight [O, I] with few O, x [..., I] of few rows

    after    y = sum(float(x[..., None, :]) * float(weight), -1), plus the bias, in the dtype of x

A Gated DeltaNet layer projects the hidden state onto one write strength and one log decay for each head. A product of
matrices of so few columns keeps most of a GPU waiting, 6 us each on an H200 where reading the weights takes 0.1, and
libraries fuse neither two of them nor the sigmoid behind. As sums they are one kernel, with all that follows.
"""

import torch
from torch import Tensor
from torch.fx import Graph
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_MOST_OUTPUTS = 64
_MOST_SUMS = 16384  # rows times outputs; from there on tensor cores are faster


def sum_narrow_linears(graph: Graph) -> None:
    """Rewrite the narrow projections of a graph.

    Args:
        graph: Rewritten in place.
    """
    for call in graph.find_nodes(op="call_function", target=torch._C._nn.linear):
        given = dict(zip(("input", "weight", "bias"), call.args, strict=False)) | call.kwargs
        x, weight, bias = (given.get(name) for name in ("input", "weight", "bias"))
        if not _is_narrow(*(node.meta["example_value"] for node in (x, weight, call))):
            continue
        with graph.inserting_before(call):
            expanded = graph.call_method("unsqueeze", (graph.call_method("float", (x,)), -2))
            products = graph.call_function(torch.mul, (expanded, graph.call_method("float", (weight,))))
            sums = graph.call_method("sum", (products, -1))
            if bias is not None:
                sums = graph.call_function(torch.add, (sums, bias))
            result = graph.call_method("to", (sums, x.meta["example_value"].dtype))
        result.meta = call.meta.copy()
        call.replace_all_uses_with(result)
        graph.erase_node(call)


def _is_narrow(x: Tensor, weight: Tensor, result: Tensor) -> bool:
    plain = weight.ndim == 2 and x.dtype.itemsize <= 4 and not is_traceable_wrapper_subclass(weight)
    same = x.dtype == weight.dtype == result.dtype  # they differ under autocast
    return plain and same and weight.shape[0] <= _MOST_OUTPUTS and result.numel() <= _MOST_SUMS
