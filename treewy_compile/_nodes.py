"""What a GDN layer keeps of the nodes that are verified but not committed, and when the accepted ones reach the state.

A node on trial is a pseudo-value, a key, a decay and a convolution column. Committing a path moves the convolution
window at once. The state may wait: accepted nodes that are not folded in yet are known ancestors of every later node,
a prefix of the solve. So there are three policies over one kind of node:

- immediate: a commit folds the path in.
- fused: the next verification folds it in first, so that a kernel can do both while it holds the state.
- deferred: a ring keeps known rows until the next path does not fit, so that the state is written once in some rounds.

The fourth, ``SnapshotNodes``, keeps a whole state a node. Nothing in here touches the committed stores except
``commit_``, ``materialize_`` and, for the fused policy, the beginning of a tree.
"""

from typing import Protocol

import torch
from torch import Tensor

from treewy.ops import ancestor_mask, path_to_node, tree_wy_commit_, tree_wy_solve

_RING_ROWS = 16  # what deferred commits keep; a longer path makes the ring grow


class Nodes(Protocol):
    """The nodes of one layer: those on trial, and those committed but not yet folded in."""

    @property
    def num_bytes(self) -> int:
        """Bytes kept beside the committed stores."""

    def add_columns(self, window: Tensor, columns: Tensor, parents: Tensor) -> Tensor:
        """Take the convolution inputs [B, C, N] of new nodes; return window and columns of all nodes side by side."""

    def solve(
        self,
        state: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        parents: Tensor,
        qk_l2norm: bool,
    ) -> Tensor:
        """Compute the outputs [B, N, HV, V] of the N new nodes, and keep what a commit needs of them.

        ``parents`` [B, M + N] covers the M nodes added before as well.
        """

    def commit_(self, state: Tensor, window: Tensor, parents: Tensor, accepted_node: Tensor) -> None:
        """Accept the path to ``accepted_node`` [B], -1 for a row without one, and forget the nodes on trial.

        Advances ``window`` in place. The state that counts is ``state`` after ``materialize_``.
        """

    def materialize_(self, state: Tensor) -> None:
        """Fold into ``state``, in place, all that is committed."""


