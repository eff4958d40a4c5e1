"""The pass that solves the tree where a layer called its delta rule, and lets the state wait.

    before   output, new_state = delta_rule_marker(query, key, value, log_decay, beta, state, parents, qk_l2norm)
             state.copy_(new_state)

    after    output, known_after = tree_wy_verify_(
                 state, no slots, ring of known rows, number of known rows, pseudo-values of the last tree,
                 value, query, key, log_decay, beta, parents, keys and log decays of the last tree,
                 accepted path and its length, scale, qk_l2norm)

The write of the state is what makes rejected drafts unrecoverable. It is dropped. What was accepted in the last tree
goes into the ring or the state when the next tree is verified, and the tree itself leaves its pseudo-values in their
scratch, and keys and log decays handed out. The ring and all that belongs to it are stores of the graph.
"""

import operator
from typing import Any

import torch
from torch.fx import Node

import treewy.ops  # noqa: F401 - registers what goes into the graph
from treewy.passes._anchors import GdnLayerInfo
from treewy.passes._graph import TreeGraph


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
    *repeated, value, log_decay, beta, state, parents, qk_l2norm = arguments
    results = {node.args[1]: node for node in call.users}
    assert all(node.target is operator.getitem for node in call.users)
    graph = tree.graph
    tree.drop_write(layer, state, results.get(1))
    ring = (tree.store(layer.name, "ring_" + what) for what in ("pseudo_value", "key", "log_decay"))
    last = (tree.store(layer.name, "last_" + what) for what in ("key", "log_decay"))
    path = (tree.store("", what) for what in ("path", "path_length"))
    with graph.inserting_before(call):
        query, key = (_one_of_each_key_head(tree, x, layer) for x in repeated)
        no_slots = graph.call_method("new_empty", (parents, (0,)))
        verified = graph.call_function(
            torch.ops.treewy.tree_wy_verify_.default,
            (
                *(state, no_slots, *ring, tree.store("", "num_known"), tree.store(layer.name, "pseudo_value")),
                *(value, query, key, log_decay, beta, parents, *last, *path),
                *(_shape(key)[-1] ** -0.5, qk_l2norm),
            ),
        )
        output, known_after = (graph.call_function(operator.getitem, (verified, i)) for i in range(2))
    output.meta = results[0].meta.copy()
    results[0].replace_all_uses_with(output)
    for node in (*results.values(), call, *repeated):
        if not node.users:
            graph.erase_node(node)
    tree.handed_out[layer.name, "key"] = key
    tree.handed_out[layer.name, "log_decay"] = log_decay
    tree.handed_out["", "num_known"] = known_after  # every layer's is the same


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["example_value"].shape)


def _one_of_each_key_head(tree: TreeGraph, node: Node, layer: GdnLayerInfo) -> Node:
    """Undo what transformers 5.17 does before the rule: it repeats key heads to as many as there are value heads."""
    step = _shape(node)[2] // layer.num_key_heads
    if step == 1:
        return node
    if (node.target, node.args[1:], node.kwargs) == ("repeat_interleave", (step,), {"dim": 2}):
        once = node.args[0]
        assert isinstance(once, Node)
        return once
    kept = tree.graph.call_function(operator.getitem, (node, (slice(None), slice(None), slice(None, None, step))))
    kept.meta["example_value"] = node.meta["example_value"][:, :, ::step]
    return kept
