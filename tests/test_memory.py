"""What verification keeps of a node is a small part of a state, seen from the allocations themselves."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from models import random_tokens
from treewy._cache import StateLayer
from treewy._draft_tree import parents_from_widths
from treewy._nodes import Nodes, WyNodes
from treewy._session import Session
from treewy._snapshots import SnapshotNodes
from treewy._tree_forward import TreeForward
from treewy.ops import tree_wy_solve

MakeNodes = Callable[[], Nodes]

SIZES = (16, 32, 64)

TREES: dict[str, Callable[[int], list[int]]] = {
    "chain": lambda size: list(range(-1, size - 1)),
    "tree": lambda size: [-1, *(parent + 1 for parent in parents_from_widths((3, 2, 2, 2, 2)))][:size],
    "star": lambda size: [-1] + [0] * (size - 1),
}


class Allocations(TorchDispatchMode):
    """See every storage that an operator allocates, those inside our own operators too, and whether it lives on."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[int] = set()
        self._references: list[StorageWeakRef] = []  # also keep the addresses in `_seen` from being used again
        self._new: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            self._note(storage)  # it existed before
        if func.namespace == "treewy":  # hides what it calls from modes; go past them, and let us see it
            with self:
                output = func.redispatch(DispatchKeySet(DispatchKey.CPU), *args, **(kwargs or {}))
        else:
            output = func(*args, **(kwargs or {}))
        for storage in _storages(output):
            if self._note(storage):
                self._new.append((self._references[-1], storage.nbytes()))
        return output

    def _note(self, storage: torch.UntypedStorage) -> bool:
        """Remember a storage; return whether it was new."""
        if storage._cdata in self._seen:
            return False
        self._seen.add(storage._cdata)
        self._references.append(StorageWeakRef(storage))
        return True

    @property
    def count(self) -> int:
        return len(self._new)

    @property
    def largest(self) -> int:
        """Bytes of the largest single allocation."""
        return max((size for _, size in self._new), default=0)

    @property
    def kept(self) -> int:
        """Bytes of the allocations that are still alive."""
        return sum(size for reference, size in self._new if not reference.expired())


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor)]


def hybrid(key_dim: int, value_dim: int, key_heads: int, value_heads: int) -> PreTrainedModel:
    """Two GDN layers around an attention layer; small but for the states."""
    config = transformers.Qwen3NextConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        num_experts=0,
    )
    torch.manual_seed(0)
    return transformers.Qwen3NextForCausalLM(config).eval().requires_grad_(False)


def extend(
    model: PreTrainedModel, make_nodes: MakeNodes, parents: list[int], batch: int = 1
) -> tuple[Allocations, Session]:
    """Verify one tree; what that allocated counts as kept for as long as the session lives."""
    session = Session(model, make_nodes)
    session.prefill(random_tokens(batch, 7, seed=0), torch.ones(batch, 7))
    tokens = random_tokens(batch, len(parents), seed=1)
    given = torch.tensor([parents] * batch)
    with Allocations() as allocations:
        session.extend(tokens, given)
    return allocations, session


def state_bytes(session: Session) -> list[int]:
    """Bytes of a row's state in each GDN layer."""
    return [layer.state[0].nbytes for layer in session.cache.state_layers]


def kept_per_node(model: PreTrainedModel, make_nodes: MakeNodes, tree: str, batch: int) -> list[float]:
    """Bytes that each further node of a row keeps, as a fraction of the row's states: a number a step of `SIZES`."""
    kept = []
    for size in SIZES:
        allocations, session = extend(model, make_nodes, TREES[tree](size), batch)
        kept.append(allocations.kept / (batch * sum(state_bytes(session))))
    return [
        (more - fewer) / (large - small)
        for (fewer, more), (small, large) in zip(pairwise(kept), pairwise(SIZES), strict=True)
    ]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return hybrid(64, 64, 2, 6)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tree", TREES)
def test_what_is_kept_grows_by_less_than_a_quarter_of_a_state_a_node(
    model: PreTrainedModel, tree: str, batch: int
) -> None:
    assert all(0 < fraction < 1 / 4 for fraction in kept_per_node(model, WyNodes, tree, batch))


def test_with_snapshots_it_grows_by_a_state_a_node(model: PreTrainedModel) -> None:
    assert all(fraction >= 1 for fraction in kept_per_node(model, SnapshotNodes, "tree", 1))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tree", TREES)
def test_no_single_allocation_is_as_large_as_a_state_a_node(model: PreTrainedModel, tree: str, size: int) -> None:
    for batch in (1, 2):
        allocations, session = extend(model, WyNodes, TREES[tree](size), batch)
        assert allocations.largest < batch * size * min(state_bytes(session))


def test_with_snapshots_an_allocation_is_as_large_as_a_state_a_node(model: PreTrainedModel) -> None:
    allocations, session = extend(model, SnapshotNodes, TREES["tree"](16))
    assert allocations.largest >= 16 * min(state_bytes(session))


