"""The pass that convolves each node over its own ancestors, and lets the window wait.

    before   both = cat([window, columns], dim=-1)
             window.copy_(both[..., -width:])
             convolved = convolution_marker(both, weight, bias, activation, parents)

    after    convolved = tree_conv(columns, window, weight, bias, parents, activation)

The columns are handed out: what a commit of the window needs. Behind the marker layers take the last columns, which are
all of them now.
"""

from typing import Any

import torch
from torch.fx import Node

import treewy.ops  # noqa: F401 - registers what goes into the graph
from treewy.passes._anchors import GdnLayerInfo
from treewy.passes._graph import TreeGraph


def convolve_over_ancestors(tree: TreeGraph, layer: GdnLayerInfo, call: Node) -> None:
    """Rewrite a layer's convolution.

    Args:
        tree: The graph; rewritten in place.
        layer: Who called it.
        call: The marker.

    Raises:
        ValueError: If the layer keeps its window in a way that is not known.
    """
    arguments: tuple[Any, ...] = call.args
    both, weight, bias, activation, parents = arguments
    window, columns = _window_and_columns(both, layer)
    graph = tree.graph
    (last,) = (node for node in both.users if node is not call)
    tree.drop_write(layer, window, last)
    graph.erase_node(last)
    with graph.inserting_before(call):
        if bias is None:
            bias = graph.call_method("new_empty", (weight, (0,)))
        token_major = graph.call_method("transpose", (columns, 1, 2))
        convolved = graph.call_function(
            torch.ops.treewy.tree_conv.default, (token_major, window, weight, bias, parents, activation or "")
        )
        channel_major = graph.call_method("transpose", (convolved, 1, 2))
    channel_major.meta = call.meta.copy()
    call.replace_all_uses_with(channel_major)
    graph.erase_node(call)
    graph.erase_node(both)
    tree.handed_out[layer.name, "columns"] = columns


def _window_and_columns(both: Node, layer: GdnLayerInfo) -> tuple[Node, Node]:
    parts: Any = both.args[0] if both.target is torch.cat else ()
    others = len(both.users) - 1
    if len(parts) != 2 or parts[0].op != "placeholder" or others != 1:
        raise ValueError(
            f"layer {layer.name!r} does not put its convolution window before the new columns and keep the end of "
            "both, the one way that treewy knows; generate without a drafter"
        )
    return parts[0], parts[1]
