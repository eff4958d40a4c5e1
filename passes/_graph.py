"""The graph of a tree forward while passes rewrite it: what is looked up in it, comes in, and is handed out."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from treewy.passes._anchors import LayerInfo

_MODEL = "L['model']."  # Dynamo's name for what a forward of ours closes over


class TreeGraph:
    """A graph that Dynamo traced of a model's forward over nodes.

    Args:
        graph: Rewritten in place.
        stores: Tensors that rewritten layers read and write beside what the forward itself knows, by the name of the
            layer, "" for all layers, and of the thing.
        example_inputs: Of the graph.
    """

    def __init__(
        self, graph: Graph, stores: Mapping[tuple[str, str], Tensor], example_inputs: Sequence[Tensor]
    ) -> None:
        self.graph = graph
        self.handed_out: dict[tuple[str, str], Node] = {}
        """What a commit needs, by the name of the layer and of the thing."""
        self._stores = stores
        self._fake_mode = detect_fake_mode(example_inputs)
        self._taken: dict[tuple[str, str], Node] = {}

    @property
    def taken(self) -> tuple[tuple[str, str], ...]:
        """The stores that became inputs, in the order in which they follow the others."""
        return tuple(self._taken)

    def store(self, layer_name: str, what: str) -> Node:
        """Make a store an input of the graph, behind the others, and return it.

        Its shape is that of now: whoever has another one compiles again.
        """
        name = layer_name, what
        if name not in self._taken:
            store, fake_mode = self._stores[name], self._fake_mode
            example = store if fake_mode is None else fake_mode.from_tensor(store, static_shapes=True)
            *_, last = self.graph.find_nodes(op="placeholder")
            with self.graph.inserting_after(last):
                node = self.graph.placeholder(f"treewy_{len(self._taken)}_{what}")
            node.meta["example_value"] = example
            self._taken[name] = node
        return self._taken[name]

    def calls(self, target: Callable[..., Any], layers: Sequence[LayerInfo]) -> list[tuple[Any, Node]]:
        """Return each layer's call of an operator, in the order of the layers.

        Raises:
            ValueError: If a layer has none or several.
        """
        found: dict[str, list[Node]] = {layer.name: [] for layer in layers}
        for node in self.graph.find_nodes(op="call_function", target=target):
            found[_layer_of(node, layers)].append(node)
        wrong = [name for name, nodes in found.items() if len(nodes) != 1]
        if wrong and not any(found.values()):
            raise ValueError(
                f"none of the {len(layers)} layers that should call {target} was given a tree in this forward; call it "
                "with treewy_parents within redirect_layers, and load the model with use_kernels=False"
            )
        if wrong:
            raise ValueError(
                f"in the graph of this forward {len(layers) - len(wrong)} of {len(layers)} layers call {target} once, "
                f"but not {wrong}: something replaced the function that they call, such as a hub kernel; load the "
                "model with use_kernels=False"
            )
        return [(layer, found[layer.name][0]) for layer in layers]

    def drop_write(self, layer: LayerInfo, store: Node, written: Node | None) -> None:
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


def copy_of(graph_module: GraphModule) -> GraphModule:
    """Copy what Dynamo traced: it counts the inputs of its own graph afterwards."""
    copied = copy.copy(graph_module)
    copied.graph = copy.deepcopy(graph_module.graph)
    return copied


def refuse_waiting(graph: Graph) -> None:
    """Raise a ``ValueError`` if values on the device are copied to the host, or sizes of tensors depend on them."""
    device = None  # of the first input
    for node in graph.nodes:
        examples = tree_leaves(node.meta.get("example_value"))
        tensors = [x for x in examples if isinstance(x, Tensor)]
        device = tensors[0].device if tensors and device is None else device
        unknown = any(
            free_unbacked_symbols(x) for x in examples if isinstance(x, Tensor | torch.SymInt | torch.SymFloat)
        )
        copied = node.op == "call_method" and any(x.device != device for x in tensors)
        if unknown or copied:
            paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
            where = f" in {paths[-1].removeprefix(_MODEL)}" if paths else ""
            raise ValueError(
                f"{node.target}{where} copies values of a tensor to the host or sizes a result by them, so that a GPU "
                "would wait for its host in every round and no CUDA graph could hold one; compile with backend='eager'"
            )


def _layer_of(node: Node, layers: Sequence[LayerInfo]) -> str:
    """Find the layer that traced a node. Dynamo writes the path of the module behind that of the whole."""
    paths = [path for path, _ in node.meta["nn_module_stack"].values()]
    for layer in layers:
        if any(path.endswith("." + layer.name) for path in paths):
            return layer.name
    raise AssertionError(f"{node} comes from {paths}, which is no layer of this model that calls such a function")
