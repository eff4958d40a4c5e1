"""The pass that solves the tree where a layer called its delta rule, and lets the state wait.

    before   output, new_state = delta_rule_marker(query, key, value, log_decay, beta, state, parents, qk_l2norm)
             state.copy_(new_state)

    after    output, pseudo_value, key_as_used, _ = tree_wy_solve(
                 value, query, key, log_decay, beta, state, parents, no prefix, scale, qk_l2norm)

The write of the state is what makes rejected drafts unrecoverable. It is dropped, and pseudo-values, keys and log
decays are handed out: what a commit needs.
"""

import operator
from typing import Any

import torch
from torch.fx import Node

import treewy.ops  # noqa: F401 - registers what goes into the graph
from treewy.passes._anchors import GdnLayerInfo
from treewy.passes._graph import TreeGraph

_NO_ROWS = (slice(None), slice(0, 0))


def solve_instead_of_delta_rule(tree: TreeGraph, layer: GdnLayerInfo, call: Node) -> None:
    """Rewrite a layer's delta rule.

    Args:
        tree: The graph; rewritten in place.
        layer: Who called it.
        call: The marker.

    Raises:
        ValueError: If the layer keeps its state in a way that is not known.
    """
    arguments: tuple[Any, ...] = call.args
    query, key, value, log_decay, beta, state, parents, qk_l2norm = arguments
    results = {node.args[1]: node for node in call.users}
    assert all(node.target is operator.getitem for node in call.users)
    graph = tree.graph
    tree.drop_write(layer, state, results.get(1))
    with graph.inserting_before(call):
        query, key = (_one_of_each_key_head(tree, x, layer) for x in (query, key))
        nothing = (graph.call_function(operator.getitem, (x, _NO_ROWS)) for x in (value, key, log_decay))
        mask = graph.call_method("new_empty", (parents, (*_shape(parents), 0)), {"dtype": torch.bool})
        scale = _shape(key)[-1] ** -0.5
        solved = graph.call_function(
            torch.ops.treewy.tree_wy_solve.default,
            (value, query, key, log_decay, beta, state, parents, *nothing, mask, scale, qk_l2norm),
        )
        output, pseudo_value, key_as_used = (graph.call_function(operator.getitem, (solved, i)) for i in range(3))
    results[0].replace_all_uses_with(output)
    for node in (*results.values(), call):
        graph.erase_node(node)
    tree.handed_out[layer.name, "pseudo_value"] = pseudo_value
    tree.handed_out[layer.name, "key"] = key_as_used
    tree.handed_out[layer.name, "log_decay"] = log_decay


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["example_value"].shape)


def _one_of_each_key_head(tree: TreeGraph, node: Node, layer: GdnLayerInfo) -> Node:
    """Undo what transformers 5.17 does before the rule: it repeats key heads to as many as there are value heads."""
    step = _shape(node)[2] // layer.num_key_heads
    if step == 1:
        return node
    kept = tree.graph.call_function(operator.getitem, (node, (slice(None), slice(None), slice(None, None, step))))
    kept.meta["example_value"] = node.meta["example_value"][:, :, ::step]
    return kept
