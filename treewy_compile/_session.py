"""A model together with its stores: prefill, then any number of tree forwards and commits."""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from treewy._cache import TreeCache
from treewy._decoding import Decoding, Emission
from treewy._draft_tree import DraftTree
from treewy._masks import refuse_unmaskable, tree_mask
from treewy._nodes import Nodes, WyNodes
from treewy._texts import Texts
from treewy.passes import find_gdn_layers, redirect_layers


class Session:
    """Run tree forwards of one model over one batch.

    The life of a session: ``cache`` goes through a prefill and is told which tokens were real (``cache.start_rows``),
    then ``extend`` adds nodes (as often as a tree grows by a level) and ``commit`` keeps the path to one of them.

    Args:
        model: Target or draft model.
        make_nodes: Commit policy.
        max_cache_len: Most columns (tokens, pads and nodes) a row may take; None for no limit.

    Raises:
        ValueError: If a layer or the attention implementation is not supported.
    """

    def __init__(
        self, model: PreTrainedModel, make_nodes: Callable[[], Nodes] = WyNodes, max_cache_len: int | None = None
    ) -> None:
        _refuse_unsupported(model)
        self.model = model
        self._gdn_layers = find_gdn_layers(model)
        self._text_config = model.config.get_text_config(decoder=True)
        self.cache = TreeCache(self._text_config, self._gdn_layers, make_nodes)
        self._max_cache_len = max_cache_len
        self.parents: Tensor | None = None  # of the nodes on trial, [B, M]

    @property
    def cache_keyword(self) -> str:
        """Name under which this version of transformers takes the cache."""
        return "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"

    def prefill(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Run a left-padded prompt [B, T] with its mask through the model; return the last token's logits [B, V]."""
        position = mask.long().cumsum(dim=1) - 1
        logits: Tensor = self.model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=position.clamp(min=0),
            use_cache=True,
            return_dict=True,
            logits_to_keep=1,
            **{self.cache_keyword: self.cache},
        ).logits
        self.cache.start_rows(mask, position[:, -1] + 1)
        return logits[:, -1]

    @property
    def num_nodes(self) -> int:
        """Nodes on trial."""
        return 0 if self.parents is None else self.parents.shape[1]

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Add nodes to the tree on trial and compute their logits; nothing that is committed changes.

        Args:
            token_ids: Tokens of the new nodes [B, N]; those of padding nodes must be valid too.
            parents: Index of each new node's parent among all nodes on trial [B, N], -1 for a child of what is
                committed, ``PADDING`` for padding.

        Returns:
            Logits [B, N, vocabulary].

        Raises:
            ValueError: If the cache limit would be passed.
        """
        both = parents if self.parents is None else torch.cat([self.parents, parents], dim=1)
        self._check_room(both.shape[1])
        forward = self.cache.begin(both, token_ids.shape[1])
        try:
            more: dict[str, object] = {"treewy_call": forward} if self._gdn_layers else {}
            if getattr(self._text_config, "output_router_logits", False):
                more["output_router_logits"] = False  # a training loss over the experts, which reads a mask of tokens
            with redirect_layers(self._gdn_layers):
                logits: Tensor = self.model(
                    input_ids=token_ids,
                    attention_mask=tree_mask(self.cache, forward, self._text_config, self.model.dtype),
                    position_ids=self.cache.node_positions(forward),
                    use_cache=True,
                    return_dict=True,
                    **{self.cache_keyword: self.cache},
                    **more,
                ).logits
        finally:
            self.cache.end()
        self.parents = both
        return logits

    def commit(self, accepted_node: Tensor) -> None:
        """Advance all stores along the path to ``accepted_node`` [B]; -1 leaves a row as it is. Forget the nodes."""
        assert self.parents is not None
        self.cache.commit(self.parents, accepted_node)
        self.parents = None

    def round(
        self, token_ids: Tensor, parents: Tensor, decoding: Decoding, texts: Texts, draft: DraftTree
    ) -> tuple[Emission, int]:
        """Verify a tree, let a decoding choose, and commit; return what is emitted, and the bytes kept meanwhile.

        Args:
            token_ids: The root, that is each row's last token, and its drafts [B, N].
            parents: [B, N].
            decoding: Who chooses.
            texts: Each row's text so far.
            draft: What the nodes behind the root came from.
        """
        logits = self.extend(token_ids, parents)
        num_bytes = self.cache.num_node_bytes
        emission = decoding.emit(logits, token_ids, parents, texts, draft)
        self.commit(emission.node)
        return emission, num_bytes

    def reorder(self, index: Tensor) -> None:
        """Let row ``i`` hold what row ``index[i]`` [B] held; only between rounds, when no nodes are on trial."""
        assert self.parents is None
        self.cache.reorder_rows(index)

    @property
    def one_length(self) -> bool:
        """Whether all rows have committed as many columns."""
        return bool((self.cache.lengths == self.cache.columns_used).all())

    def plain_cache(self) -> DynamicCache | None:
        """Return what is committed as a plain cache, or None if rows have different lengths, which it cannot hold."""
        return self.cache.to_dynamic_cache() if self.one_length else None

    def close(self) -> None:
        """Let go of what others may use."""

    def _check_room(self, num_nodes: int) -> None:
        columns = self.cache.columns_used + num_nodes
        if self._max_cache_len is not None and columns > self._max_cache_len:
            raise ValueError(
                f"{columns} columns are needed but max_cache_len is {self._max_cache_len}: the tree's "
                f"{num_nodes} nodes do not fit; raise max_cache_len or draft a smaller tree"
            )


def _refuse_unsupported(model: PreTrainedModel) -> None:
    config = model.config.get_text_config(decoder=True)
    refuse_unmaskable(model, config)
    if model.config.is_encoder_decoder or "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"{type(model).__name__} is not a decoder that takes position_ids, which the nodes of a tree need; use "
            "another model"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {kind for part in (rope, *rope.values()) if isinstance(part, dict) for kind in [part.get("rope_type")]}
    if scaled := kinds & {"dynamic", "longrope"}:
        raise ValueError(
            f"rope_type {scaled.pop()!r} rotates by the longest position in a forward, so a draft would change what is "
            "verified; generate without a drafter"
        )
    if len(devices := {str(parameter.device) for parameter in model.parameters()}) > 1:
        raise ValueError(f"the model lies on several devices {sorted(devices)}; put it on one")
    if model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ValueError("gradient checkpointing in training mode keeps no cache; call model.eval()")
