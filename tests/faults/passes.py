"""Mistakes in the passes over the graph of a tree forward, and in the stores and rounds around it."""

from faults.fault import Fault

_BACKEND = "tests/passes/test_backend.py::"
_REWRITTEN = _BACKEND + "test_every_layer_is_rewritten_and_nothing_that_is_committed_is_written"
_ROUNDS = "tests/test_compiled_rounds.py::"
_STORES = _ROUNDS + "test_stores_equal_a_token_by_token_run_after_every_round[qwen3_next-deferred]"
_MANY = "tests/test_many_compiled_rounds.py::test_hundreds_of_rounds_compile_nothing_and_keep_the_stores[aot_eager]"
_MADE_UP = "tests/test_made_up_model.py::test_a_model_that_follows_the_pattern_gives_its_plain_text[aot_eager]"
_CAPTURABLE = (
    "tests/test_capturable_rounds.py::"
    "test_a_round_that_chooses_in_any_way_is_graphs_that_a_capture_takes_and_what_it_would_not_take_is_seen"
)
_REFUSED = _BACKEND + "test_an_attention_that_a_tree_does_not_know_is_refused_by_name"

_NARROW = "tests/passes/test_narrow_linears.py::"
_SEGMENTS = "tests/passes/test_segments.py::"

PASSES = [
    Fault(
        "layers count as alike whose inputs lie otherwise",
        "passes/_segments.py",
        "(*example.shape, *example.stride())",
        "example.shape",
        (_SEGMENTS + "test_inputs_that_differ_make_layers_differ[strides]",),
    ),
    Fault(
        "layers count as alike of which one reads what it moves",
        "passes/_segments.py",
        "storages.setdefault(storage, len(storages))",
        "0",
        (_SEGMENTS + "test_inputs_that_differ_make_layers_differ[memory]",),
    ),
    Fault(
        "what waits for the host goes into a graph",
        "passes/_backend.py",
        "        refuse_waiting(graph_module.graph)\n",
        "",
        ("tests/test_compiled_refusals.py::test_what_waits_for_the_host_is_refused_by_name",),
    ),
    Fault(
        "layers that differ in a number count as alike",
        "passes/_segments.py",
        'lines.append(f"{node.op} {place} {arguments}")',
        'lines.append(f"{node.op} {place}")',
        (_SEGMENTS + "test_layers_alike_are_compiled_once",),
    ),
    Fault(
        "a graph is cut behind what a layer adds up",
        "passes/_segments.py",
        "for path in paths[:-1])",
        "for path in paths)",
        (_SEGMENTS + "test_a_layers_sum_is_compiled_with_what_follows",),
    ),
    Fault(
        "narrow projections stay in float32",
        "passes/_narrow_linear_pass.py",
        'graph.call_method("to", (sums, x.meta["example_value"].dtype))',
        'graph.call_method("clone", (sums,))',
        (_NARROW + "test_narrow_projections_become_sums_in_float32",),
    ),
    Fault(
        "narrow projections of many rows become sums",
        "passes/_narrow_linear_pass.py",
        "weight.shape[0] <= _MOST_OUTPUTS and result.numel() <= _MOST_SUMS",
        "weight.shape[0] <= _MOST_OUTPUTS",
        (_NARROW + "test_many_rows_stay",),
    ),
    Fault(
        "places in parts of a vocabulary are counted across them",
        "treewy_compile/_greedy.py",
        "part * parts.shape[-1] + index.gather(-1, part)",
        "index.gather(-1, part) * _PARTS + part",
        ("tests/test_greedy_decoding.py::test_the_first_of_the_greatest_scores_is_taken",),
    ),
    Fault(
        "a layer hands out its queries for its keys",
        "passes/_delta_rule_pass.py",
        'tree.handed_out[layer.name, "key"] = key',
        'tree.handed_out[layer.name, "key"] = query',
        (_REWRITTEN + "[qwen3_next]",),
    ),
    Fault(
        "a compiled forward scales queries by the width of values",
        "passes/_delta_rule_pass.py",
        "(_shape(key)[-1] ** -0.5, qk_l2norm)",
        "(_shape(value)[-1] ** -0.5, qk_l2norm)",
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
        "a compiled attention takes keys for values",
        "passes/_attention_pass.py",
        "for x in nodes]",
        "for x in (nodes[0], nodes[1], nodes[1])]",
        (_REWRITTEN + "[qwen3_next]",),
    ),
    Fault(
        "what else an attention asks for is dropped",
        "passes/_attention_pass.py",
        "    if more:\n",
        "    if False:\n",
        (_REFUSED,),
    ),
    Fault(
        "a compiled attention has no window",
        "passes/_anchors.py",
        'kwargs["scaling"], window if isinstance(window, int) else 0',
        'kwargs["scaling"], 0',
        (_REWRITTEN + "[lara_mini]",),
    ),
    Fault(
        "a window that is not its mask's goes unseen",
        "passes/_anchors.py",
        "if window != shown or (window is not None and window < 1):",
        "if window is not None and window < 1:",
        (_BACKEND + "test_a_window_that_is_not_its_masks_is_refused_by_name[6-7]",),
    ),
    Fault(
        "stores serve a model whose window has changed",
        "treewy_compile/_static_stores.py",
        "return same and list(self._shown.values()) == cache.windows and",
        "return same and",
        (_BACKEND + "test_stores_do_not_serve_masks_that_show_another_number_of_tokens",),
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
    Fault(
        "all layers share the ring of the first",
        "passes/_graph.py",
        "        name = layer_name, what\n",
        '        name = next((n for n in self._taken if n[1] == what and "ring" in what), (layer_name, what))\n',
        (_STORES,),
    ),
    Fault(
        "keys of rejected nodes are committed for those of the path",
        "treewy_compile/_static_stores.py",
        "source = torch.where(index < length[:, None], path, index)",
        "source = index.expand_as(path)",
        (_STORES,),
    ),
    Fault(
        "a compiled commit leaves the number of known rows",
        "treewy_compile/_static_stores.py",
        '"num_known"].copy_(handed_out["", "num_known"])\n            self.of_layers["", "path"][',
        '"num_known"].clone()\n            self.of_layers["", "path"][',
        (_STORES,),
    ),
    Fault(
        "a commit is compiled for the columns that there are",
        "treewy_compile/_static_stores.py",
        "            torch._dynamo.mark_dynamic(pool, 3)\n",
        "",
        (_ROUNDS + "test_nothing_is_compiled_again_when_keys_and_values_grow",),
    ),
    Fault(
        "of the largest tree only what fits is handed over",
        "treewy_compile/_static_stores.py",
        "range(0, chain.shape[1], _SLICE)",
        "range(0, _SLICE, _SLICE)",
        (_ROUNDS + "test_the_largest_tree_is_handed_over_whole",),
    ),
    Fault(
        "generations that run at the same time share their stores",
        "treewy_compile/_compiled_session.py",
        "                self._free.remove(fitting[-1])\n",
        "                pass\n",
        ("tests/test_compiled_reuse.py::test_a_generation_within_another_has_stores_of_its_own",),
    ),
    Fault(
        "a compiled commit leaves positions",
        "treewy_compile/_static_stores.py",
        "(self.lengths, self._length, self.next_position)",
        "(self.lengths, self._length)",
        (_STORES,),
    ),
    Fault(
        "a prefix is read from its pads on",
        "treewy_compile/_static_stores.py",
        "self._start.copy_(start)",
        "self._start.zero_()",
        (_STORES,),
    ),
    Fault(
        "a second generation goes on with the ring of the first",
        "treewy_compile/_static_stores.py",
        "(*self.of_layers.values(), *behind)",
        "(*behind,)",
        (_ROUNDS + "test_tokens_rounds_and_the_cache_are_those_of_the_eager_engine[deferred]",),
    ),
    Fault(
        "the path is left out of the state that is handed over",
        "treewy_compile/_static_stores.py",
        "accepted = torch.where(length > 0, size + length - 1, known - 1)",
        "accepted = known - 1",
        (_STORES,),
    ),
    Fault(
        "a compiled convolution drops its bias",
        "passes/_convolution_pass.py",
        "        if bias is None:\n",
        "        if True:\n",
        (_MADE_UP,),
    ),
    Fault(
        "attention layers are known by the name that Qwen gives them",
        "passes/_anchors.py",
        'if {_ATTENTION, "update"} <= names_called(type(module))',
        'if name.endswith("self_attn")',
        (_MADE_UP,),
    ),
    Fault(
        "a commit counts its nodes on the CPU and moves them",
        "treewy_compile/_static_stores.py",
        "index = torch.arange(num_nodes, device=path.device)",
        "index = torch.arange(num_nodes).to(path.device)",
        (_CAPTURABLE,),
    ),
    Fault(
        "room for keys and values is made for the nodes that were drafted, not for their padding",
        "treewy_compile/_compiled_session.py",
        "self._place.reserve(columns + forward.num_nodes)",
        "self._place.reserve(columns + num_nodes)",
        (_MANY,),
    ),
    Fault(
        "a forward is compiled for the columns that there are",
        "treewy_compile/_static_stores.py",
        "                torch._dynamo.mark_dynamic(tensor, 2)\n",
        "                pass\n",
        (_MANY,),
    ),
]
