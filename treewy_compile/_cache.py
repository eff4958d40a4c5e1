"""The three stores of a hybrid model: GDN state, convolution window and attention keys/values, with a length a row.

The layers derive from Hugging Face's, so that prefill runs the model's own code. Between ``begin`` and ``end`` of a
tree forward they take nodes instead of tokens: reads see the committed stores and the nodes' own ancestors, and writes
go to scratch. ``commit`` alone advances a row.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from treewy._nodes import Nodes
from treewy._tree_forward import TreeForward
from treewy.ops import ancestor_mask, depths, path_to_node
from treewy.passes import GdnLayerInfo

_GROWTH = 64  # columns: the key/value store grows in such steps


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """GDN state and convolution window of one layer, and the nodes on trial."""

    def __init__(self, name: str, num_key_heads: int, make_nodes: Callable[[], Nodes]) -> None:
        super().__init__()
        self.name = name
        self.num_key_heads = num_key_heads
        self.nodes = make_nodes()
        self.forward: TreeForward | None = None

    @property
    def state(self) -> Tensor:
        """State [B, HV, K, V]: the committed one once ``materialize`` has run, until then perhaps an earlier one."""
        state: Tensor = self.recurrent_states[0]
        return state

    @property
    def window(self) -> Tensor:
        """Committed convolution window [B, C, W]."""
        window: Tensor = self.conv_states[0]
        return window

    def begin(self, forward: TreeForward) -> None:
        """Take nodes from now on."""
        self.forward = forward
        self.record_past = True  # keeps Hugging Face off its fused single-token path, which writes the window

    def end(self) -> None:
        """Take tokens again."""
        self.forward = None
        self.record_past = False

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Keep the columns of new nodes, or prefill."""
        if self.forward is None:
            full: Tensor = super().update_conv_state(conv_states, state_idx, **kwargs)
            return full
        self.forward.current = self
        return self.nodes.add_columns(self.window, conv_states, self.forward.parents)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Write the state in prefill; a tree forward leaves it alone."""
        if self.forward is None:
            written: Tensor = super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
            return written
        if recurrent_states is not self.forward.new_state:
            raise ValueError(
                f"layer {self.name!r} keeps another state than its delta rule returned, the one way of keeping it that "
                "treewy knows; generate without a drafter"
            )
        return recurrent_states

    def commit(self, parents: Tensor, accepted_node: Tensor) -> None:
        """Advance along the accepted path and forget the nodes on trial."""
        self.nodes.commit_(self.state, self.window, parents, accepted_node)

    def materialize(self) -> None:
        """Fold into the state what is committed but still waits."""
        self.nodes.materialize_(self.state)


class KeyValueLayer(DynamicLayer):  # type: ignore[misc]
    """Attention keys and values of one layer: ``keys[b, :, :lengths[b]]`` is committed, what follows is scratch.

    A layer with a sliding window keeps all columns too: rows advance by different numbers of tokens, so the window is
    left to the mask.
    """

    keys: Tensor  # [B, HKV, columns, D]
    values: Tensor

    def __init__(self, is_sliding: bool) -> None:
        super().__init__()
        self.is_sliding = is_sliding  # where Hugging Face looks for the layer that its sliding mask is for
        self.forward: TreeForward | None = None

    def begin(self, forward: TreeForward) -> None:
        """Take nodes from now on."""
        self.forward = forward

    def end(self) -> None:
        """Take tokens again."""
        self.forward = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the keys and values of new nodes behind each row's committed columns, or prefill."""
        if self.forward is None:
            prefilled: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return prefilled
        width = self.forward.columns_used + self.forward.parents.shape[1]
        self._reserve(width)
        rows = torch.arange(key_states.shape[0], device=key_states.device)[:, None]
        columns = self.forward.node_columns
        for store, new in ((self.keys, key_states), (self.values, value_states)):
            store[rows, :, columns] = new.transpose(1, 2).to(store.dtype)
        return self.keys[:, :, :width], self.values[:, :, :width]

    def commit(self, lengths: Tensor, path: Tensor, length: Tensor) -> None:
        """Move the accepted path's keys and values next to the committed ones.

        Source and target columns overlap, so everything is gathered before anything is written.
        """
        rows = torch.arange(path.shape[0], device=path.device)[:, None]
        index = torch.arange(path.shape[1], device=path.device)
        target = lengths[:, None] + index
        source = torch.where(index < length[:, None], lengths[:, None] + path, target)
        for store in (self.keys, self.values):
            store[rows, :, target] = store[rows, :, source]

    def _reserve(self, width: int) -> None:
        missing = width - self.keys.shape[2]
        if missing > 0:
            missing += _GROWTH
            # zeros, not empty: a masked column still meets a zero weight, and zero times NaN is NaN
            self.keys, self.values = (
                torch.cat([store, store.new_zeros(*store.shape[:2], missing, store.shape[3])], dim=2)
                for store in (self.keys, self.values)
            )


