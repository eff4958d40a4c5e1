"""Nothing is seen of nodes that are not real or not accepted, nor of memory that was never written."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import oracle
from models import (
    POLICIES,
    plain_model,
    random_tokens,
)
from replay import History, MakeNodes, Replay, assert_same_bits, assert_same_history, few, histories
from scripted_stores import MIXED, StoresFollow, play_script
from treewy._nodes import DeferredNodes, FusedNodes, WyNodes, WyRows
from treewy._snapshots import SnapshotNodes
from treewy.ops import PADDING


@pytest.mark.parametrize("make_nodes", POLICIES)
def test_verification_leaves_what_is_committed_bit_identical(make_nodes: MakeNodes) -> None:
    @few
    @given(histories())
    def check(history: History) -> None:
        replay = Replay(history, make_nodes)
        for number in range(len(history.rounds)):
            before, cache = replay.stores(), replay.session.cache
            lengths = cache.lengths.clone()
            token_ids, parents = replay.tree(number)
            logits = replay.session.extend(token_ids, parents)
            for now, old in zip(replay.stores(), before, strict=True):
                assert_same_bits(now, old)
            assert torch.equal(cache.lengths, lengths)
            replay.session.commit(torch.full_like(parents[:, 0], -1))  # forget the nodes: as if nothing had been
            for now, old in zip(replay.stores(), before, strict=True):
                assert_same_bits(now, old)
            assert torch.equal(replay.session.extend(token_ids, parents), logits)
            replay.commit(number)

    check()


@pytest.mark.parametrize("make_nodes", POLICIES)
def test_tokens_of_padding_nodes_change_no_bit(make_nodes: MakeNodes) -> None:
    class OtherFillers(Replay):
        def tree(self, number: int) -> tuple[Tensor, Tensor]:
            token_ids, parents = super().tree(number)
            fillers = random_tokens(*token_ids.shape, seed=self.history.seed + 1000)
            return torch.where(parents == PADDING, fillers, token_ids), parents

    @settings(few, max_examples=20)
    @given(histories(min_batch=2))
    def check(history: History) -> None:
        assert_same_history(Replay(history, make_nodes), OtherFillers(history, make_nodes))

    check()


class Poisoned:
    """Before a policy: everything about rejected nodes, and what the ring does not hold, is lost before the commit."""

    def commit_(self, state: Tensor, window: Tensor, parents: Tensor, accepted_node: Tensor) -> None:
        rejected = _rejected(parents, accepted_node)
        self._columns.masked_fill_(rejected[:, None], float("nan"))
        _poison_rows(self._on_trial, rejected)
        super().commit_(state, window, parents, accepted_node)
        if getattr(self, "_known", None) is not None:
            _poison_rows(self._known, torch.arange(self._known.size) >= self._num_known[:, None])


def _poison_rows(rows: WyRows, which: Tensor) -> None:
    for tensor in rows.tensors:
        tensor.masked_fill_(which.view(*which.shape, *[1] * (tensor.ndim - 2)), float("nan"))


class PoisonedWyNodes(Poisoned, WyNodes):
    pass


class PoisonedFusedNodes(Poisoned, FusedNodes):
    pass


class PoisonedDeferredNodes(Poisoned, DeferredNodes):
    pass


class PoisonedSnapshotNodes(SnapshotNodes):
    """Likewise; of a path only the last snapshot may be used."""

    def commit_(self, state: Tensor, window: Tensor, parents: Tensor, accepted_node: Tensor) -> None:
        assert self._states is not None
        assert self._windows is not None
        other = torch.arange(parents.shape[1]) != accepted_node[:, None]
        self._states = self._states.masked_fill(other[:, :, None, None, None], float("nan"))
        self._windows = self._windows.masked_fill(other[:, :, None, None], float("nan"))
        super().commit_(state, window, parents, accepted_node)


def _rejected(parents: Tensor, accepted_node: Tensor) -> Tensor:
    rejected = torch.ones_like(parents, dtype=torch.bool)
    for row, node in enumerate(accepted_node.tolist()):
        rejected[row, oracle.path(parents[row].tolist(), node)] = False
    return rejected


class PoisonedReplay(Replay):
    """Put large numbers into all key-value columns that no later node may attend to: rejected nodes, scratch, pads.

    Finite ones: attention multiplies a masked value by zero.
    """

    def commit(self, number: int) -> None:
        _, parents = self.tree(number)
        accepted = torch.tensor(self.history.rounds[number].accepted)[self.rows]
        rejected = _rejected(parents, accepted)
        for row, start in enumerate(self.session.cache.lengths.tolist()):
            self._poison(row, [start + int(node) for node in rejected[row].nonzero()])
            self._poison(row, range(start + parents.shape[1], self._num_columns))
        super().commit(number)
        for row, start in enumerate(self.session.cache.lengths.tolist()):
            self._poison(row, range(start, self._num_columns))
            self._poison(row, range(self.pads[row]))

    @property
    def _num_columns(self) -> int:
        return self.session.cache.key_value_layers[0].keys.shape[2]

    def _poison(self, row: int, columns: Sequence[int]) -> None:
        for layer in self.session.cache.key_value_layers:
            layer.keys[row, :, list(columns)] = 1e4
            layer.values[row, :, list(columns)] = -1e4


@pytest.mark.parametrize(
    ("make_nodes", "poisoned"),
    list(
        zip(POLICIES, (PoisonedWyNodes, PoisonedFusedNodes, PoisonedDeferredNodes, PoisonedSnapshotNodes), strict=True)
    ),
)
def test_what_is_left_of_rejected_nodes_changes_no_bit(make_nodes: MakeNodes, poisoned: MakeNodes) -> None:
    @settings(few, max_examples=20)
    @given(histories())
    def check(history: History) -> None:
        assert_same_history(Replay(history, make_nodes), PoisonedReplay(history, poisoned))

    check()


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """With deterministic algorithms PyTorch fills memory that nobody has written with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("make_nodes", POLICIES)
def test_nothing_that_was_never_written_is_read(make_nodes: MakeNodes) -> None:
    model = plain_model("qwen3_next")
    play_script(model, MIXED, StoresFollow(model, MIXED.lengths, num_pads=0), make_nodes=make_nodes, max_new_tokens=20)
