"""The baseline: every node's state and convolution window are stored, as serving engines do."""

import torch
from torch import Tensor

from treewy._nodes import append, window_after
from treewy.ops import PADDING, path_to_node, tree_snapshots


class SnapshotNodes:
    """Keep the state and the convolution window of every node."""

    def __init__(self) -> None:
        """Start without nodes."""
        self._forget()

    def _forget(self) -> None:
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
        self._columns = append(self._columns, columns, dim=2)
        windows = []
        for node in range(parents.shape[1] - num_new, parents.shape[1]):
            alone = torch.full_like(parents[:, 0], node)
            windows.append(window_after(window, self._columns, *path_to_node(parents, alone)))
        self._windows = append(self._windows, torch.stack(windows, dim=1), dim=1)
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
        batch, num_new = value.shape[:2]
        new_parents = parents[:, parents.shape[1] - num_new :]
        earlier = state.new_empty(batch, 0, *state.shape[1:]) if self._states is None else self._states
        output, states = tree_snapshots(
            value, query, key, log_decay, beta, state, new_parents, earlier, key.shape[-1] ** -0.5, qk_l2norm
        )
        self._states = append(self._states, states, dim=1)
        return output

    def commit_(self, state: Tensor, window: Tensor, parents: Tensor, accepted_node: Tensor) -> None:
        """Copy the accepted node's state and window over the committed ones."""
        assert self._states is not None
        assert self._windows is not None
        rows = torch.arange(state.shape[0], device=state.device)
        chosen = accepted_node.clamp(min=0)
        kept = (accepted_node < 0) | (parents[rows, chosen] == PADDING)
        state.copy_(torch.where(kept[:, None, None, None], state, self._states[rows, chosen]))
        window.copy_(torch.where(kept[:, None, None], window, self._windows[rows, chosen]))
        self._forget()

    def materialize_(self, state: Tensor) -> None:
        """Do nothing: every commit has replaced the state."""
