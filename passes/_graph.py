"""The graph of a tree forward while passes rewrite it: what is looked up in it, and what it hands out."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.fx import Graph, Node

from treewy.passes._anchors import GdnLayerInfo


class TreeGraph:
    """A graph that Dynamo traced of a model's forward over nodes.

    Args:
        graph: Rewritten in place.
        layers: The Gated DeltaNet layers of the model, in order.
    """

    def __init__(self, graph: Graph, layers: Iterable[GdnLayerInfo]) -> None:
        self.graph = graph
        self.layers = tuple(layers)
        self.handed_out: dict[tuple[str, str], Node] = {}
        """What a commit needs, by the name of the layer and of the thing."""

    def calls(self, target: Callable[..., Any]) -> list[tuple[GdnLayerInfo, Node]]:
        """Return each layer's call of an operator, in the order of the layers.

        Raises:
            ValueError: If a layer has none or several.
        """
        found: dict[str, list[Node]] = {layer.name: [] for layer in self.layers}
        for node in self.graph.find_nodes(op="call_function", target=target):
            found[self._layer_of(node).name].append(node)
        wrong = [name for name, nodes in found.items() if len(nodes) != 1]
        if wrong and not any(found.values()):
            raise ValueError(
                f"none of the {len(self.layers)} Gated DeltaNet layers was given a tree in this forward; call it with "
                "treewy_parents within redirect_gdn_layers, and load the model with use_kernels=False"
            )
        if wrong:
            raise ValueError(
                f"in the graph of this forward {len(self.layers) - len(wrong)} of {len(self.layers)} Gated DeltaNet "
                f"layers call {target} once, but not {wrong}: something replaced the function that they call, such as "
                "a hub kernel; load the model with use_kernels=False"
            )
        return [(layer, found[layer.name][0]) for layer in self.layers]

    def _layer_of(self, node: Node) -> GdnLayerInfo:
        """Find the layer that traced a node. Dynamo writes the path of the module behind that of the whole."""
        paths = [path for path, _ in node.meta["nn_module_stack"].values()]
        for layer in self.layers:
            if any(path.endswith("." + layer.name) for path in paths):
                return layer
        raise AssertionError(f"{node} comes from {paths}, which is no Gated DeltaNet layer of this model")

    def drop_write(self, layer: GdnLayerInfo, store: Node, written: Node | None) -> None:
        """Erase the call that writes a value into a store of the cache, and nothing else that uses the store.

        Raises:
            ValueError: If there is no such call, or if what was written is used otherwise too.
        """
        uses = [] if written is None else list(written.users)
        if [(node.op, node.target, node.args) for node in uses] != [("call_method", "copy_", (store, written))]:
            raise ValueError(
                f"layer {layer.name!r} uses its new {store} in {uses} and not in one copy_ alone, the "
                "one way of keeping it that treewy knows; generate without a drafter"
            )
        uses[0].replace_all_uses_with(store)
        self.graph.erase_node(uses[0])