class TreeCache(Cache):  # type: ignore[misc]
    """The stores of all layers of one model, with a length and a position a row.

    Args:
        config: Text configuration of the model.
        gdn_layers: Its Gated DeltaNet layers.
        make_nodes: How the nodes of a GDN layer are kept: the commit policy.

    Raises:
        ValueError: If a layer is neither Gated DeltaNet nor attention, full or with a sliding window.
    """

    def __init__(
        self, config: PreTrainedConfig, gdn_layers: Sequence[GdnLayerInfo], make_nodes: Callable[[], Nodes]
    ) -> None:
        known = {layer.layer_idx: layer for layer in gdn_layers}
        layers: list[StateLayer | KeyValueLayer] = []
        for index, layer in enumerate(DynamicCache(config=config).layers):
            if index in known and type(layer) is LinearAttentionLayer:
                if len(layer.conv_states) > 1:
                    raise ValueError(
                        f"layer {index} keeps {len(layer.conv_states)} convolution states, of which treewy knows one; "
                        "generate without a drafter"
                    )
                layers.append(StateLayer(known[index].name, known[index].num_key_heads, make_nodes))
            elif type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
                layers.append(KeyValueLayer(layer.is_sliding))
            else:
                raise ValueError(
                    f"layer {index} caches a {type(layer).__name__}, which treewy does not support; it supports Gated "
                    "DeltaNet and attention layers, full or with a sliding window, so generate without a drafter"
                )
        super().__init__(layers=layers)
        self._config = config
        self._committed: Tensor | None = None  # [B, columns] bool: real tokens, not pads
        self.lengths = torch.empty(0, dtype=torch.int64)  # committed columns a row, pads included
        self.columns_used = 0
        self._next_position = torch.empty(0, dtype=torch.int64)  # position of the next token [..., B]

    @property
    def state_layers(self) -> list[StateLayer]:
        """The Gated DeltaNet layers."""
        return [layer for layer in self.layers if isinstance(layer, StateLayer)]

    @property
    def key_value_layers(self) -> list[KeyValueLayer]:
        """The attention layers."""
        return [layer for layer in self.layers if isinstance(layer, KeyValueLayer)]

    @property
    def windows(self) -> list[int | None]:
        """How many tokens each attention layer's mask shows; None for all."""
        return [self._config.sliding_window if layer.is_sliding else None for layer in self.key_value_layers]

    def start_rows(self, mask: Tensor, next_position: Tensor) -> None:
        """Note what prefill committed.

        Args:
            mask: Nonzero for real tokens [B, T].
            next_position: Position of the token behind them [B], or one a rotary axis [P, B] as vision models have it.
        """
        self._next_position = next_position
        self._committed = mask.bool()
        self.lengths = torch.full((mask.shape[0],), mask.shape[1], dtype=torch.int64, device=mask.device)
        self.columns_used = mask.shape[1]

    @property
    def next_position(self) -> Tensor:
        """Position of each row's next token [B], or one a rotary axis [P, B]."""
        return self._next_position

    def first_columns(self) -> Tensor:
        """Return the first column of each row [B] that is no pad.

        Raises:
            ValueError: If there are pads behind it.
        """
        assert self._committed is not None
        start = self.lengths - self._committed.sum(dim=1)
        index = torch.arange(self.columns_used, device=start.device)
        if bool((self._committed != (index >= start[:, None]) & (index < self.lengths[:, None])).any()):
            raise ValueError(
                "attention_mask has zeros behind the first token of a row, which a compiled forward does not know; pad "
                "on the left, or compile with backend='eager'"
            )
        return start

    def continue_rows(self, start: Tensor, lengths: Tensor, next_position: Tensor) -> None:
        """Note what rounds committed: the columns from ``start`` [B] up to ``lengths`` [B] of each row."""
        self.lengths, self._next_position = lengths, next_position
        self.columns_used = int(lengths.max())
        index = torch.arange(self.columns_used, device=lengths.device)
        self._committed = (index >= start[:, None]) & (index < lengths[:, None])

    def begin(self, parents: Tensor, num_new: int) -> TreeForward:
        """Let all layers take the last ``num_new`` nodes of ``parents`` [B, M + N]."""
        forward = TreeForward(parents, num_new, self.lengths, self.columns_used)
        for layer in self.layers:
            layer.begin(forward)
        return forward

    def end(self) -> None:
        """Let all layers take tokens again."""
        for layer in self.layers:
            layer.end()

    def attention_mask(self, forward: TreeForward) -> Tensor:
        """Return which columns [B, 1, N, columns] each new node attends to: committed ones and its ancestors."""
        assert self._committed is not None
        ancestors = ancestor_mask(forward.parents)[:, forward.num_known :]
        # a padding node attends to itself: a softmax over nothing would be NaN
        itself = torch.eye(forward.parents.shape[1], dtype=torch.bool, device=ancestors.device)[forward.num_known :]
        width = forward.columns_used + forward.parents.shape[1]
        mask = self._committed.new_zeros(ancestors.shape[0], forward.num_new, width)
        mask[:, :, : self._committed.shape[1]] = self._committed[:, None]
        columns = self.lengths[:, None] + torch.arange(forward.parents.shape[1], device=self.lengths.device)
        mask.scatter_(2, columns[:, None].expand(-1, forward.num_new, -1), ancestors | itself)
        return mask[:, None]

    def within_window(self, forward: TreeForward, window: int) -> Tensor:
        """Return which columns [B, 1, N, columns] hold one of the last ``window`` tokens of each new node's own text.

        Hugging Face counts pads and tokens, so a committed column counts as its index. A node counts by its depth:
        siblings and cousins lie between the columns of a path but not in its text.
        """
        place_of_node = self.lengths[:, None] + depths(forward.parents).clamp(min=0)
        width = forward.columns_used + forward.parents.shape[1]
        index = torch.arange(width, device=self.lengths.device)
        place = index.repeat(len(self.lengths), 1)
        columns = self.lengths[:, None] + index[: forward.parents.shape[1]]
        place.scatter_(1, columns, place_of_node)
        return (place[:, None] > place_of_node[:, forward.num_known :, None] - window)[:, None]

    def node_positions(self, forward: TreeForward) -> Tensor:
        """Return the position [..., B, N] of each new node, which is neither its index nor its column."""
        depth = depths(forward.parents)[:, forward.num_known :].clamp(min=0)
        return self._next_position[..., None] + depth

    def commit(self, parents: Tensor, accepted_node: Tensor) -> None:
        """Advance every store of every row along the path to its accepted node; -1 leaves the row as it is."""
        assert self._committed is not None
        path, length = path_to_node(parents, accepted_node)
        longest = int(length.max())
        path = path[:, :longest]
        for layer in self.state_layers:
            layer.commit(parents, accepted_node)
        for layer in self.key_value_layers:
            layer.commit(self.lengths, path, length)
        index = torch.arange(longest, device=path.device)
        grown = torch.nn.functional.pad(self._committed, (0, longest))
        rows = torch.arange(path.shape[0], device=path.device)[:, None]
        grown[rows, self.lengths[:, None] + index] = index < length[:, None]
        self.lengths = self.lengths + length
        self._next_position = self._next_position + length
        self.columns_used = int(self.lengths.max())
        self._committed = grown[:, : self.columns_used]

    def materialize(self) -> None:
        """Fold into the states of all rows what is committed but still waits."""
        for layer in self.state_layers:
            layer.materialize()

    def reorder_rows(self, index: Tensor) -> None:
        """Let row ``i`` hold what row ``index[i]`` [B] held; only between rounds, when no nodes are on trial."""
        assert self._committed is not None
        self.materialize()
        for layer in self.layers:
            layer.reorder_cache(index)
        self._committed = self._committed[index]
        self.lengths = self.lengths[index]
        self._next_position = self._next_position[..., index]

    def to_dynamic_cache(self) -> DynamicCache:
        """Return a plain Hugging Face cache with what is committed.

        Raises:
            ValueError: If rows have different lengths, which a plain cache cannot hold.
        """
        if not bool((self.lengths == self.columns_used).all()):
            raise ValueError(f"rows have different lengths {self.lengths.tolist()}; a plain cache has one length")
        self.materialize()
        plain = DynamicCache(config=self._config)
        for ours, theirs in zip(self.layers, plain.layers, strict=True):
            if isinstance(ours, StateLayer):
                theirs.update_conv_state(ours.window.clone())
                theirs.update_recurrent_state(ours.state.clone())
            else:
                used = (store[:, :, : self.columns_used].clone() for store in (ours.keys, ours.values))
                theirs.update(*used)
        return plain

    @property
    def num_node_bytes(self) -> int:
        """Bytes kept beside the committed stores, over all GDN layers."""
        return sum(layer.nodes.num_bytes for layer in self.state_layers)

    @property
    def num_snapshot_bytes(self) -> int:
        """Bytes that a snapshot of one node takes: state and convolution window, over all GDN layers."""
        return sum(layer.state.nbytes + layer.window.nbytes for layer in self.state_layers)
