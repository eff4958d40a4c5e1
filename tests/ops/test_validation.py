"""Every message that a wrong argument gives."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from parents import widths
from sampled_trees import drawn_trees
from snapshots import snapshot_inputs
from treewy import ops
from treewy.testing import OpCase

STRUCTURE = OpCase((widths(2, 2),) * 3, prefix_parents=(-1, 0), attach=((1,) * 7,) * 3)
SOLVE = STRUCTURE.solve_inputs(torch.float32)._asdict()
CONV = STRUCTURE.conv_inputs(torch.float32)._asdict()
ATTENTION = STRUCTURE.attention_inputs(torch.float32)._asdict()
SNAPSHOTS = snapshot_inputs(STRUCTURE, torch.float32, num_earlier=2)._asdict()
WRITTEN = {
    "pseudo_value": SOLVE["value"],
    "key": SOLVE["key"],
    "log_decay": SOLVE["log_decay"],
    "parents": SOLVE["parents"],
    "accepted_node": torch.tensor([0, 1, 2]),
}
CALLS: dict[str, dict[str, Any]] = {
    "tree_wy_solve": SOLVE,
    "tree_wy_commit": {"committed_state": SOLVE["committed_state"], **WRITTEN},
    "tree_wy_commit_": {"state_pool": SOLVE["committed_state"], "slots": torch.tensor([0, 1, 2]), **WRITTEN},
    "tree_wy_verify_": {
        "state_pool": SOLVE["committed_state"].clone(),
        "slots": torch.tensor([0, 1, 2]),
        "ring_pseudo_value": SOLVE["value"][:, :4].clone(),
        "ring_key": SOLVE["key"][:, :4].clone(),
        "ring_log_decay": SOLVE["log_decay"][:, :4].clone(),
        "num_known": torch.tensor([0, 1, 4]),
        "node_pseudo_value": torch.cat([SOLVE["value"]] * 2, dim=1),
        **{name: SOLVE[name] for name in ("value", "query", "key", "log_decay", "beta", "parents")},
        "last_key": SOLVE["key"][:, :5],
        "last_log_decay": SOLVE["log_decay"][:, :5],
        "path": torch.tensor([[0, 1, 3, -1, -1]] * 3),
        "path_length": torch.tensor([3, 0, 2]),
        "scale": SOLVE["scale"],
        "qk_l2norm": SOLVE["qk_l2norm"],
    },
    "tree_conv": CONV,
    "tree_conv_commit_": {
        "window_pool": CONV["window"][None],
        "slots": torch.tensor([0, 1, 2]),
        "x": CONV["x"][None],
        "parents": CONV["parents"],
        "accepted_node": torch.tensor([0, 1, 2]),
    },
    "tree_attention": ATTENTION,
    "tree_kv_commit_": {
        "key_pool": ATTENTION["key_cache"][None],
        "value_pool": ATTENTION["value_cache"][None],
        "slots": torch.tensor([0, 1, 2]),
        "start": torch.tensor([0, 1, 2]),
        "parents": CONV["parents"],
        "accepted_node": torch.tensor([0, 1, 2]),
    },
    "tree_snapshots": SNAPSHOTS,
    "tree_sample": drawn_trees("with_replacement", vocab_size=5, seed=0)._asdict(),
}
TENSORS = [(call, name) for call, values in CALLS.items() for name, x in values.items() if isinstance(x, Tensor)]
INDICES = [(call, name) for call, name in TENSORS if CALLS[call][name].dtype == torch.int64]


@pytest.mark.parametrize("call", CALLS)
def test_the_arguments_of_these_tests_are_right(call: str) -> None:
    getattr(ops, call)(**CALLS[call])


@pytest.mark.parametrize(("call", "name"), TENSORS)
def test_a_wrong_rank_is_named_with_the_shape_and_the_layout(call: str, name: str) -> None:
    wrong = CALLS[call][name][None, None]
    with pytest.raises(ValueError, match=rf"{name} has shape {re.escape(str(tuple(wrong.shape)))}, expected \["):
        getattr(ops, call)(**{**CALLS[call], name: wrong})


def free_dimensions(call: str, name: str) -> set[int]:
    """The dimensions that may have any size, or any multiple: slots, columns, taps, query heads."""
    free = {
        ("tree_wy_commit_", "state_pool"): {0},
        ("tree_wy_verify_", "state_pool"): {0},
        ("tree_wy_verify_", "node_pseudo_value"): {1},
        ("tree_conv", "window"): {2},
        ("tree_conv", "weight"): {1},
        ("tree_conv_commit_", "window_pool"): {1, 3},
        ("tree_attention", "query"): {2},
        ("tree_kv_commit_", "parents"): {1},
        ("tree_snapshots", "earlier_states"): {1},
        ("tree_sample", "draft_probs"): {1},
    }
    return free.get((call, name), set())


@pytest.mark.parametrize(("call", "name"), TENSORS)
def test_a_wrong_size_is_refused_with_the_shapes(call: str, name: str) -> None:
    right = CALLS[call][name]
    for dimension in set(range(right.ndim)) - free_dimensions(call, name):
        wrong = torch.cat([right, right], dim=dimension)
        # The sizes come from some tensors; a wrong one of these may show in the tensor compared with it.
        with pytest.raises(ValueError, match=r"has shape \(.*\), expected \[.*\] = \(.*\)|heads, expected a multiple"):
            getattr(ops, call)(**{**CALLS[call], name: wrong})


@pytest.mark.parametrize(("call", "name"), INDICES)
def test_indices_have_an_integer_dtype(call: str, name: str) -> None:
    message = f"{name} has dtype torch.float32, expected torch.int64 or torch.int32"
    with pytest.raises(ValueError, match=message):
        getattr(ops, call)(**{**CALLS[call], name: CALLS[call][name].float()})


@pytest.mark.parametrize("call", CALLS)
def test_int32_indices_are_accepted(call: str) -> None:
    values = {name: x.clone() if isinstance(x, Tensor) else x for name, x in CALLS[call].items()}
    indices = {name: values[name].int() for other, name in INDICES if other == call}
    getattr(ops, call)(**{**values, **indices})


def test_the_prefix_mask_is_a_mask() -> None:
    with pytest.raises(ValueError, match=r"prefix_mask has dtype torch.int64, expected torch.bool"):
        ops.tree_wy_solve(**{**SOLVE, "prefix_mask": SOLVE["prefix_mask"].long()})


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("tree_wy_solve", "value"),
        ("tree_wy_commit", "pseudo_value"),
        ("tree_wy_verify_", "value"),
        ("tree_attention", "query"),
        ("tree_snapshots", "value"),
    ],
)
def test_heads_divide_into_groups(call: str, name: str) -> None:
    group = "key"
    message = rf"{name} has 5 heads, expected a multiple of the 2 of {group}"
    with pytest.raises(ValueError, match=message):
        getattr(ops, call)(**{**CALLS[call], name: CALLS[call][name][:, :, :5]})


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("tree_wy_solve", "value"),
        ("tree_wy_commit", "pseudo_value"),
        ("tree_wy_verify_", "value"),
        ("tree_wy_verify_", "path"),
        ("tree_conv", "x"),
        ("tree_conv_commit_", "x"),
        ("tree_attention", "query"),
        ("tree_kv_commit_", "parents"),
        ("tree_snapshots", "value"),
        ("tree_sample", "probs"),
    ],
)
def test_a_tree_has_a_node(call: str, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} has 0 nodes, expected at least 1 \(pad with parent -2\)"):
        getattr(ops, call)(**{**CALLS[call], name: CALLS[call][name].narrow(NODES.get(call, 1), 0, 0)})


NODES = {"tree_conv_commit_": 2}  # the dimension of nodes, if not 1


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("tree_wy_solve", "log_decay"),
        ("tree_wy_solve", "prefix_log_decay"),
        ("tree_wy_commit", "log_decay"),
        ("tree_wy_commit_", "log_decay"),
        ("tree_wy_verify_", "ring_log_decay"),
        ("tree_wy_verify_", "log_decay"),
        ("tree_wy_verify_", "last_log_decay"),
        ("tree_snapshots", "log_decay"),
    ],
)
def test_a_decay_for_each_channel_is_refused(call: str, name: str) -> None:
    wrong = CALLS[call][name][..., None].expand(-1, -1, -1, 7)
    with pytest.raises(ValueError, match=rf"{name} has shape .*, a decay for each key channel, which is not supported"):
        getattr(ops, call)(**{**CALLS[call], name: wrong})


def test_the_scratch_of_a_round_holds_both_trees() -> None:
    call = CALLS["tree_wy_verify_"]
    for nodes, missing in ((7, 7), (3, 5)):
        tree = {name: call[name][:, :nodes] for name in ("value", "query", "key", "log_decay", "beta", "parents")}
        scratch = {"node_pseudo_value": call["node_pseudo_value"][:, : missing - 1]}
        message = rf"node_pseudo_value has {missing - 1} rows, expected at least {missing}: the nodes of this tree and"
        with pytest.raises(ValueError, match=message):
            ops.tree_wy_verify_(**{**call, **tree, **scratch})


def test_pseudo_values_of_a_ring_have_the_dtype_of_the_scratch() -> None:
    call = CALLS["tree_wy_verify_"]
    ring = call["ring_pseudo_value"].bfloat16()
    with pytest.raises(ValueError, match=r"bfloat16, expected that of node_pseudo_value, torch\.float32"):
        ops.tree_wy_verify_(**{**call, "ring_pseudo_value": ring})


@pytest.mark.parametrize("name", ["ring_key", "last_key"])
def test_keys_that_wait_have_the_dtype_of_keys(name: str) -> None:
    call = CALLS["tree_wy_verify_"]
    message = f"{name} has dtype torch.bfloat16, expected that of key, torch.float32"
    with pytest.raises(ValueError, match=message):
        ops.tree_wy_verify_(**{**call, name: call[name].bfloat16()})


def test_a_kernel_has_a_tap() -> None:
    with pytest.raises(ValueError, match=r"weight has shape \(5, 0\), expected \[C, Kw\] with Kw at least 1"):
        ops.tree_conv(**{**CONV, "weight": CONV["weight"][:, :0]})


def test_an_activation_is_known() -> None:
    with pytest.raises(ValueError, match='activation is \'gelu\', expected "silu" or ""'):
        ops.tree_conv(**{**CONV, "activation": "gelu"})


def test_a_window_over_tokens_is_a_number_of_them() -> None:
    with pytest.raises(ValueError, match=r"window is -1, expected a number of tokens, or 0 for none"):
        ops.tree_attention(**{**ATTENTION, "window": -1})


def test_a_window_has_a_column() -> None:
    call = CALLS["tree_conv_commit_"]
    with pytest.raises(ValueError, match=r"window_pool has shape \(1, 3, 5, 0\), expected \[.*\] with W at least 1"):
        ops.tree_conv_commit_(**{**call, "window_pool": call["window_pool"][..., :0]})
