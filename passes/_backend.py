"""The backend for `torch.compile` that rewrites the graph of a tree forward and hands it on."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule

from treewy.passes._anchors import AttentionLayerInfo, GdnLayerInfo
from treewy.passes._attention_pass import attend_to_ancestors
from treewy.passes._convolution_pass import convolve_over_ancestors
from treewy.passes._delta_rule_pass import solve_instead_of_delta_rule
from treewy.passes._graph import TreeGraph, copy_of, refuse_waiting
from treewy.passes._narrow_linear_pass import sum_narrow_linears
from treewy.passes._segments import compile_segments

_log = logging.getLogger(__name__)

INNER_BACKENDS = ("eager", "aot_eager", "inductor")


class TreeBackend:
    """Compile forwards over the nodes of a tree.

    Rewrites Dynamo's graph, before anything is decomposed, and gives it to another backend. It belongs to one compiled
    function and changes no configuration and no registry, so that what is compiled elsewhere is compiled as before. A
    user's own passes run where they would, behind these.

    The function is a model's forward, called within ``redirect_layers`` with the parents of the nodes as
    ``treewy_parents`` [B, N], a :class:`TreePrefix` as ``treewy_prefix`` and positions by depth. Compile it with
    ``fullgraph=True``: a graph in which layers are missing is refused.

    Args:
        gdn_layers: The Gated DeltaNet layers of the model, all of which have to be in the graph.
        attention_layers: Its attention layers, likewise.
        stores: What the layers keep between forwards, by the name of the layer and of the thing: of each Gated DeltaNet
            layer "ring_pseudo_value", "ring_key", "ring_log_decay", "pseudo_value", "last_key" and "last_log_decay",
            and of all of them, under the name "", "num_known", "path" and "path_length" (see
            :func:`treewy.ops.tree_wy_verify_`). Looked up in each forward; shapes stay.
        inner: Who compiles the rewritten graph: "eager", "aot_eager" or "inductor".

    Raises:
        ValueError: If ``inner`` is none of these.

    Example:
        >>> TreeBackend([], [], {}, inner="tvm")
        Traceback (most recent call last):
        ValueError: inner backend 'tvm' is not available; choose one of eager, aot_eager, inductor

    Source:
        Custom backends of ``torch.compile``.
    """

    def __init__(
        self,
        gdn_layers: Iterable[GdnLayerInfo],
        attention_layers: Iterable[AttentionLayerInfo],
        stores: Mapping[tuple[str, str], Tensor],
        inner: str = "eager",
    ) -> None:
        if inner not in INNER_BACKENDS:
            raise ValueError(f"inner backend {inner!r} is not available; choose one of {', '.join(INNER_BACKENDS)}")
        gdn_layers, attention_layers = tuple(gdn_layers), tuple(attention_layers)
        self._passes = (
            (torch.ops.treewy.convolution_marker.default, gdn_layers, convolve_over_ancestors),
            (torch.ops.treewy.delta_rule_marker.default, gdn_layers, solve_instead_of_delta_rule),
            (torch.ops.treewy.attention_marker.default, attention_layers, attend_to_ancestors),
        )
        """In order: a marker, the layers that call it, and what rewrites a call."""
        self._layer_names = [layer.name.rpartition(".")[0] for layer in (*gdn_layers, *attention_layers)]
        self._stores = stores
        self._inner = inner
        self.operators: Counter[str] = Counter()
        """Of the graph that was rewritten last: how often it calls each operator of ours."""
        self.handed_out: dict[tuple[str, str], Tensor] = {}
        """Of the last forward: "key" and "log_decay" of each Gated DeltaNet layer's nodes [B, N, HK, K] and [B, N, HV]
        and its "columns" [B, C, N], "key" and "value" of each attention layer's [B, HKV, N, D], and the number of known
        rows [B] as ("", "num_known")."""

    def __call__(self, graph_module: GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        """Rewrite and compile a graph; ``torch.compile`` calls this."""
        graph_module = copy_of(graph_module)
        refuse_waiting(graph_module.graph)
        tree = TreeGraph(graph_module.graph, self._stores, example_inputs)
        for marker, layers, rewrite in self._passes:
            for layer, call in tree.calls(marker, layers):
                before = len(tree.graph.nodes)
                rewrite(tree, layer, call)
                after = len(tree.graph.nodes)
                _log.debug("%s: %s, %d graph nodes before, %d after", layer.name, rewrite.__name__, before, after)
        if self._inner == "inductor":
            sum_narrow_linears(tree.graph)
        (output,) = tree.graph.find_nodes(op="output")
        results: Any = output.args[0]
        output.args = ((*results, *tree.handed_out.values()),)
        # Nothing is eliminated as dead: to a graph writes in place look like that.
        tree.graph.lint()
        graph_module.recompile()
        targets = [node.target for node in tree.graph.nodes if isinstance(node.target, OpOverload)]
        compiled = _compile(self._inner, graph_module, self._layer_names)
        self.operators = Counter(op._opname for op in targets if op.namespace == "treewy")
        names = tuple(tree.handed_out)
        taken = tree.taken

        def run(*args: Any) -> Any:
            everything = compiled(*args, *(self._stores[name] for name in taken))
            self.handed_out = dict(zip(names, everything[len(results) :], strict=True))
            return everything[: len(results)]

        return run


def _compile(inner: str, graph_module: GraphModule, layer_names: list[str]) -> Callable[..., Any]:
    if inner == "eager":
        forward: Callable[..., Any] = graph_module.forward
        return forward
    return compile_segments(graph_module, layer_names, torch._dynamo.lookup_backend(inner)).forward
