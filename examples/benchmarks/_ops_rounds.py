"""The rounds that `ops.py` measures: a layer, trees, the stores of a batch, and a round under each commit policy."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from treewy._draft_tree import parents_from_widths
from treewy.ops import tree_snapshots, tree_wy_commit_, tree_wy_solve, tree_wy_verify_

RING = {"deferred": 16}
"""Rows of the ring by policy; the others have none."""

ACCEPTED = 3
"""Tokens a round."""


class Layer(NamedTuple):
    """Heads and head dimensions."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


class Tree:
    """A root, children by widths, and further leaves below the deepest ones, one each."""

    def __init__(self, widths: tuple[int, ...], leaves: int = 0) -> None:
        self.widths, self.leaves = widths, leaves
        self.parents = [-1] + [parent + 1 for parent in (parents_from_widths(widths) if widths else [])]
        first = len(self.parents) - math.prod(widths)
        self.parents += range(first, first + leaves)
        self.nodes = len(self.parents)
        levels: list[int] = []
        for parent in self.parents:
            levels.append(levels[parent] + 1 if parent >= 0 else 1)
        self.depth = max(levels)
        self.path_length = min(ACCEPTED, self.depth)
        self.accepted = levels.index(self.path_length)

    def __str__(self) -> str:
        name = f"chain {self.nodes}" if self.nodes == self.depth else str(self.widths).replace(" ", "")
        return f"{name} + {self.leaves}" if self.leaves else name


TREES = [*(Tree((1,) * (nodes - 1)) for nodes in (1, 4, 8, 16))]
TREES += [Tree((2, 2, 2)), Tree((2, 2, 2), 1), Tree((3, 3, 3)), Tree((3, 3, 3), 24)]


class Nodes(NamedTuple):
    """What the projections give for the nodes of a tree."""

    value: Tensor
    query: Tensor
    key: Tensor
    log_decay: Tensor
    beta: Tensor


def draw_nodes(layer: Layer, batch: int, nodes: int, device: str) -> Nodes:
    """Draw nodes whose decays and write strengths lie within the ranges of trained models."""
    randn, rand = partial(torch.randn, batch, nodes, device=device), partial(torch.rand, batch, nodes, device=device)
    value, query, key = (
        randn(*width).bfloat16()
        for width in ((layer.value_heads, layer.value_dim), *[(layer.key_heads, layer.key_dim)] * 2)
    )
    return Nodes(value, query, key, -0.5 * rand(layer.value_heads), rand(layer.value_heads).bfloat16())


class Rows:
    """The stores of a batch in one layer, and the tree of its round. Ring and scratch are noise, or NaN if poisoned."""

    def __init__(self, tree: Tree, batch: int, layer: Layer, device: str, *, poisoned: bool = False) -> None:
        self.pool = torch.randn(batch, layer.value_heads, layer.key_dim, layer.value_dim, device=device)
        self.slots = torch.arange(batch, device=device)
        self.own_slots = self.slots[:0]  # row b's state is in slot b, as in a model's cache
        self.parents = torch.tensor(tree.parents, device=device).repeat(batch, 1)
        self.nodes = draw_nodes(layer, batch, tree.nodes, device)
        # The tree before has the same keys, in a place of its own: the state stays bounded, however often it is folded.
        self.last = Nodes(*(x.clone() for x in self.nodes))
        self.accepted = torch.full((batch,), tree.accepted, device=device)
        path, node = [], tree.accepted
        while node >= 0:
            path.insert(0, node)
            node = tree.parents[node]
        path += [-1] * (tree.nodes - len(path))
        self.path = torch.tensor(path, device=device).repeat(batch, 1)
        self.path_length = torch.full((batch,), tree.path_length, device=device)
        self.num_known = torch.zeros(batch, dtype=torch.int64, device=device)
        ring = draw_nodes(layer, batch, max(RING.values()), device)
        self.ring = (0.1 * ring.value.float(), ring.key, ring.log_decay)
        self.scratch = 0.1 * torch.randn(batch, tree.nodes, layer.value_heads, layer.value_dim, device=device)
        if poisoned:
            for store in (*self.ring, self.scratch):
                store.fill_(math.nan)
        self.no_prefix = (
            self.ring[0][:, :0],
            self.ring[1][:, :0],
            self.ring[2][:, :0],
            self.parents[:, :, None][:, :, :0] > 0,
        )
        self.no_states = self.pool[:, None][:, :0]


def verify_round(size: int, rows: Rows, nodes: Nodes, last: Nodes) -> tuple[Tensor, Tensor]:
    """Return outputs and the number of known rows; commits the path in the last tree."""
    ring = (store[:, :size] for store in rows.ring)
    stores = (rows.pool, rows.own_slots, *ring, rows.num_known, rows.scratch)
    accepted = (last.key, last.log_decay, rows.path, rows.path_length)
    return tree_wy_verify_(*stores, *nodes, rows.parents, *accepted, nodes.key.shape[3] ** -0.5, True)


def immediate_round(rows: Rows, nodes: Nodes, last: Nodes) -> tuple[Tensor, None]:
    """Return outputs; commits the path in this tree."""
    output, pseudo_value, key, _ = tree_wy_solve(
        *nodes, rows.pool, rows.parents, *rows.no_prefix, nodes.key.shape[3] ** -0.5, True
    )
    tree_wy_commit_(rows.pool, rows.slots, pseudo_value, key, nodes.log_decay, rows.parents, rows.accepted)
    return output, None


def snapshots_round(rows: Rows, nodes: Nodes, last: Nodes) -> tuple[Tensor, Tensor]:
    """Return outputs and the states of all nodes; commits nothing."""
    return tree_snapshots(*nodes, rows.pool, rows.parents, rows.no_states, nodes.key.shape[3] ** -0.5, True)


POLICIES: dict[str, Callable[[Rows, Nodes, Nodes], tuple[Tensor, Tensor | None]]] = {
    "deferred": partial(verify_round, RING["deferred"]),
    "fused": partial(verify_round, 0),
    "immediate": immediate_round,
    "snapshots": snapshots_round,
}
