"""Mistakes in the operators: the solve, the commit, the convolution and the tree itself."""

from faults.fault import Fault

_SOLVE = "tests/ops/test_solve.py::"
_COMMIT = "tests/ops/test_commit.py::"
_CONV = "tests/ops/test_conv.py::"
_TREE = "tests/ops/test_tree.py::"

OPERATORS = [
    Fault(
        "the solve drops the decay between nodes",
        "ops/_solve.py",
        'decay = decay_behind.masked_fill(~on_path.unsqueeze(1), float("-inf")).exp()',
        "decay = on_path.unsqueeze(1).to(dtype).expand_as(decay_behind)",
        (_SOLVE + "test_equals_the_recurrence_in_float64_and_float32",),
    ),
    Fault(
        "the decay between two nodes includes that of the earlier one",
        "ops/_algebra.py",
        "torch.nn.functional.pad(suffix[..., 1:], (0, 1)), suffix[..., 0]",
        "suffix, suffix[..., 0]",
        (_SOLVE + "test_equals_the_recurrence_in_float64_and_float32",),
    ),
    Fault(
        "the decay of the root counts twice",
        "ops/_solve.py",
        "total_decay = total.exp().unsqueeze(-1)",
        "total_decay = (total + path_decay[..., prefix_length]).exp().unsqueeze(-1)",
        (_SOLVE + "test_equals_the_recurrence_in_float64_and_float32",),
    ),
    Fault(
        "decays are differences of long sums",
        "ops/_algebra.py",
        "return torch.nn.functional.pad(suffix[..., 1:], (0, 1)), suffix[..., 0]",
        "return suffix[..., :1] - masked_log_decay.cumsum(-1), suffix[..., 0]",
        (_SOLVE + "test_equals_the_recurrence_on_hard_inputs[gates from -1e-6 to -30]",),
    ),
    Fault(
        "the write strength is forgotten between nodes",
        "ops/_solve.py",
        "strength * key_mix[..., prefix_length:], strength * (values - known)",
        "key_mix[..., prefix_length:], strength * (values - known)",
        (_SOLVE + "test_equals_the_recurrence_in_float64_and_float32",),
    ),
    Fault(
        "the write strength counts twice",
        "ops/_solve.py",
        "strength * (values - known), upper",
        "strength * (strength * values - known), upper",
        (_SOLVE + "test_equals_the_recurrence_in_float64_and_float32",),
    ),
    Fault(
        "the small number of the L2 norm is added behind the root",
        "ops/_solve.py",
        "return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)",
        "return x / (x.norm(dim=-1, keepdim=True) + 1e-6)",
        (_SOLVE + "test_equals_the_recurrence_on_hard_inputs[keys of norm 1e-3]",),
    ),
    Fault(
        "value heads are tiled over the key heads where they meet the state",
        "ops/_algebra.py",
        "value_side[:, member::ratio]",
        "value_side[:, member * key_heads : (member + 1) * key_heads]",
        (_SOLVE + "test_value_heads_use_the_key_head_of_their_group",),
    ),
    Fault(
        "every prefix row is an ancestor of every node",
        "ops/_solve.py",
        "torch.cat([prefix_mask & ~padding[:, :, None]",
        "torch.cat([torch.ones_like(prefix_mask) & ~padding[:, :, None]",
        (_SOLVE + "test_equals_the_recurrence_in_float64_and_float32",),
    ),
    Fault(
        "cousins meet in the solve",
        "ops/_solve.py",
        "ancestor_mask(parents)], dim=2)",
        "torch.ones_like(ancestor_mask(parents)).tril()], dim=2)",
        (_SOLVE + "test_each_path_equals_that_path_alone",),
    ),
    Fault(
        "what a padding node holds is only multiplied by zero",
        "ops/_solve.py",
        "values = clean(value, padding).transpose(1, 2)",
        "values = (value.to(dtype) * ~padding[..., None, None]).transpose(1, 2)",
        (_SOLVE + "test_padding_is_inert_whatever_it_holds",),
    ),
    Fault(
        "commit forgets nothing of the old state",
        "ops/_commit.py",
        "total.exp()[:, :, None, None] * committed_state.to(dtype)",
        "committed_state.to(dtype)",
        (_COMMIT + "test_equals_writing_the_path_one_node_at_a_time",),
    ),
    Fault(
        "commit drops the decay along the path",
        "ops/_commit.py",
        "decay_behind.exp().unsqueeze(-1) * values",
        "values",
        (_COMMIT + "test_equals_writing_the_path_one_node_at_a_time",),
    ),
    Fault(
        "rows without a slot write slot 0",
        "ops/_commit.py",
        "torch.where(commits, torch.arange(commits.shape[0], device=commits.device), first)",
        "torch.arange(commits.shape[0], device=commits.device)",
        (_COMMIT + "test_rows_without_a_slot_do_not_alias_slot_0",),
    ),
    Fault(
        "rows that accept nothing commit node 0",
        "ops/_tree.py",
        "mask.gather(1, row).squeeze(1) & (accepted_node >= 0)[:, None]",
        "mask.gather(1, row).squeeze(1)",
        (_TREE + "test_accepting_nothing_or_padding_gives_the_empty_path",),
    ),
    Fault(
        "the depth of a node is its index",
        "ops/_tree.py",
        "return ancestor_mask(parents).sum(-1) - 1",
        "return torch.where(parents == PADDING, -1, torch.arange(parents.shape[1], device=parents.device))",
        (_TREE + "test_ancestors_depths_and_paths_equal_walking_up",),
    ),
    Fault(
        "pointers are doubled once too seldom",
        "ops/_tree.py",
        "while span < num_nodes:",
        "while 2 * span < num_nodes:",
        (_TREE + "test_a_chain_of_every_length_is_all_ancestors",),
    ),
    Fault(
        "the convolution takes the nodes before a node for its ancestors",
        "ops/_conv.py",
        "parents.long().gather(1, node.clamp(min=0)), node)",
        "node - 1, node)",
        (_CONV + "test_equals_the_convolution_of_each_path",),
    ),
    Fault(
        "the convolution skips the newest column of the window",
        "ops/_conv.py",
        "column = window_length + depth - steps_back",
        "column = window_length + depth - steps_back - 1",
        (_CONV + "test_equals_the_convolution_of_each_path",),
    ),
    Fault(
        "the activation of the convolution acts on a sum that is not rounded",
        "ops/_conv.py",
        "result = total.to(weight.dtype)",
        "result = total",
        (_CONV + "test_the_activation_acts_on_the_rounded_sum",),
    ),
    Fault(
        "inner products of keys are taken in float32",
        "ops/_solve.py",
        "(probes.double() @ known_keys.double().transpose(2, 3)).to(dtype)",
        "probes @ known_keys.transpose(2, 3)",
        (_SOLVE + "test_near_identical_keys_amplify_rounding_no_more_than_the_recurrence[distance=0.001]",),
    ),
    Fault(
        "pseudo-values are rounded to the dtype of the model",
        "ops/_solve.py",
        "pseudo_values.transpose(1, 2).masked_fill(absent, 0.0).contiguous()",
        "pseudo_values.transpose(1, 2).masked_fill(absent, 0.0).to(value.dtype).to(dtype).contiguous()",
        (_SOLVE + "test_low_precision_inputs_lose_only_the_rounding_of_the_output",),
    ),
]
