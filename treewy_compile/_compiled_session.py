"""A session whose tree forwards are compiled, on CUDA captured as graphs; prefill stays the model's own."""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from treewy._compiled_forward import CompiledForward
from treewy._decoding import Decoding, Emission
from treewy._draft_tree import DraftTree
from treewy._nodes import DeferredNodes
from treewy._session import Session
from treewy._static_stores import StaticStores
from treewy.ops import PADDING
from treewy.passes import find_attention_layers, find_gdn_layers

RING_ROWS = {"deferred": 16, "fused": 0}
"""Rows of the ring, by commit policy; the first is the default."""

_LEAST_NODES = 32
_BUCKET = 16


class CompiledTarget:
    """What is compiled of a model, kept from one generation to the next.

    Args:
        model: The target.
        inner: Backend that compiles the rewritten graphs.
        commit: Commit policy, "deferred" or "fused".
    """

    def __init__(self, model: PreTrainedModel, inner: str, commit: str) -> None:
        self.model = model
        self._inner, self._ring_rows = inner, RING_ROWS[commit]
        self._gdn_layers, self._attention_layers = find_gdn_layers(model), find_attention_layers(model)
        self._stores: StaticStores | None = None
        self._forwards: dict[int, CompiledForward] = {}

    def load(self, session: Session, num_nodes: int) -> StaticStores:
        """Return stores that hold what a session has committed, with room for so many nodes."""
        cache, stores = session.cache, self._stores
        if stores is None or len(stores.lengths) != len(cache.lengths) or stores.num_nodes < num_nodes:
            self._forwards.clear()
            num_nodes = max(_LEAST_NODES, num_nodes)
            stores = StaticStores(cache, self._gdn_layers, self._attention_layers, num_nodes, self._ring_rows)
            self._stores = stores
        if stores.load(cache):
            self.forget_graphs()
        return stores

    def forward(self, session: Session, num_nodes: int) -> CompiledForward:
        """Return the forward over so many nodes behind the current stores."""
        assert self._stores is not None
        if num_nodes not in self._forwards:
            layers = self._gdn_layers, self._attention_layers
            self._forwards[num_nodes] = CompiledForward(
                self.model, session.cache_keyword, *layers, self._stores, num_nodes, self._inner
            )
        return self._forwards[num_nodes]

    def forget_graphs(self) -> None:
        """Capture again what is used next."""
        for forward in self._forwards.values():
            forward.forget_graphs()


class CompiledSession(Session):
    """Run compiled tree forwards of one model over one batch; a tree is one forward.

    Args:
        target: What is compiled of the model.
        max_cache_len: Most columns (tokens, pads and nodes) a row may take; None for no limit.

    Raises:
        ValueError: If a layer or the attention implementation is not supported.
    """

    def __init__(self, target: CompiledTarget, max_cache_len: int | None = None) -> None:
        super().__init__(target.model, DeferredNodes, max_cache_len)
        self._target = target
        self._stores: StaticStores | None = None

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Compute the logits of a tree; see ``Session.extend``."""
        assert self.parents is None, "a compiled tree is one forward"
        num_nodes = parents.shape[1]
        self._forward, nodes = self.prepare(token_ids, parents)
        logits = self._forward.verify(*nodes)
        self.parents = nodes[1]
        return logits[:, :num_nodes]

    def commit(self, accepted_node: Tensor) -> None:
        """Advance all stores along the path to ``accepted_node``; see ``Session.commit``."""
        assert self.parents is not None
        self._forward.commit(accepted_node)
        self.parents = None
        self._follow()

    def round(
        self, token_ids: Tensor, parents: Tensor, decoding: Decoding, texts: list[Tensor], draft: DraftTree
    ) -> tuple[Emission, int]:
        """Verify, choose and commit, in one launch where the logits decide all; see ``Session.round``."""
        limits = decoding.limits(texts)
        if limits is None:
            emission, _ = super().round(token_ids, parents, decoding, texts, draft)
        else:
            forward, nodes = self.prepare(token_ids, parents)
            room, eos = (limit.to(token_ids.device) for limit in limits)
            emission = forward.round(*nodes, room, eos).cloned()
            self._follow()
        return emission, self.stores.num_bytes

    @property
    def stores(self) -> StaticStores:
        """Where everything lies since the first tree."""
        assert self._stores is not None
        return self._stores

    def plain_cache(self) -> DynamicCache | None:
        """Return what is committed as a plain cache; see ``Session.plain_cache``."""
        if self._stores is not None:
            self._stores.unload(self.cache)
        return super().plain_cache()

    def prepare(
        self, token_ids: Tensor, parents: Tensor, columns: int = 0
    ) -> tuple[CompiledForward, tuple[Tensor, Tensor]]:
        """Make room for a tree behind at least so many columns, and pad it to the size of a compiled forward."""
        self._check_room(parents.shape[1])
        size = 1 if parents.shape[1] == 1 else parents.shape[1] + -parents.shape[1] % _BUCKET
        if self._stores is None or self._stores.num_nodes < size:
            if self._stores is not None:
                self._stores.unload(self.cache)
            self._stores = self._target.load(self, size)
        if self._stores.reserve(max(columns, self.cache.columns_used) + size):
            self._target.forget_graphs()
        more = 0, size - parents.shape[1]
        padded = torch.nn.functional.pad(token_ids, more), torch.nn.functional.pad(parents, more, value=PADDING)
        return self._target.forward(self, size), padded

    def _follow(self) -> None:
        """Let the lengths of the cache follow those of the stores."""
        self.cache.lengths = self.stores.lengths.clone()
        self.cache.columns_used = int(self.cache.lengths.max())


def refuse_uncompilable(model: PreTrainedModel, backend: str) -> None:
    """Raise if a compiled forward cannot serve a model that the eager engine can."""
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    found = {layer.layer_idx for layer in find_gdn_layers(model)}
    found |= {layer.layer_idx for layer in find_attention_layers(model)}
    remedy = "compile it with backend='eager'"
    for index, layer in enumerate(layers):
        if getattr(layer, "is_sliding", False):
            raise ValueError(
                f"layer {index} of {type(model).__name__} attends within a sliding window, which backend {backend!r} "
                f"does not know; {remedy}"
            )
        if index not in found:
            raise ValueError(
                f"layer {index} of {type(model).__name__} does not ask transformers for its attention function, so "
                f"that backend {backend!r} cannot see it; {remedy}"
            )
