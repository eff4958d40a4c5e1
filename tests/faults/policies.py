"""Mistakes of the commit policies: what waits, what is folded when, and snapshots."""

from faults.fault import Fault

_TREE_STORES = "tests/test_tree_stores.py::"
_REJECTED = "tests/test_rejected_nodes.py::"
_NODES = "treewy_compile/_nodes.py"
_SNAPSHOTS = "treewy_compile/_snapshots.py"
_SNAPSHOT_OPERATOR = "ops/_snapshots.py"
_SNAPSHOT_KERNEL = "ops/_snapshot_kernel.py"
_OPERATOR_TESTS = "tests/ops/test_snapshots.py::"
_KERNEL_TESTS = "tests/ops/test_snapshots_interpreted.py::"
_POLICIES = "tests/test_policies.py::"
_STATE = _POLICIES + "test_state_after_commits_equals_the_float64_recurrence"
_CASES = "tests/test_cases.py::"
_STORES = "tests/test_stores.py::"

POLICIES = [
    Fault(
        "queries are not scaled",
        _NODES,
        "key.shape[-1] ** -0.5,",
        "1.0,",
        (_CASES + "test_the_first_node_equals_a_plain_decode_step[1-qwen3_next]",),
    ),
    Fault(
        "of repeated key heads too many are dropped: the ratio is that of the value heads",
        "treewy_compile/_tree_forward.py",
        "step = key.shape[2] // self.current.num_key_heads",
        "step = value.shape[2] // self.current.num_key_heads",
        (_CASES + "test_the_first_node_equals_a_plain_decode_step[1-qwen3_next]",),
    ),
    Fault(
        "all levels above are ancestors of a new level",
        _NODES,
        "prefix_mask = ancestor_mask(parents)[:, num_before:, :num_before]",
        "prefix_mask = torch.ones_like(ancestor_mask(parents))[:, num_before:, :num_before]",
        (_TREE_STORES + "test_a_tree_grown_level_by_level_equals_the_tree_at_once[qwen3_next-WyNodes]",),
    ),
    Fault(
        "known rows come behind the levels above",
        _NODES,
        "self._known.followed_by(prefix), torch.cat([known, mask], dim=2)",
        "prefix.followed_by(self._known), torch.cat([mask, known], dim=2)",
        (_TREE_STORES + "test_a_tree_grown_level_by_level_equals_the_tree_at_once[qwen3_next-DeferredNodes]",),
    ),
    Fault(
        "the count of known rows is not reset by a fold",
        _NODES,
        "self._num_known = torch.where(rows, 0, self._num_known)",
        "self._num_known = torch.where(rows, self._num_known, self._num_known)",
        (_POLICIES + "test_a_path_longer_than_the_ring_is_committed_whole[DeferredNodes]",),
    ),
    Fault(
        "a fold writes rows that still have room",
        _NODES,
        "torch.where(rows, self._num_known - 1, -1)",
        "self._num_known - 1",
        (_POLICIES + "test_a_path_longer_than_the_ring_is_committed_whole[DeferredNodes]",),
    ),
    Fault(
        "when one row of the batch is full, all are folded",
        _NODES,
        "self._fold_(state, full)",
        "self._fold_(state, torch.ones_like(full))",
        (_POLICIES + "test_deferred_commits_write_a_row_only_when_its_ring_is_full",),
    ),
    Fault(
        "known rows that another row of the batch has are read",
        _NODES,
        "known = (index < self._num_known[:, None])",
        "known = (index < self._num_known.max().expand(len(mask), 1))",
        (_REJECTED + "test_what_is_left_of_rejected_nodes_changes_no_bit[DeferredNodes-PoisonedDeferredNodes]",),
    ),
    Fault(
        "a path is written over the end of a full ring",
        _NODES,
        "ours[row, start[row] + place] = theirs[row, path[row, place]]",
        "ours[row, (start[row] + place) % _RING_ROWS] = theirs[row, path[row, place]]",
        (_POLICIES + "test_a_path_longer_than_the_ring_is_committed_whole[DeferredNodes]",),
    ),
    Fault(
        "the ring keeps the first nodes of the tree, as many as the path has",
        _NODES,
        "theirs[row, path[row, place]]",
        "theirs[row, place]",
        (_STATE + "[DeferredNodes-1]",),
    ),
    Fault(
        "what was fused into a solve is known to it as well",
        _NODES,
        "self.materialize_(state)\n        return prefix, mask",
        "if self._known is not None:\n"
        "            chain = torch.arange(-1, self._known.size - 1).expand(len(state), -1)\n"
        "            self._known.fold_(state, chain, self._num_known - 1)\n"
        "        return super()._behind_known_rows(state, prefix, mask)",
        (_POLICIES + "test_fused_commits_reach_the_state_when_the_next_tree_begins",),
    ),
    Fault(
        "a snapshot of the parent is committed",
        _SNAPSHOTS,
        "chosen = accepted_node.clamp(min=0)",
        "chosen = parents.gather(1, accepted_node.clamp(min=0)[:, None])[:, 0].clamp(min=0)",
        (_STATE + "[SnapshotNodes-1]",),
    ),
    Fault(
        "roots of a tree start from the last node's snapshot",
        _SNAPSHOT_OPERATOR,
        "before = torch.where((parent >= 0)[:, None, None, None], stored, committed_state).to(dtype)",
        "before = (states[rows, parent] if node > 0 else committed_state).to(dtype)",
        (
            _OPERATOR_TESTS + "test_equals_the_recurrence_in_float64_and_float32",
            _TREE_STORES
            + "test_committing_any_node_of_any_tree_equals_its_path_token_by_token[qwen3_next-SnapshotNodes]",
        ),
    ),
    Fault(
        "all rows take the window of row 0",
        _SNAPSHOTS,
        "self._windows[rows, chosen]",
        "self._windows[0, chosen]",
        (_STORES + "test_stores_follow_for_forty_tokens_of_rows_that_accept_differently[qwen3_next-SnapshotNodes]",),
    ),
    Fault(
        "snapshots tile the key heads",
        _SNAPSHOT_OPERATOR,
        "k, q = k.repeat_interleave(ratio, dim=2), q.repeat_interleave(ratio, dim=2)",
        "k, q = k.repeat(1, 1, ratio, 1), q.repeat(1, 1, ratio, 1)",
        (
            _OPERATOR_TESTS + "test_equals_the_recurrence_in_float64_and_float32",
            _STATE + "[SnapshotNodes-1]",
        ),
    ),
    Fault(
        "levels above a tree's level are the committed state",
        _SNAPSHOT_OPERATOR,
        "states[:, :num_earlier] = earlier_states",
        "states[:, :num_earlier] = committed_state[:, None]",
        (_OPERATOR_TESTS + "test_a_tree_grown_in_parts_has_the_bits_of_the_tree_at_once",),
    ),
    Fault(
        "a padding node that is accepted replaces the state",
        _SNAPSHOTS,
        "kept = (accepted_node < 0) | (parents[rows, chosen] == PADDING)",
        "kept = accepted_node < 0",
        (_POLICIES + "test_accepting_a_padding_node_leaves_the_state[SnapshotNodes]",),
    ),
    Fault(
        "the kernel keeps the state after a leaf for its sibling",
        _SNAPSHOT_KERNEL,
        "if following_parent == node + num_earlier:",
        "if following_parent == parent or following_parent == node + num_earlier:",
        (_KERNEL_TESTS + "test_equals_the_recurrence_on_chosen_trees_and_sizes[widths 3, 3, 3]",),
    ),
    Fault(
        "the kernel keeps the state for whatever comes next",
        _SNAPSHOT_KERNEL,
        "elif following_parent != parent:",
        "elif following_parent < 0:",
        (_KERNEL_TESTS + "test_equals_the_recurrence_on_chosen_trees_and_sizes[any node may be the parent]",),
    ),
    Fault(
        "the kernel forgets the padding",
        _SNAPSHOT_KERNEL,
        "if num_real < num_nodes:",
        "if num_real < 0:",
        (_KERNEL_TESTS + "test_padding_is_inert_whatever_it_holds",),
    ),
    Fault(
        "the kernel normalises the key once where it enters twice",
        _SNAPSHOT_KERNEL,
        "(v_raw.to(tl.float32) - decay * k_factor * from_key) * k_factor",
        "(v_raw.to(tl.float32) - decay * k_factor * from_key)",
        (_KERNEL_TESTS + "test_equals_the_recurrence_on_chosen_trees_and_sizes[one node]",),
    ),
    Fault(
        "the kernel counts earlier states as nodes",
        _SNAPSHOT_KERNEL,
        "before = states + (following_parent - num_earlier) * node_stride",
        "before = states + following_parent * node_stride",
        (_KERNEL_TESTS + "test_equals_the_recurrence",),
    ),
]
