"""The stores of a batch at fixed places, for compiled forwards and CUDA graphs.

A forward over nodes reads them and hands out what a commit needs. The commit advances windows, keys and values at once
and notes the accepted path. The states wait: the next forward puts the path into each layer's ring of known rows, or
folds ring and path into the state where the ring has no room (`tree_wy_verify_`). `take_in` notes that it did, so that
a forward may be repeated, over the same nodes and more, before one is accepted.

A model of attention alone, as a draft model may be, has no states, windows and rings.

Stores of layers alike lie in one pool, so that a commit moves all of them together.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from treewy._cache import TreeCache
from treewy.ops import path_to_node, tree_conv_commit_, tree_wy_commit_
from treewy.passes import AttentionLayerInfo, GdnLayerInfo, TreePrefix

_SLICE = 128  # rows that a kernel folds at once
_COLUMNS = 256  # keys and values grow in such steps

HandedOut = Mapping[tuple[str, str], Tensor]


class StaticStores:
    """The three stores of all layers, for a number of rows and nodes.

    Args:
        cache: After a prefill; gives rows, shapes, dtypes and what is committed.
        gdn_layers: The Gated DeltaNet layers of the model.
        attention_layers: Its attention layers.
        num_nodes: Most nodes of a tree.
        ring_rows: Rows of the rings; 0 to fold every path when the next tree is verified.
    """

    @torch.inference_mode(False)  # or nothing could be written outside of it
    def __init__(
        self,
        cache: TreeCache,
        gdn_layers: Sequence[GdnLayerInfo],
        attention_layers: Sequence[AttentionLayerInfo],
        num_nodes: int,
        ring_rows: int,
    ) -> None:
        self.num_nodes = num_nodes
        self._gdn_layers, self._attention_layers = gdn_layers, attention_layers
        batch, device = len(cache.lengths), cache.lengths.device
        self._keys = self._values = torch.zeros(0, batch, 0, 0, 0, device=device)
        if attention_layers:
            keys = cache.key_value_layers[0].keys
            self._keys, self._values = (
                x.new_zeros(len(attention_layers), *x.shape[:2], 0, x.shape[3])
                for x in (keys, cache.key_value_layers[0].values)
            )
        self._shown = {layer.layer_idx: window for layer, window in zip(attention_layers, cache.windows, strict=True)}
        self._slots = torch.arange(batch, device=device)
        self._start, self.lengths, self._length = (torch.zeros_like(cache.lengths) for _ in range(3))
        self.next_position = torch.zeros_like(cache.next_position)
        self.of_layers = {
            ("", "num_known"): torch.zeros_like(self.lengths),
            ("", "path"): self.lengths.new_zeros(batch, num_nodes),
            ("", "path_length"): torch.zeros_like(self.lengths),
        }
        """What the layers keep between forwards, for ``TreeBackend``."""
        self._states: list[Tensor] = []
        self._windows = self._keys[:0]
        if gdn_layers:
            self._add_states(cache, ring_rows)
        self.cache = Cache(layers=self._layers(len(cache.layers)))
        """What the model's own code sees as its cache."""

    def _add_states(self, cache: TreeCache, ring_rows: int) -> None:
        """Make the stores of the Gated DeltaNet layers."""
        window, state = cache.state_layers[0].window, cache.state_layers[0].state
        number, num_nodes = len(self._gdn_layers), self.num_nodes
        batch, value_heads, key_dim, value_dim = state.shape
        key_heads = self._gdn_layers[0].num_key_heads
        self._states = [torch.zeros_like(layer.state) for layer in cache.state_layers]
        self._windows = window.new_zeros(number, *window.shape)
        self._last_keys = window.new_zeros(number, batch, num_nodes, key_heads, key_dim)
        self._last_log_decays = state.new_zeros(number, batch, num_nodes, value_heads)
        for index, layer in enumerate(self._gdn_layers):
            ring = batch, ring_rows
            self.of_layers |= {
                (layer.name, "pseudo_value"): state.new_zeros(batch, num_nodes, value_heads, value_dim),
                (layer.name, "ring_pseudo_value"): state.new_zeros(*ring, value_heads, value_dim),
                (layer.name, "ring_key"): window.new_zeros(*ring, key_heads, key_dim),
                (layer.name, "ring_log_decay"): state.new_zeros(*ring, value_heads),
                (layer.name, "last_key"): _plain(self._last_keys[index]),
                (layer.name, "last_log_decay"): _plain(self._last_log_decays[index]),
            }

    def fits(self, cache: TreeCache, num_nodes: int) -> bool:
        """Tell whether these are stores for the rows, shapes, dtypes and windows of a cache, and for so many nodes."""
        theirs, ours = [cache.next_position], [self.next_position]
        for state_layer in cache.state_layers[:1]:
            theirs += [state_layer.state, state_layer.window]
            ours += [self._states[0], self._windows[0]]
        for layer in cache.key_value_layers[:1]:
            theirs += [layer.keys[:, :, :0], layer.values[:, :, :0]]
            ours += [self._keys[0, :, :, :0], self._values[0, :, :, :0]]
        same = all(_kind(a) == _kind(b) for a, b in zip(ours, theirs, strict=True))
        return same and list(self._shown.values()) == cache.windows and self.num_nodes >= num_nodes

    @property
    def num_bytes(self) -> int:
        """Bytes kept beside the committed stores, over all layers."""
        return sum(tensor.nbytes for tensor in self.of_layers.values())

    def _layers(self, number: int) -> list[Any]:
        layers: list[Any] = [_NodeKeysAndValues() for _ in range(number)]
        for index, layer in enumerate(self._gdn_layers):
            layers[layer.layer_idx] = _StaticState(self._states[index], _plain(self._windows[index]))
        return layers

    def load(self, cache: TreeCache) -> bool:
        """Take over what a cache has committed, and let go of its keys and values; return whether ours have moved."""
        start = cache.first_columns()  # which may refuse, before anything has changed
        for index, layer in enumerate(cache.state_layers):
            self._states[index].copy_(layer.state)
            self._windows[index].copy_(layer.window)
        moved = self.reserve(cache.columns_used + self.num_nodes)
        for index, store in enumerate(cache.key_value_layers):
            self._keys[index][:, :, : cache.columns_used] = store.keys[:, :, : cache.columns_used]
            self._values[index][:, :, : cache.columns_used] = store.values[:, :, : cache.columns_used]
            store.keys, store.values = store.keys[:, :, :0].clone(), store.values[:, :, :0].clone()
        self.lengths.copy_(cache.lengths)
        self._start.copy_(start)
        self._length.copy_(self.lengths - self._start)
        self.next_position.copy_(cache.next_position)
        # What an earlier text left behind may be anything, and meets a weight of zero in a reference.
        behind = (pool[:, :, :, cache.columns_used :] for pool in (self._keys, self._values))
        for leftover in (*self.of_layers.values(), *behind):
            leftover.zero_()
        return moved

    def unload(self, cache: TreeCache) -> None:
        """Hand over all that is committed, folded into the states."""
        stores = self.of_layers
        known, path, length = (stores["", what] for what in ("num_known", "path", "path_length"))
        places = path.clamp(min=0)

        def along_path(nodes: Tensor) -> Tensor:
            return nodes.gather(1, places.reshape(*path.shape, *[1] * (nodes.ndim - 2)).expand_as(nodes))

        for index, (layer, target) in enumerate(zip(self._gdn_layers, cache.state_layers, strict=True)):
            rows = [
                torch.cat([stores[layer.name, "ring_" + what], along_path(stores[layer.name, last + what])], dim=1)
                for what, last in (("pseudo_value", ""), ("key", "last_"), ("log_decay", "last_"))
            ]
            size = stores[layer.name, "ring_key"].shape[1]
            chain = torch.arange(-1, rows[0].shape[1] - 1, device=path.device).repeat(len(path), 1)
            chain[:, size] = known - 1  # the path follows what is known, not what the ring has room for
            accepted = torch.where(length > 0, size + length - 1, known - 1)
            target.state.copy_(self._states[index])
            for first in range(0, chain.shape[1], _SLICE):
                part = slice(first, first + _SLICE)
                value, key, log_decay = (x[:, part] for x in rows)
                last_of_part = (accepted - first).clamp(-1, value.shape[1] - 1)
                parents = (chain[:, part] - first).clamp(min=-1)
                tree_wy_commit_(target.state, self._slots, value, key, log_decay, parents, last_of_part)
            target.window.copy_(self._windows[index])
        used = int(self.lengths.max())
        for index, store in enumerate(cache.key_value_layers):
            store.keys, store.values = (pool[index][:, :, :used].clone() for pool in (self._keys, self._values))
        cache.continue_rows(self._start, self.lengths.clone(), self.next_position.clone())

    @torch.inference_mode(False)
    def reserve(self, columns: int) -> bool:
        """Make room for so many columns of keys and values; return whether they moved."""
        if columns <= self._keys.shape[3]:
            return False
        columns += _COLUMNS - columns % _COLUMNS
        self._keys, self._values = (
            torch.cat([pool, pool.new_zeros(*pool.shape[:3], columns - pool.shape[3], pool.shape[4])], dim=3)
            for pool in (self._keys, self._values)
        )
        by_layer: list[dict[int, Tensor]] = []
        for pool in (self._keys, self._values):
            by_layer.append({layer.layer_idx: _plain(pool[i]) for i, layer in enumerate(self._attention_layers)})
            # Longer ones are captured again, not compiled again.
            torch._dynamo.mark_dynamic(pool, 3)
            for tensor in by_layer[-1].values():
                torch._dynamo.mark_dynamic(tensor, 2)
        keys, values = by_layer
        self.prefix = TreePrefix(self._start, self._length, keys, values, self._shown)
        return True

    def take_in(self, handed_out: HandedOut) -> None:
        """Note, without a commit, that a forward has put the last path into rings or states: the next one need not."""
        if self._gdn_layers:
            self.of_layers["", "num_known"].copy_(handed_out["", "num_known"])
            self.of_layers["", "path_length"].zero_()

    def commit(self, handed_out: HandedOut, parents: Tensor, accepted_node: Tensor) -> None:
        """Advance all rows along the path to a node of the tree that was verified last.

        Args:
            handed_out: What its forward handed out.
            parents: [B, N].
            accepted_node: [B]; -1 leaves a row as it is.
        """
        num_nodes = parents.shape[1]

        def stacked(layers: Sequence[Any], what: str) -> Tensor:
            return torch.stack([handed_out[layer.name, what] for layer in layers])

        path, length = path_to_node(parents, accepted_node)
        if self._gdn_layers:
            columns = stacked(self._gdn_layers, "columns").transpose(2, 3)
            tree_conv_commit_(self._windows, self._slots, columns, parents, accepted_node)
            self._last_keys[:, :, :num_nodes] = stacked(self._gdn_layers, "key")
            self._last_log_decays[:, :, :num_nodes] = stacked(self._gdn_layers, "log_decay")
            self.of_layers["", "num_known"].copy_(handed_out["", "num_known"])
            self.of_layers["", "path"][:, :num_nodes] = path
            self.of_layers["", "path_length"].copy_(length)
        if self._attention_layers:
            index = torch.arange(num_nodes, device=path.device)
            source = torch.where(index < length[:, None], path, index)  # behind the path anything, but finite
            rows, target = self._slots[:, None], self.lengths[:, None] + index
            for pool, what in ((self._keys, "key"), (self._values, "value")):
                new = stacked(self._attention_layers, what)
                pool[:, rows, :, target] = new[:, rows, :, source].to(pool.dtype)
        self.lengthen(length)

    def lengthen(self, columns: Tensor | int) -> None:
        """Count so many columns more as committed, in each row or in all."""
        for counter in (self.lengths, self._length, self.next_position):
            counter.add_(columns)


class _StaticState(LinearAttentionLayer):  # type: ignore[misc]
    """State and window of a layer as a traced forward sees them: it reads them, and passes drop what it writes."""

    def __init__(self, state: Tensor, window: Tensor) -> None:
        super().__init__()
        self.recurrent_states[0], self.conv_states[0] = state, window
        self.is_recurrent_states_initialized[0] = self.is_conv_states_initialized[0] = True
        self.has_previous_state[0] = True
        self.record_past = True  # keeps Hugging Face off its fused single-token path, which calls nothing of ours

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        window = self.conv_states[state_idx]
        both = torch.cat([window, conv_states], dim=-1)
        window.copy_(both[..., -window.shape[-1] :])
        return both


class _NodeKeysAndValues(DynamicLayer):  # type: ignore[misc]
    """Shows a traced attention the keys and values of its nodes alone; the prefix comes as ``treewy_prefix``."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _plain(view: Tensor) -> Tensor:
    """Return the same memory as a tensor of its own: a view would bring the whole pool into a graph."""
    return view.data
