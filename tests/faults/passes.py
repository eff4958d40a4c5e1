"""Mistakes in the passes over the graph of a tree forward."""

from faults.fault import Fault

_BACKEND = "tests/passes/test_backend.py::"
_REWRITTEN = _BACKEND + "test_every_layer_is_rewritten_and_nothing_that_is_committed_is_written"

PASSES = [
    Fault(
        "a layer hands out its values for its pseudo-values",
        "passes/_delta_rule_pass.py",
        'tree.handed_out[layer.name, "pseudo_value"] = pseudo_value',
        'tree.handed_out[layer.name, "pseudo_value"] = value',
        (_REWRITTEN + "[qwen3_next]",),
    ),
    Fault(
        "a compiled forward scales queries by the width of values",
        "passes/_delta_rule_pass.py",
        "scale = _shape(key)[-1] ** -0.5",
        "scale = _shape(value)[-1] ** -0.5",
        (_REWRITTEN + "[qwen3_next]",),
    ),
    Fault(
        "a compiled convolution drops its activation",
        "passes/_convolution_pass.py",
        'bias, parents, activation or "")',
        'bias, parents, "")',
        (_REWRITTEN + "[qwen3_next]",),
    ),
    Fault(
        "the write that a pass drops is left in the graph",
        "passes/_graph.py",
        "        uses[0].replace_all_uses_with(store)\n        self.graph.erase_node(uses[0])\n",
        "        uses[0].args = (store, store)\n",
        (_REWRITTEN + "[qwen3_next]",),
    ),
    Fault(
        "a layer that no pass has rewritten goes unseen",
        "passes/_graph.py",
        "if len(nodes) != 1]",
        "if len(nodes) > 1]",
        (_BACKEND + "test_layers_that_are_not_in_the_graph_are_named",),
    ),
    Fault(
        "what a forward hands out is given to the wrong layers",
        "passes/_backend.py",
        "names = tuple(tree.handed_out)",
        "names = tuple(reversed(tree.handed_out))",
        (_REWRITTEN + "[qwen3_next]",),
    ),
]