@pytest.mark.parametrize("make_nodes", [WyNodes, SnapshotNodes])
def test_the_bytes_that_statistics_report_are_the_bytes_that_are_kept(
    model: PreTrainedModel, make_nodes: MakeNodes
) -> None:
    allocations, session = extend(model, make_nodes, TREES["tree"](32))
    stores = sum(store.nbytes for layer in session.cache.key_value_layers for store in (layer.keys, layer.values))
    nodes = session.cache.num_node_bytes
    if make_nodes is SnapshotNodes:  # which keeps the columns to make windows from, and does not report them
        nodes += sum(layer.nodes._columns.nbytes for layer in session.cache.state_layers)
    assert allocations.kept == nodes + stores


def test_nothing_is_kept_of_nodes_that_were_committed(model: PreTrainedModel) -> None:
    """What the attention layer has reserved before is enough; the lengths and the mask of what is committed are new."""
    session = Session(model)
    session.prefill(random_tokens(1, 7, seed=0), torch.ones(1, 7))
    session.extend(random_tokens(1, 32, seed=1), torch.tensor([TREES["tree"](32)]))
    session.commit(torch.tensor([5]))  # the attention layer has reserved columns
    with Allocations() as allocations:
        session.extend(random_tokens(1, 32, seed=2), torch.tensor([TREES["tree"](32)]))
        session.commit(torch.tensor([5]))
    assert allocations.kept < 32 * 8  # lengths, and a mask of bytes


@pytest.mark.parametrize("qk_l2norm", [True, False])
@pytest.mark.parametrize("keys", ["once per key head", "repeated to value heads"])
@pytest.mark.parametrize("key_heads", [1, 4])
def test_at_width_128_nodes_take_an_80th_of_their_states(key_heads: int, keys: str, qk_l2norm: bool) -> None:
    """Pseudo-values, keys and decays against states, with two value heads a key head."""
    size, width, value_heads = 16, 128, 2 * key_heads
    generator = torch.Generator().manual_seed(0)
    kept = {}
    for make_nodes in (WyNodes, SnapshotNodes):
        layer = StateLayer("", key_heads, make_nodes)
        parents = torch.tensor([TREES["tree"](size)])
        forward = TreeForward(parents, size, torch.tensor([3]), 3)
        forward.current = layer
        query, key = (torch.randn(1, size, key_heads, width, generator=generator) for _ in range(2))
        if keys == "repeated to value heads":  # as transformers 5.17 does before the rule
            query, key = (x.repeat_interleave(2, dim=2) for x in (query, key))
        value = torch.randn(1, size, value_heads, width, generator=generator)
        log_decay, beta = -torch.rand(1, size, value_heads), torch.rand(1, size, value_heads)
        state = torch.zeros(1, value_heads, width, width)
        with Allocations() as allocations:
            forward.apply_rule(query, key, value, log_decay, beta, state, qk_l2norm)
        kept[make_nodes] = allocations.kept
        if make_nodes is WyNodes:  # log decays are kept as they were given, not copied
            kept[make_nodes] += log_decay.nbytes
    assert kept[SnapshotNodes] == size * value_heads * width * width * 4
    assert kept[WyNodes] == size * (value_heads * width + key_heads * width + value_heads) * 4
    assert kept[WyNodes] * 80 <= kept[SnapshotNodes]


def test_a_model_of_width_128_keeps_an_80th_of_its_states() -> None:
    """As above, with what this version of transformers hands to the rule."""
    session = Session(hybrid(128, 128, 1, 2))
    session.prefill(random_tokens(1, 5, seed=0), torch.ones(1, 5))
    session.extend(random_tokens(1, 16, seed=1), torch.tensor([TREES["tree"](16)]))
    for layer in session.cache.state_layers:
        kept = layer.nodes._on_trial.tensors
        assert sum(tensor.untyped_storage().nbytes() for tensor in kept) * 80 <= 16 * layer.state.nbytes


# The measurement itself.


def test_allocations_inside_our_operators_are_seen() -> None:
    size, width = 5, 8
    tensors = [torch.ones(1, size, heads, width) for heads in (2, 2, 2)]
    gates = [torch.zeros(1, size, 2)] * 2
    prefix = tensors[0][:, :0], tensors[1][:, :0], gates[0][:, :0], torch.zeros(1, size, 0, dtype=torch.bool)
    state, parents = torch.zeros(1, 2, width, width), torch.tensor([[-1, 0, 0, 1, 2]])
    with Allocations() as allocations:
        results = tree_wy_solve(*tensors, *gates, state, parents, *prefix, 1.0, True)
    assert allocations.count > 10
    assert allocations.kept >= sum(result.nbytes for result in results)
    del results
    assert allocations.kept == 0


def test_views_are_no_allocations_and_freed_storages_are_not_kept() -> None:
    given = torch.ones(1000)
    with Allocations() as allocations:
        view = given.view(10, 100).t()[2:]
        given.add_(1)
        kept = view + 1
        (view * 2).sum()
        part_of_a_temporary = (view * 3)[:1]
    assert allocations.largest == view.numel() * 4
    assert allocations.kept == kept.nbytes + part_of_a_temporary.untyped_storage().nbytes()
