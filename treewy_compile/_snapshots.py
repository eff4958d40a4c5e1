"""The baseline: every node's state and convolution window are stored, as serving engines do."""

import torch
from torch import Tensor

from treewy._nodes import append, window_after
from treewy.ops import PADDING, path_to_node


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
        self._forget()

    def materialize_(self, state: Tensor) -> None:
        """Do nothing: every commit has replaced the state."""
