"""`check_equivalence` reports each planted fault, in the check where it lies and before what follows from it."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import treewy
from models import fresh_model
from treewy import _cache, _greedy, _nodes, _snapshots
from treewy.testing import EquivalenceError, check_equivalence


def keep_rejected_columns(patch: pytest.MonkeyPatch) -> None:
    """The convolution window takes the last columns of the whole tree."""

    def last_columns(window: Tensor, columns: Tensor, path: Tensor, length: Tensor) -> Tensor:
        return torch.cat([window, columns], dim=-1)[..., -window.shape[-1] :]

    patch.setattr(_nodes, "window_after", last_columns)


def keep_the_old_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_nodes, "window_after", lambda window, columns, path, length: window.clone())


def drop_the_decay(patch: pytest.MonkeyPatch) -> None:
    """Commit adds the outer products and forgets nothing."""
    commit = _nodes.tree_wy_commit_

    def commit_without_decay(*args: Tensor) -> None:
        state, slots, pseudo_value, key, log_decay, parents, node = args
        commit(state, slots, pseudo_value, key, torch.zeros_like(log_decay), parents, node)

    patch.setattr(_nodes, "tree_wy_commit_", commit_without_decay)


def commit_the_parent(patch: pytest.MonkeyPatch) -> None:
    """The state is that of the node before the accepted one."""
    commit = _nodes.tree_wy_commit_

    def commit_above(*args: Tensor) -> None:
        *inputs, parents, node = args
        above = parents.gather(1, node.clamp(min=0)[:, None])[:, 0]
        commit(*inputs, parents, torch.where(above >= 0, above, node))

    patch.setattr(_nodes, "tree_wy_commit_", commit_above)


def leave_rejected_entries(patch: pytest.MonkeyPatch) -> None:
    """Keys and values stay where verification wrote them, those of rejected nodes among them."""
    patch.setattr(_cache.KeyValueLayer, "commit", lambda self, lengths, path, length: None)


def commit_too_few_entries(patch: pytest.MonkeyPatch) -> None:
    """Rows count one token too few once they have accepted several."""
    commit = _cache.TreeCache.commit

    def forgetful(self: _cache.TreeCache, parents: Tensor, node: Tensor) -> None:
        before = self.lengths
        commit(self, parents, node)
        self.lengths = torch.where(self.lengths - before > 2, self.lengths - 1, self.lengths)

    patch.setattr(_cache.TreeCache, "commit", forgetful)


def take_the_index_for_the_depth(patch: pytest.MonkeyPatch) -> None:
    def positions(self: _cache.TreeCache, forward: _cache.TreeForward) -> Tensor:
        return self._next_position[..., None] + torch.arange(forward.num_new)

    patch.setattr(_cache.TreeCache, "node_positions", positions)


def attend_to_cousins(patch: pytest.MonkeyPatch) -> None:
    """Every node attends to all nodes before it."""
    real = _cache.ancestor_mask
    patch.setattr(_cache, "ancestor_mask", lambda parents: real(parents).new_ones(real(parents).shape).tril())


def attend_to_pads(patch: pytest.MonkeyPatch) -> None:
    start = _cache.TreeCache.start_rows
    patch.setattr(
        _cache.TreeCache, "start_rows", lambda self, mask, position: start(self, torch.ones_like(mask), position)
    )


def accept_every_first_child(patch: pytest.MonkeyPatch) -> None:
    """Acceptance takes the first draft node unseen."""
    accept = _greedy.greedy_accept

    def trusting(token_ids: Tensor, parents: Tensor, chosen: Tensor) -> Tensor:
        node = accept(token_ids, parents, chosen)
        has_child = (parents == 0).any(dim=1)
        return torch.where((node == 0) & has_child, (parents == 0).int().argmax(dim=1), node)

    patch.setattr(_greedy, "greedy_accept", trusting)


def accept_nothing(patch: pytest.MonkeyPatch) -> None:
    """Right tokens, but no gain."""
    accept = _greedy.greedy_accept
    patch.setattr(_greedy, "greedy_accept", lambda *args: accept(*args).clamp(max=0))


def snapshots_keep_the_old_state(patch: pytest.MonkeyPatch) -> None:
    commit = _snapshots.SnapshotNodes.commit_

    def forgetful(self: Any, state: Tensor, *args: Tensor) -> None:
        commit(self, state.clone(), *args)

    patch.setattr(_snapshots.SnapshotNodes, "commit_", forgetful)


Plant = Callable[[pytest.MonkeyPatch], None]

FAULTS: list[tuple[Plant, str, str]] = [
    (keep_rejected_columns, "stores", "convolution window"),
    (keep_the_old_window, "stores", "convolution window"),
    (drop_the_decay, "stores", "GDN state"),
    (commit_the_parent, "stores", "GDN state"),
    (leave_rejected_entries, "stores", "attention keys"),
    (commit_too_few_entries, "stores", "attention keys"),
    (take_the_index_for_the_depth, "node logits", "nodes of trees"),
    (attend_to_cousins, "node logits", "nodes of trees"),
    (attend_to_pads, "node logits", "nodes of trees"),
    (accept_every_first_child, "tokens", "scripts, batch 6"),
    (accept_nothing, "acceptance", "rounds by script"),
    (snapshots_keep_the_old_state, "commit policies", "snapshots: GDN state"),
]


@pytest.mark.parametrize(
    ("plant", "check", "subject", "dtype"),
    [(*fault, (torch.float32, torch.bfloat16)[number % 2]) for number, fault in enumerate(FAULTS)],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_planted_fault_is_reported_in_its_check_and_no_later_than_elsewhere(
    plant: Plant, check: str, subject: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = treewy.compile(fresh_model("qwen3_5").to(dtype), commit="immediate")
    plant(monkeypatch)
    with pytest.raises(EquivalenceError) as caught:
        check_equivalence(model, max_new_tokens=12)
    faults = {(line.check, line.subject): line.fault for line in caught.value.report.faults}
    assert (check, subject) in faults
    for fault in faults.values():
        assert fault in str(caught.value)
    if check != "tokens":
        own = place_of(faults[check, subject])
        assert all(own <= place_of(fault) for (kind, _), fault in faults.items() if kind == check)
    if plant is accept_nothing:  # the text is right, only slow
        assert {kind for kind, _ in faults} == {"acceptance", "commit policies"}
    if plant is snapshots_keep_the_old_state:
        assert {kind for kind, _ in faults} == {"commit policies"}


def place_of(fault: str) -> tuple[int, int]:
    """Round and layer; a difference of tokens has none and comes last."""
    found = re.search(r"round (\d+)(?:, layer (\d+))?", fault)
    return (int(found[1]), int(found[2] or 0)) if found else (1000, 0)


def test_the_message_says_row_round_layer_store_error_and_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_rejected_columns(monkeypatch)
    with pytest.raises(
        AssertionError,
        match=r"(?s)differs from plain decoding on Qwen3NextForCausalLM, float32, cpu\n.*"
        r"stores, convolution window: row \d \(perfect\), after round 1, layer 0, convolution window: error .*e.*, "
        r"bound 2.0e-04",
    ):
        check_equivalence(fresh_model("qwen3_next"), max_new_tokens=8)


def test_what_is_pending_is_read_in_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy may write states late. They are written for the comparison, but never in the generation itself."""

    def lose_everything(self: _cache.TreeCache) -> None:
        for layer in self.state_layers:
            layer.state.zero_()

    monkeypatch.setattr(_cache.TreeCache, "materialize", lose_everything, raising=False)
    with pytest.raises(EquivalenceError) as caught:
        check_equivalence(treewy.compile(fresh_model("qwen3_next"), commit="immediate"), max_new_tokens=4)
    faults = {(line.check, line.subject) for line in caught.value.report.faults if line.check != "commit policies"}
    assert faults == {("stores", "GDN state")}


def test_in_low_precision_the_message_advises_a_float32_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    drop_the_decay(monkeypatch)
    model = treewy.compile(fresh_model("qwen3_next"), commit="immediate")
    for dtype, advises in ((torch.bfloat16, True), (torch.float32, False)):
        with pytest.raises(EquivalenceError) as caught:
            check_equivalence(model.to(dtype), max_new_tokens=6)
        assert ("check a float32 copy" in str(caught.value)) == advises


def test_a_fault_of_prefill_is_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    update = _cache.StateLayer.update_recurrent_state

    def doubling(self: Any, state: Tensor, *args: Any, **kwargs: Any) -> Any:
        return update(self, state if self.forward is not None else 2 * state, *args, **kwargs)

    monkeypatch.setattr(_cache.StateLayer, "update_recurrent_state", doubling)
    with pytest.raises(EquivalenceError, match=r"GDN state: row 0 .*, after prefill, layer 0, GDN state: error 1.0e"):
        check_equivalence(fresh_model("qwen3_next"), max_new_tokens=4)