class WyNodes:
    """Keep pseudo-values, keys, log decays and convolution columns; a commit folds the accepted path at once."""

    def __init__(self) -> None:
        """Start without nodes."""
        self._forget()

    def _forget(self) -> None:
        self._columns: Tensor | None = None
        self._on_trial: WyRows | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes kept for the nodes on trial."""
        columns = 0 if self._columns is None else self._columns.nbytes
        return columns + (0 if self._on_trial is None else self._on_trial.num_bytes)

    def add_columns(self, window: Tensor, columns: Tensor, parents: Tensor) -> Tensor:
        """Keep the convolution inputs of new nodes."""
        self._columns = append(self._columns, columns, dim=2)
        return torch.cat([window, self._columns], dim=-1)

    def solve(
        self,
        state: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        parents: Tensor,
        qk_l2norm: bool,
    ) -> Tensor:
        """Solve for the pseudo-values of the new nodes; the earlier ones are a known prefix."""
        num_new = value.shape[1]
        num_before = parents.shape[1] - num_new
        new_parents = parents[:, num_before:]
        within_new = torch.where(new_parents >= num_before, new_parents - num_before, new_parents.clamp(max=-1))
        prefix = WyRows(value[:, :0], key[:, :0], log_decay[:, :0]) if self._on_trial is None else self._on_trial
        prefix_mask = ancestor_mask(parents)[:, num_before:, :num_before]
        prefix, prefix_mask = self._behind_known_rows(state, prefix, prefix_mask)
        output, pseudo_value, used_key, _ = tree_wy_solve(
            value,
            query,
            key,
            log_decay,
            beta,
            state,
            within_new,
            *prefix.tensors,
            prefix_mask,
            key.shape[-1] ** -0.5,
            qk_l2norm,
        )
        new = WyRows(pseudo_value, used_key, log_decay)
        self._on_trial = new if self._on_trial is None else self._on_trial.followed_by(new)
        return output

    def _behind_known_rows(self, state: Tensor, prefix: "WyRows", mask: Tensor) -> tuple["WyRows", Tensor]:
        """Put known rows in front of a prefix and its mask [B, N, P]; there are none here."""
        return prefix, mask

    def commit_(self, state: Tensor, window: Tensor, parents: Tensor, accepted_node: Tensor) -> None:
        """Fold the pseudo-values of the accepted path into the state."""
        assert self._on_trial is not None
        self._on_trial.fold_(state, parents, accepted_node)
        self._commit_window_(window, *path_to_node(parents, accepted_node))
        self._forget()

    def _commit_window_(self, window: Tensor, path: Tensor, length: Tensor) -> None:
        assert self._columns is not None
        window.copy_(window_after(window, self._columns, path, length))

    def materialize_(self, state: Tensor) -> None:
        """Do nothing: every commit has folded its path."""


class DeferredNodes(WyNodes):
    """Keep accepted paths in a ring of known rows, and fold a row of the batch when its ring has no room.

    The rows of the batch fill their rings at different speeds: ``_num_known`` [B] counts, and what lies behind is not
    read.
    """

    def __init__(self) -> None:
        """Start with an empty ring."""
        super().__init__()
        self._known: WyRows | None = None
        self._num_known = torch.empty(0, dtype=torch.int64)

    @property
    def num_bytes(self) -> int:
        """Bytes kept for the nodes on trial, and of the ring."""
        return super().num_bytes + (0 if self._known is None else self._known.num_bytes)

    def _behind_known_rows(self, state: Tensor, prefix: "WyRows", mask: Tensor) -> tuple["WyRows", Tensor]:
        if self._known is None:
            return prefix, mask
        index = torch.arange(self._known.size, device=mask.device)
        known = (index < self._num_known[:, None])[:, None].expand(-1, mask.shape[1], -1)
        return self._known.followed_by(prefix), torch.cat([known, mask], dim=2)

    def commit_(self, state: Tensor, window: Tensor, parents: Tensor, accepted_node: Tensor) -> None:
        """Append the accepted path to the ring."""
        assert self._on_trial is not None
        path, length = path_to_node(parents, accepted_node)
        longest = int(length.max())
        if longest > 0:
            self._append_(state, path[:, :longest], length)
        self._commit_window_(window, path, length)
        self._forget()

    def _append_(self, state: Tensor, path: Tensor, length: Tensor) -> None:
        assert self._on_trial is not None
        if self._known is None:
            self._known = self._on_trial.empty(_RING_ROWS)
            self._num_known = torch.zeros_like(length)
        full = self._num_known + length > self._known.size
        if bool(full.any()):
            self._fold_(state, full)
        missing = path.shape[1] - self._known.size
        if missing > 0:
            self._known = self._known.followed_by(self._on_trial.empty(missing))
        self._known.write_(self._num_known, self._on_trial, path, length)
        self._num_known = self._num_known + length

    def materialize_(self, state: Tensor) -> None:
        """Fold the whole ring into the state."""
        if self._known is not None:
            self._fold_(state, torch.ones_like(self._num_known, dtype=torch.bool))
            self._known = None

    def _fold_(self, state: Tensor, rows: Tensor) -> None:
        assert self._known is not None
        chain = torch.arange(-1, self._known.size - 1, device=rows.device).expand(len(rows), -1)
        self._known.fold_(state, chain, torch.where(rows, self._num_known - 1, -1))
        self._num_known = torch.where(rows, 0, self._num_known)


class FusedNodes(DeferredNodes):
    """Fold what the last commit accepted when the next tree begins."""

    def _behind_known_rows(self, state: Tensor, prefix: "WyRows", mask: Tensor) -> tuple["WyRows", Tensor]:
        self.materialize_(state)
        return prefix, mask


class WyRows:
    """What a fold needs of M nodes: pseudo-values [B, M, HV, V], keys as used [B, M, HK, K], log decays [B, M, HV]."""

    def __init__(self, pseudo_value: Tensor, key: Tensor, log_decay: Tensor) -> None:
        self.tensors = (pseudo_value, key, log_decay)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def size(self) -> int:
        """M."""
        return self.tensors[0].shape[1]

    def empty(self, size: int) -> "WyRows":
        """Return rows alike with nothing in them."""
        return WyRows(*(tensor.new_empty(len(tensor), size, *tensor.shape[2:]) for tensor in self.tensors))

    def followed_by(self, others: "WyRows") -> "WyRows":
        pairs = zip(self.tensors, others.tensors, strict=True)
        return WyRows(*(append(ours, theirs, dim=1) for ours, theirs in pairs))

    def write_(self, start: Tensor, source: "WyRows", path: Tensor, length: Tensor) -> None:
        """Write the nodes ``path[b, : length[b]]`` of ``source`` from row ``start[b]`` on."""
        row, place = (torch.arange(path.shape[1], device=path.device) < length[:, None]).nonzero(as_tuple=True)
        for ours, theirs in zip(self.tensors, source.tensors, strict=True):
            ours[row, start[row] + place] = theirs[row, path[row, place]]

    def fold_(self, state: Tensor, parents: Tensor, node: Tensor) -> None:
        """Advance ``state`` along the path to ``node`` [B]; -1 leaves it alone."""
        slots = torch.arange(len(state), device=state.device)
        tree_wy_commit_(state, slots, *self.tensors, parents, node)


def window_after(window: Tensor, columns: Tensor, path: Tensor, length: Tensor) -> Tensor:
    """Return the last W columns [B, C, W] of the old window followed by the columns of an accepted path.

    Args:
        window: Committed window [B, C, W].
        columns: Convolution inputs of all nodes [B, C, M].
        path: Nodes of the path, root first [B, M].
        length: Nodes in the path [B].
    """
    width = window.shape[-1]
    position = length[:, None] + torch.arange(width, device=window.device)  # in cat(window, path)
    node = path.gather(1, (position - width).clamp(0, path.shape[1] - 1))
    source = torch.where(position < width, position, width + node)
    both = torch.cat([window, columns], dim=-1)
    return both.gather(2, source[:, None].expand(-1, window.shape[1], -1))


def append(kept: Tensor | None, new: Tensor, dim: int) -> Tensor:
    """Return what was kept, if anything, with new rows behind it."""
    return new.contiguous() if kept is None else torch.cat([kept, new], dim=dim)
