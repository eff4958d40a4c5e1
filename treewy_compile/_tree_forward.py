"""One forward over nodes, as the layers of the eager engine see it."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treewy.ops import tree_conv

if TYPE_CHECKING:
    from treewy._cache import StateLayer


class TreeForward:
    """One forward over nodes: the tree, and where its keys and values go. Implements ``treewy.passes.TreeCall``.

    Args:
        parents: [B, M + N] int64, the M nodes of earlier forwards and the N new ones.
        num_new: N.
        lengths: Committed columns a row [B].
        columns_used: The largest of ``lengths``.
    """

    def __init__(self, parents: Tensor, num_new: int, lengths: Tensor, columns_used: int) -> None:
        self.parents = parents
        self.num_new = num_new
        self.num_known = parents.shape[1] - num_new
        self.lengths = lengths
        self.columns_used = columns_used
        self.current: StateLayer | None = None  # set by the layer whose convolution comes next
        self.new_state: Tensor | None = None  # what the layer was handed last in place of a new state

    @property
    def node_columns(self) -> Tensor:
        """Key/value columns [B, N] of the new nodes: behind what the row has committed."""
        index = torch.arange(self.num_known, self.num_known + self.num_new, device=self.lengths.device)
        return self.lengths[:, None] + index

    def convolve(self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """Convolve each node over its ancestors; ``hidden_states`` [B, C, W + M + N] starts with the window."""
        width = hidden_states.shape[-1] - self.parents.shape[1]
        convolved = tree_conv(
            hidden_states[..., width:].transpose(1, 2),
            hidden_states[..., :width],
            weight,
            weight.new_empty(0) if bias is None else bias,
            self.parents,
            activation or "",
        )
        return convolved.transpose(1, 2)

    def apply_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        initial_state: Tensor,
        qk_l2norm: bool,
    ) -> tuple[Tensor, Tensor]:
        """Solve the tree; the state that the layer writes back is the unchanged one."""
        assert self.current is not None
        step = key.shape[2] // self.current.num_key_heads  # transformers 5.17 repeats key heads before the rule
        nodes = self.current.nodes
        output = nodes.solve(
            initial_state, query[:, :, ::step], key[:, :, ::step], value, log_decay, beta, self.parents, qk_l2norm
        )
        self.new_state = initial_state
        return output, initial_state
