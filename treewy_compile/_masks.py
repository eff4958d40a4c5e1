"""The attention mask of a tree forward, in the form that the model takes."""

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache

from treewy._cache import TreeCache
from treewy._tree_forward import TreeForward
from treewy.passes import names_called

_MASKED_ATTENTION = ("eager", "sdpa")  # implementations that take a mask [B, 1, N, columns]


def refuse_unmaskable(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Raise if a tree's mask cannot reach every attention layer of a model with this text configuration."""
    if config._attn_implementation not in _MASKED_ATTENTION:
        raise ValueError(
            f"attention implementation {config._attn_implementation!r} cannot take a tree's mask; "
            f"call model.set_attn_implementation('sdpa') (supported: {', '.join(_MASKED_ATTENTION)})"
        )
    sliding = [index for index, is_sliding in enumerate(DynamicCache(config=config).is_sliding) if is_sliding]
    kinds = getattr(config, "layer_types", None) or []
    if not sliding:
        return
    chunked = [index for index in sliding if kinds and kinds[index] != "sliding_attention"]
    if chunked or getattr(config, "sliding_window", None) is None:
        raise ValueError(
            f"layer {(chunked or sliding)[0]} attends in chunks, which treewy does not support; it supports full "
            "attention and sliding windows, so generate without a drafter"
        )
    # by what the forward calls: a configuration may ask for windows that the model's code knows nothing of
    made_with = {"create_sliding_window_causal_mask"}
    if len(sliding) < len([kind for kind in kinds if kind in ("full_attention", "sliding_attention")]):
        made_with.add("dict")  # a mask for each kind of layer
    if not any(made_with <= names_called(type(module)) for module in model.modules()):
        raise ValueError(
            f"layer {sliding[0]} of {type(model).__name__} is to have a sliding window, but its code makes no mask for "
            "one; set that layer's kind in config.layer_types to one that the model has"
        )


def tree_mask(
    cache: TreeCache, forward: TreeForward, config: PreTrainedConfig, dtype: torch.dtype
) -> Tensor | dict[str, Tensor | None]:
    """Return the mask [B, 1, N, columns] of a tree forward, or one for each kind of layer if there are windows.

    Args:
        cache: The stores, after ``begin``.
        forward: What ``begin`` returned.
        config: Text configuration of the model.
        dtype: Of the model; eager attention adds its mask to the scores.
    """
    mask = cache.attention_mask(forward)
    sliding = [layer.is_sliding for layer in cache.key_value_layers]
    if not any(sliding):
        return _as_taken(mask, config, dtype)
    windowed = _as_taken(mask & cache.within_window(forward, config.sliding_window), config, dtype)
    if all(sliding):
        return windowed
    full = _as_taken(mask, config, dtype)
    return {"full_attention": full, "sliding_attention": windowed, "linear_attention": None}


def _as_taken(mask: Tensor, config: PreTrainedConfig, dtype: torch.dtype) -> Tensor:
    if config._attn_implementation == "sdpa":
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
