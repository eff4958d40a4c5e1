"""Mistakes in the three stores: convolution window, attention entries, positions, and what is handed over."""

from faults.fault import Fault

_TREE_STORES = "tests/test_tree_stores.py::"
_REJECTED = "tests/test_rejected_nodes.py::"
_CACHE = "treewy_compile/_cache.py"
_NODES = "treewy_compile/_nodes.py"
_CASES = "tests/test_cases.py::"
_PATHS = _CASES + "test_the_accepted_path_is_committed_wherever_its_nodes_lie"
_WINDOW = _CASES + "test_the_window_holds_accepted_inputs_only"
_STORES = "tests/test_stores.py::"

STORES = [
    Fault(
        "the window keeps rejected columns",
        _NODES,
        "return both.gather(2, source[:, None].expand(-1, window.shape[1], -1))",
        "return both[..., -width:]",
        (_WINDOW + "[1-qwen3_next]",),
    ),
    Fault(
        "the window is not moved",
        _NODES,
        "window.copy_(window_after(window, self._columns, path, length))",
        "window.copy_(window)",
        (_WINDOW + "[1-qwen3_next]",),
    ),
    Fault(
        "the window ends one column too early",
        _NODES,
        "position = length[:, None] + torch.arange(width",
        "position = (length[:, None] - 1).clamp(min=0) + torch.arange(width",
        (_WINDOW + "[1-qwen3_next]",),
    ),
    Fault(
        "the window takes the first columns of the tree, as many as the path has nodes",
        _NODES,
        "node = path.gather(1, (position - width).clamp(0, path.shape[1] - 1))",
        "node = (position - width).clamp(0, path.shape[1] - 1)",
        (_PATHS + "[2-path6-qwen3_next]",),
    ),
    Fault(
        "keys and values of the path stay where the tree had them",
        _CACHE,
        "store[rows, :, target] = store[rows, :, source]",
        "store[rows, :, target] = store[rows, :, target]",
        (_PATHS + "[2-path6-qwen3_next]",),
    ),
    Fault(
        "keys of the path are moved, values are not",
        _CACHE,
        "for store in (self.keys, self.values):",
        "for store in (self.keys,):",
        (_PATHS + "[2-path6-qwen3_next]",),
    ),
    Fault(
        "keys and values are moved one by one from the end, before all are gathered",
        _CACHE,
        "store[rows, :, target] = store[rows, :, source]",
        "for step in reversed(range(path.shape[1])):\n"
        "                store[rows[:, 0], :, target[:, step]] = store[rows[:, 0], :, source[:, step]]",
        (_TREE_STORES + "test_committing_any_node_of_any_tree_equals_its_path_token_by_token[qwen3_next-WyNodes]",),
    ),
    Fault(
        "rejected entries of rows that accept less are attended to",
        _CACHE,
        "grown[rows, self.lengths[:, None] + index] = index < length[:, None]",
        "grown[rows, self.lengths[:, None] + index] = True",
        (_STORES + "test_stores_follow_for_forty_tokens_of_rows_that_accept_differently[qwen3_next-WyNodes]",),
    ),
    Fault(
        "new nodes are stored behind the longest row",
        "treewy_compile/_tree_forward.py",
        "return self.lengths[:, None] + index",
        "return torch.full_like(self.lengths, self.columns_used)[:, None] + index",
        (_CASES + "test_rows_that_accept_less_do_not_drift[qwen3_next]",),
    ),
    Fault(
        "pads are attended to",
        _CACHE,
        "self._committed = mask.bool()",
        "self._committed = torch.ones_like(mask).bool()",
        (_CASES + "test_pads_are_never_seen[lengths0-sdpa-qwen3_next]",),
    ),
    Fault(
        "siblings attend to each other",
        _CACHE,
        "ancestors | itself)",
        "ancestors | itself | (forward.parents[:, forward.num_known :, None] == forward.parents[:, None]))",
        (_CASES + "test_a_node_sees_no_sibling_and_no_cousin[1-qwen3_next]",),
    ),
    Fault(
        "nodes attend to all nodes before them",
        _CACHE,
        "ancestors = ancestor_mask(forward.parents)[:, forward.num_known :]",
        "ancestors = torch.ones_like(ancestor_mask(forward.parents)).tril()[:, forward.num_known :]",
        (_CASES + "test_a_node_sees_no_sibling_and_no_cousin[1-qwen3_next]",),
    ),
    Fault(
        "the position of a node is its index",
        _CACHE,
        "depth = depths(forward.parents)[:, forward.num_known :].clamp(min=0)",
        "depth = torch.arange(forward.num_known, forward.parents.shape[1]).expand(len(forward.parents), -1)",
        (_CASES + "test_each_node_of_a_tree_equals_a_plain_forward_of_its_path[qwen3_next]",),
    ),
    Fault(
        "the position of a node is its column, pads counted",
        _CACHE,
        "return self._next_position[..., None] + depth",
        "return self.lengths[:, None] + depth",
        (_CASES + "test_pads_are_never_seen[lengths0-sdpa-qwen3_next]",),
    ),
    Fault(
        "positions go on behind the longest row",
        _CACHE,
        "self._next_position = self._next_position + length",
        "self._next_position = self._next_position + longest",
        (_CASES + "test_rows_that_accept_less_do_not_drift[qwen3_next]",),
    ),
    Fault(
        "the last token of the prompt and the first one behind it have the same position",
        "treewy_compile/_generate.py",
        '["position_ids"][..., -1].to(model.device) + 1',
        '["position_ids"][..., -1].to(model.device)',
        ("tests/test_generate_contract.py::test_max_length_counts_the_prompt[scripted-20]",),
    ),
    Fault(
        "a tree of one node takes the path that writes the window",
        _CACHE,
        "self.record_past = True",
        "self.record_past = False",
        (_CASES + "test_rounds_without_a_draft_go_on_from_what_was_accepted[WyNodes-qwen3_next]",),
    ),
    Fault(
        "reordered rows keep the length of the row that they replace",
        _CACHE,
        "self.lengths = self.lengths[index]",
        "self.lengths = self.lengths.clone()",
        (_TREE_STORES + "test_reordered_rows_go_on_as_the_rows_that_they_were[WyNodes]",),
    ),
    Fault(
        "reordered rows leave behind what waits to be folded in",
        _CACHE,
        "self.materialize()\n        for layer in self.layers:",
        "for layer in self.layers:",
        (_TREE_STORES + "test_reordered_rows_go_on_as_the_rows_that_they_were[DeferredNodes]",),
    ),
    Fault(
        "the cache is handed over without what waits to be folded in",
        _CACHE,
        "self.materialize()\n        plain =",
        "plain =",
        (_TREE_STORES + "test_the_cache_that_is_handed_out_continues_the_text[qwen3_next-DeferredNodes]",),
    ),
    Fault(
        "the cache is handed over with the columns of rejected nodes",
        _CACHE,
        "store[:, :, : self.columns_used].clone()",
        "store.clone()",
        (_TREE_STORES + "test_the_cache_that_is_handed_out_continues_the_text[qwen3_next-WyNodes]",),
    ),
    Fault(
        "layers with a sliding window get the mask of the others",
        "treewy_compile/_masks.py",
        '"sliding_attention": windowed,',
        '"sliding_attention": full,',
        (_STORES + "test_stores_follow_for_forty_tokens_of_rows_that_accept_differently[qwen3 sliding-WyNodes]",),
    ),
    Fault(
        "columns that the store grows by hold whatever was in memory",
        _CACHE,
        "store.new_zeros(*store.shape[:2], missing, store.shape[3])",
        "store.new_empty(*store.shape[:2], missing, store.shape[3])",
        (_REJECTED + "test_nothing_that_was_never_written_is_read[WyNodes]",),
    ),
    Fault(
        "a sliding window is a token too wide",
        _CACHE,
        "forward.num_known :, None] - window)[:, None]",
        "forward.num_known :, None] - window - 1)[:, None]",
        (_STORES + "test_stores_follow_for_forty_tokens_of_rows_that_accept_differently[qwen3 sliding-WyNodes]",),
    ),
    Fault(
        "a sliding window counts the columns of the tree, not depths",
        _CACHE,
        "place.scatter_(1, columns, place_of_node)",
        "place.scatter_(1, columns, columns)",
        (
            _TREE_STORES
            + "test_in_a_tree_deeper_than_a_sliding_window_each_node_sees_the_window_of_its_own_text[qwen3 sliding]",
        ),
    ),
    Fault(
        "a tree that fills the cache exactly is refused",
        "treewy_compile/_session.py",
        "columns > self._max_cache_len",
        "columns >= self._max_cache_len",
        ("tests/test_bad_arguments.py::test_a_text_and_its_trees_may_fill_the_cache_exactly",),
    ),
    Fault(
        "reordered rows of a vision model take the positions of other axes",
        _CACHE,
        "self._next_position = self._next_position[..., index]",
        "self._next_position = self._next_position[index]",
        (_TREE_STORES + "test_reordered_rows_keep_their_positions_on_every_axis",),
    ),
    Fault(
        "what a layer makes of its new state is dropped unseen",
        _CACHE,
        "        if recurrent_states is not self.forward.new_state:\n",
        "        if False:\n",
        ("tests/test_made_up_model.py::test_a_layer_that_departs_from_the_pattern_is_refused_by_name",),
    ),
]
