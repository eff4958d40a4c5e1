"""What a GDN layer keeps of the nodes that are verified but not committed.

Two policies share one shape: ``WyNodes`` keeps a pseudo-value, a key, a decay and a convolution column a node,
``SnapshotNodes`` keeps a whole state and a convolution window a node, as serving engines do. The second is the baseline
that the first is measured against. Nothing in here touches the committed stores except ``commit_``.
"""

from typing import Protocol

import torch
from torch import Tensor

from treewy.ops import PADDING, ancestor_mask, path_to_node, tree_wy_commit_, tree_wy_solve


class Nodes(Protocol):
    """The nodes of one layer between two commits."""

    @property
    def num_bytes(self) -> int:
        """Bytes kept for the nodes added so far."""

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
        """Advance ``state`` and ``window`` in place along the path to ``accepted_node`` [B]; -1 leaves a row alone."""


class WyNodes:
    """Keep pseudo-values, keys, log decays and convolution columns; the state itself is kept once."""

    def __init__(self) -> None:
        """Start without nodes."""
        self._columns: Tensor | None = None
        self._pseudo_value: Tensor | None = None
        self._key: Tensor | None = None
        self._log_decay: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes kept for the nodes added so far."""
        return sum(
            kept.nbytes for kept in (self._columns, self._pseudo_value, self._key, self._log_decay) if kept is not None
        )

    def add_columns(self, window: Tensor, columns: Tensor, parents: Tensor) -> Tensor:
        """Keep the convolution inputs of new nodes."""
        self._columns = _append(self._columns, columns, dim=2)
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
        num_known = parents.shape[1] - num_new
        new_parents = parents[:, num_known:]
        within_new = torch.where(new_parents >= num_known, new_parents - num_known, new_parents.clamp(max=-1))
        empty = value.new_empty
        output, pseudo_value, used_key, _ = tree_wy_solve(
            value,
            query,
            key,
            log_decay,
            beta,
            state,
            within_new,
            self._pseudo_value if self._pseudo_value is not None else empty(value.shape[0], 0, *value.shape[2:]),
            self._key if self._key is not None else empty(key.shape[0], 0, *key.shape[2:]),
            self._log_decay if self._log_decay is not None else empty(log_decay.shape[0], 0, log_decay.shape[2]),
            ancestor_mask(parents)[:, num_known:, :num_known],
            key.shape[-1] ** -0.5,
            qk_l2norm,
        )
        self._pseudo_value = _append(self._pseudo_value, pseudo_value, dim=1)
        self._key = _append(self._key, used_key, dim=1)
        self._log_decay = _append(self._log_decay, log_decay, dim=1)
        return output

    def commit_(self, state: Tensor, window: Tensor, parents: Tensor, accepted_node: Tensor) -> None:
        """Fold the pseudo-values of the accepted path into the state."""
        assert self._columns is not None
        assert self._pseudo_value is not None
        assert self._key is not None
        assert self._log_decay is not None
        rows = torch.arange(state.shape[0], device=state.device)
        tree_wy_commit_(state, rows, self._pseudo_value, self._key, self._log_decay, parents, accepted_node)
        window.copy_(window_after(window, self._columns, *path_to_node(parents, accepted_node)))


class SnapshotNodes:
    """Keep the state and the convolution window of every node."""

    def __init__(self) -> None:
        """Start without nodes."""
        self._columns: Tensor | None = None
        self._windows: Tensor | None = None
        self._states: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes kept for the nodes added so far."""
        return sum(kept.nbytes for kept in (self._windows, self._states) if kept is not None)

    def add_columns(self, window: Tensor, columns: Tensor, parents: Tensor) -> Tensor:
        """Store the window that each new node would leave behind."""
        num_new = columns.shape[2]
        self._columns = _append(self._columns, columns, dim=2)
        windows = []
        for node in range(parents.shape[1] - num_new, parents.shape[1]):
            alone = torch.full_like(parents[:, 0], node)
            windows.append(window_after(window, self._columns, *path_to_node(parents, alone)))
        self._windows = _append(self._windows, torch.stack(windows, dim=1), dim=1)
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
        """Run the recurrence node by node, each from its parent's stored state."""
        batch, num_new, dtype = *value.shape[:2], value.dtype
        ratio = value.shape[2] // key.shape[2]
        rows = torch.arange(batch, device=value.device)
        query, key, value, beta, log_decay = (x.to(state.dtype) for x in (query, key, value, beta, log_decay))
        if qk_l2norm:
            query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
        query = query.repeat_interleave(ratio, dim=2) * key.shape[-1] ** -0.5
        key = key.repeat_interleave(ratio, dim=2)
        num_known = parents.shape[1] - num_new
        padded = parents == PADDING
        states = state.new_empty(batch, num_known + num_new, *state.shape[1:])
        if self._states is not None:
            states[:, :num_known] = self._states
        outputs = []
        for node in range(num_known, num_known + num_new):
            parent = parents[:, node]
            before = torch.where((parent >= 0)[:, None, None, None], states[rows, parent.clamp(min=0)], state)
            decayed = before * log_decay[:, node - num_known].exp()[..., None, None]
            k, q = key[:, node - num_known], query[:, node - num_known]
            error = value[:, node - num_known] - torch.einsum("bhkv,bhk->bhv", decayed, k)
            after = decayed + k[..., None] * (beta[:, node - num_known, :, None] * error)[:, :, None]
            states[:, node] = torch.where(padded[:, node, None, None, None], state, after)
            outputs.append(torch.einsum("bhkv,bhk->bhv", after, q))
        self._states = states
        output = torch.stack(outputs, dim=1).masked_fill(padded[:, num_known:, None, None], 0.0)
        return output.to(dtype)

    def commit_(self, state: Tensor, window: Tensor, parents: Tensor, accepted_node: Tensor) -> None:
        """Copy the accepted node's state and window over the committed ones."""
        assert self._states is not None
        assert self._windows is not None
        rows = torch.arange(state.shape[0], device=state.device)
        chosen = accepted_node.clamp(min=0)
        kept = accepted_node < 0
        state.copy_(torch.where(kept[:, None, None, None], state, self._states[rows, chosen]))
        window.copy_(torch.where(kept[:, None, None], window, self._windows[rows, chosen]))


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


def _append(kept: Tensor | None, new: Tensor, dim: int) -> Tensor:
    return new.contiguous() if kept is None else torch.cat([kept, new], dim=dim)
