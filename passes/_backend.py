"""The backend for `torch.compile` that rewrites the graph of a tree forward and hands it on."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from treewy.passes._anchors import GdnLayerInfo
from treewy.passes._convolution_pass import convolve_over_ancestors
from treewy.passes._delta_rule_pass import solve_instead_of_delta_rule
from treewy.passes._graph import TreeGraph

PASSES = (
    (torch.ops.treewy.convolution_marker.default, convolve_over_ancestors),
    (torch.ops.treewy.delta_rule_marker.default, solve_instead_of_delta_rule),
)
"""In order: a marker, and what rewrites a layer's call of it."""

INNER_BACKENDS = ("eager", "aot_eager", "inductor")


class TreeBackend:
    """Compile forwards over the nodes of a tree.

    Rewrites Dynamo's graph, before anything is decomposed, and gives it to another backend. It belongs to one compiled
    function and changes no configuration and no registry, so that what is compiled elsewhere is compiled as before. A
    user's own passes run where they would, behind these.

    The function is a model's forward, called within ``redirect_gdn_layers`` with the parents of the nodes as
    ``treewy_parents`` [B, N], a mask of ancestors and positions by depth. Compile it with ``fullgraph=True``: a graph
    in which layers are missing is refused.

    Args:
        layers: The Gated DeltaNet layers of the model, all of which have to be in the graph.
        inner: Who compiles the rewritten graph: "eager", "aot_eager" or "inductor".

    Raises:
        ValueError: If ``inner`` is none of these.

    Example:
        >>> TreeBackend([], inner="tvm")
        Traceback (most recent call last):
        ValueError: inner backend 'tvm' is not available; choose one of eager, aot_eager, inductor

    Source:
        Custom backends of ``torch.compile``.
    """

    def __init__(self, layers: Iterable[GdnLayerInfo], inner: str = "eager") -> None:
        if inner not in INNER_BACKENDS:
            raise ValueError(f"inner backend {inner!r} is not available; choose one of {', '.join(INNER_BACKENDS)}")
        self._layers = tuple(layers)
        self._inner = inner
        self.handed_out: dict[tuple[str, str], Tensor] = {}
        """Of the last forward: "pseudo_value", "key", "log_decay" and "columns" of each layer's nodes."""

    def __call__(self, graph_module: GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        """Rewrite and compile a graph; ``torch.compile`` calls this."""
        tree = TreeGraph(graph_module.graph, self._layers)
        for marker, rewrite in PASSES:
            for layer, call in tree.calls(marker):
                rewrite(tree, layer, call)
        (output,) = tree.graph.find_nodes(op="output")
        results: Any = output.args[0]
        output.args = ((*results, *tree.handed_out.values()),)
        # Nothing is eliminated as dead: to a graph the writes of keys and values look like that.
        tree.graph.lint()
        graph_module.recompile()
        compiled = _compile(self._inner, graph_module, example_inputs)
        names = tuple(tree.handed_out)

        def run(*args: Any) -> Any:
            everything = compiled(*args)
            self.handed_out = dict(zip(names, everything[len(results) :], strict=True))
            return everything[: len(results)]

        return run


def _compile(inner: str, graph_module: GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
    if inner == "eager":
        forward: Callable[..., Any] = graph_module.forward
        return forward
    return torch._dynamo.lookup_backend(inner)(graph_module, example_inputs)
