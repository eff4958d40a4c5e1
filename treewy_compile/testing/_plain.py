"""The plain model in two ways, token by token and all at once, and the stores that it leaves behind."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from treewy._cache import StateLayer, TreeCache
from treewy._session import Session
from treewy.testing._report import ATTENTION_STORES, GDN_STORES

Stores = list[dict[str, Tensor]]
"""Of one row and for each layer: its two stores by name."""


def committed_stores(cache: TreeCache, starts: Sequence[int]) -> list[Stores]:
    """Return what a cache of ours has committed of each row, whose first columns up to ``starts`` are pads."""
    cache = copy.deepcopy(cache)  # read a copy in which everything is written: a policy may write late
    cache.materialize()
    return [_stores_of_row(cache, row, start) for row, start in enumerate(starts)]


def _stores_of_row(cache: TreeCache, row: int, start: int) -> Stores:
    text = slice(start, int(cache.lengths[row]))
    return [
        dict(zip(GDN_STORES, (layer.state[row], layer.window[row]), strict=True))
        if isinstance(layer, StateLayer)
        else dict(zip(ATTENTION_STORES, (layer.keys[row, :, text], layer.values[row, :, text]), strict=True))
        for layer in cache.layers
    ]


class PlainRun:
    """One text through the plain model, without a batch and without pads.

    Args:
        model: The model; its ``forward`` alone is used.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._keyword = Session(model).cache_keyword
        self._cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        self.num_tokens = 0
        self.logits: list[Tensor] = []  # after each token [V]

    def feed(self, token_ids: Sequence[int]) -> Tensor:
        """Run some more tokens in one forward; return the logits [V] after the last."""
        tokens = torch.tensor([token_ids], device=self._model.device)
        position = self.num_tokens + torch.arange(len(token_ids), device=self._model.device)
        output = self._model(
            input_ids=tokens,
            position_ids=position[None],
            use_cache=True,
            return_dict=True,
            logits_to_keep=1,
            **{self._keyword: self._cache},
        )
        self.num_tokens += len(token_ids)
        logits: Tensor = output.logits[0, -1]
        return logits

    def follow(self, text: Sequence[int]) -> None:
        """Feed what is new of a text, token by token."""
        for token in text[self.num_tokens :]:
            self.logits.append(self.feed([token]))

    @property
    def sliding_layers(self) -> set[int]:
        """Attention layers that forget what has left their window."""
        return {index for index, layer in enumerate(self._cache.layers) if getattr(layer, "is_sliding", False)}

    def stores(self) -> Stores:
        """Return the stores after the tokens so far; a sliding layer has the last columns only."""
        return [
            dict(zip(GDN_STORES, (layer.recurrent_states[0][0], layer.conv_states[0][0]), strict=True))
            if hasattr(layer, "recurrent_states")
            else dict(zip(ATTENTION_STORES, (layer.keys[0], layer.values[0]), strict=True))
            for layer in self._cache.layers
        ]


def stores_at_once(model: PreTrainedModel, text: Sequence[int]) -> Stores:
    """Return the stores after one forward over a text."""
    run = PlainRun(model)
    run.feed(text)
    return run.stores()


def logits_at_once(model: PreTrainedModel, texts: Sequence[Sequence[int]], keep: int) -> Tensor:
    """Run texts in one forward without a cache; return the logits [B, keep, V] of the last columns.

    Shorter texts are filled up on the right, which no causal model can see from the left.
    """
    rows = [torch.tensor(text, device=model.device) for text in texts]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    position = torch.arange(tokens.shape[1], device=model.device).expand_as(tokens)
    output = model(input_ids=tokens, position_ids=position, use_cache=False, return_dict=True, logits_to_keep=keep)
    logits: Tensor = output.logits
    return logits
