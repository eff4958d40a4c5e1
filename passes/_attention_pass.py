"""The pass that attends from nodes to the cached prefix and to their own ancestors: the tree-mask rewrite.

    before   output = attention_marker(
                 query, key, value, key_cache, value_cache, start, length, parents, scale, window, more)

    after    output = tree_attention(query, key, value, key_cache, value_cache, start, length, parents, scale, window)

Nothing is left of masks: which columns and which nodes a node sees follows from `start`, `length` and `parents`, and
from the layer's window, a number or 0 for none. The three are tensors on the device, so that one graph serves every
tree. Nor are keys and values of nodes written into the cache before some of them are accepted; they are handed out.
"""

from typing import Any

import torch
from torch.fx import Node

import treewy.ops  # noqa: F401 - registers what goes into the graph
from treewy.passes._anchors import AttentionLayerInfo
from treewy.passes._graph import TreeGraph


def attend_to_ancestors(tree: TreeGraph, layer: AttentionLayerInfo, call: Node) -> None:
    """Rewrite a layer's attention.

    Args:
        tree: The graph; rewritten in place.
        layer: Who called it.
        call: The marker.

    Raises:
        ValueError: If the layer asks for more than a softmax over what it sees, or for another window than its mask's.
    """
    arguments: tuple[Any, ...] = call.args
    nodes, prefix_and_tree, more = arguments[:3], arguments[3:-1], arguments[-1]
    if more:
        raise ValueError(
            f"layer {layer.name!r} attends with {more}, which a compiled tree forward does not know; compile with "
            "backend='eager'"
        )
    graph = tree.graph
    with graph.inserting_before(call):
        token_major = [graph.call_method("transpose", (x, 1, 2)) for x in nodes]
        attended = graph.call_function(torch.ops.treewy.tree_attention.default, (*token_major, *prefix_and_tree))
    attended.meta = call.meta.copy()
    call.replace_all_uses_with(attended)
    graph.erase_node(call)
    tree.handed_out[layer.name, "key"], tree.handed_out[layer.name, "value"] = nodes[1:]
