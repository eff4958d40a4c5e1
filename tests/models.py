"""Tiny random models of every kind that the tests decode with, and their plain runs, in float32 on the CPU.

Sizes differ from one another wherever the architectures let them, so that no swapped dimension goes unseen: 2 key heads
and 6 value heads of widths 8 and 10, 9 query heads over 3 key-value heads of width 12. GDN and attention layers
alternate, so that what attention gets wrong reaches the stores of a later GDN layer. Weights are large enough for
greedy text to be varied.
"""

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tolerances import STORES_FLOAT32, relative_error
from treewy._cache import StateLayer, TreeCache
from treewy._nodes import DeferredNodes, FusedNodes, WyNodes
from treewy._session import Session
from treewy._snapshots import SnapshotNodes

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

VOCAB_SIZE = 61

POLICIES = (WyNodes, FusedNodes, DeferredNodes, SnapshotNodes)

FAMILIES = ("qwen3_next", "qwen3_5")

PREDICTABLE = 0.02
"""A factor on what layers add to the residual stream. With it text depends little on what came before: it loops, and
models that share their embeddings often agree."""

_BASIC = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_HYBRID = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_conv_kernel_dim": 4,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_ROPE_QWEN3_5 = {**_ROPE, "mrope_section": [1, 1, 1], "mrope_interleaved": True}

_WRITES_TO_RESIDUAL = ("out_proj.weight", "o_proj.weight", "down_proj.weight")


def _new_model(family: str) -> tuple[type[PreTrainedModel], transformers.PreTrainedConfig]:
    if family == "qwen3_next":
        config = transformers.Qwen3NextConfig(**_BASIC, **_HYBRID, rope_parameters=_ROPE, num_experts=0)
        return transformers.Qwen3NextForCausalLM, config
    if family == "qwen3_5":
        config = transformers.Qwen3_5TextConfig(**_BASIC, **_HYBRID, rope_parameters=_ROPE_QWEN3_5)
        return transformers.Qwen3_5ForCausalLM, config
    assert family == "qwen3"
    return transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**_BASIC, num_hidden_layers=2)


@functools.cache
def plain_model(family: str, seed: int = 0, attention: str = "sdpa", mixing: float = 1.0) -> PreTrainedModel:
    """A model that nobody compiles or changes: the same object at every call. "qwen3" is the attention-only family."""
    model_class, config = _new_model(family)
    config._attn_implementation = attention
    model = model_class(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            scale = 0.3 * mixing if name.endswith(_WRITES_TO_RESIDUAL) else 0.3
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
        elif name.endswith("A_log"):
            parameter.copy_(torch.log(0.02 + 0.3 * torch.rand(parameter.shape, generator=generator)))
        elif name.endswith("dt_bias"):
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def fresh_model(family: str, seed: int = 0, attention: str = "sdpa", mixing: float = 1.0) -> PreTrainedModel:
    """A copy of the plain model, to compile."""
    return copy.deepcopy(plain_model(family, seed, attention, mixing))


@functools.cache
def noisy_copy(model: PreTrainedModel, noise: float, seed: int = 0) -> PreTrainedModel:
    """The model with noise on every weight, relative to its tensor's standard deviation: agrees with it sometimes."""
    noisy = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in noisy.parameters():
        if parameter.ndim >= 2:
            parameter.add_(noise * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return noisy


@functools.cache
def attention_only_draft(target: PreTrainedModel, seed: int = 1, mixing: float = 1.0) -> PreTrainedModel:
    """A model without GDN layers that shares the target's embeddings."""
    draft = fresh_model("qwen3", seed, mixing=mixing)
    draft.model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
    draft.lm_head.weight.copy_(target.lm_head.weight)
    return draft


def random_tokens(*shape: int, seed: int) -> Tensor:
    """Token ids that are neither padding nor the beginning of a text."""
    return torch.randint(2, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(seed))


def left_padded(lengths: Sequence[int], seed: int, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Random prompts of the given lengths `[B, T]` with pads on the left, and their mask."""
    width = max(lengths) if width is None else width
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return random_tokens(len(lengths), width, seed=seed) * mask, mask


def greedy(model: PreTrainedModel, prompt: Tensor, mask: Tensor, max_new_tokens: int, eos: object = None) -> Tensor:
    """What `generate` returns without speculation."""
    return model.generate(
        prompt,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos,
        pad_token_id=0,
    )


def new_tokens(model: PreTrainedModel, prompt: Tensor, mask: Tensor, number: int) -> list[list[int]]:
    """The greedy continuation of each row, without end-of-sequence tokens."""
    return greedy(model, prompt, mask, number)[:, prompt.shape[1] :].tolist()


Stores = list[tuple[Tensor, Tensor]]
"""Of one row, for each layer: state and convolution window, or keys and values of the real tokens."""


def committed_state(layer: StateLayer) -> Tensor:
    """The state [B, HV, K, V] with all that waits folded in; the layer itself goes on waiting."""
    state = layer.state.clone()
    copy.deepcopy(layer.nodes).materialize_(state)
    return state


def committed_stores(cache: TreeCache, row: int, start: int) -> Stores:
    """What a cache of ours has committed for a row whose first `start` columns are pads."""
    stop = int(cache.lengths[row])
    return [
        (committed_state(layer)[row], layer.window[row].clone())
        if isinstance(layer, StateLayer)
        else (layer.keys[row, :, start:stop].clone(), layer.values[row, :, start:stop].clone())
        for layer in cache.layers
    ]


@dataclass(frozen=True)
class Step:
    """Where a plain model is after some tokens."""

    logits: Tensor  # of the last token [V]
    stores: Stores
    cache: DynamicCache


class TokenByToken:
    """The plain model fed one token at a time, without a batch and without pads; remembers every text that it read."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._keyword = Session(model).cache_keyword
        self._steps: dict[tuple[int, ...], Step] = {}

    def after(self, tokens: Sequence[int]) -> Step:
        """Feed the tokens that no earlier call has fed."""
        text = tuple(tokens)
        known = next((n for n in range(len(text), 0, -1) if text[:n] in self._steps), 0)
        for length in range(known + 1, len(text) + 1):
            self._steps[text[:length]] = self._feed(text[: length - 1], text[length - 1])
        return self._steps[text]

    def _feed(self, before: tuple[int, ...], token: int) -> Step:
        cache = copy.deepcopy(self._steps[before].cache) if before else DynamicCache(config=self._model.config)
        output = self._model(torch.tensor([[token]]), use_cache=True, **{self._keyword: cache})
        stores = [
            (layer.recurrent_states[0][0], layer.conv_states[0][0])
            if hasattr(layer, "recurrent_states")
            else (layer.keys[0], layer.values[0])
            for layer in cache.layers
        ]
        return Step(output.logits[0, -1], stores, cache)


@functools.cache
def token_by_token(model: PreTrainedModel) -> TokenByToken:
    """The run of a plain model that all tests of a process share."""
    return TokenByToken(model)


def assert_stores_equal_plain_run(
    cache: TreeCache, row: int, num_pads: int, tokens: Sequence[int], model: PreTrainedModel
) -> None:
    """A row's three stores hold these tokens and nothing else, as the plain model alone would have them."""
    assert int(cache.lengths[row]) == num_pads + len(tokens)
    expected = token_by_token(model).after(tokens).stores
    for layer, stores in enumerate(zip(committed_stores(cache, row, num_pads), expected, strict=True)):
        for store, (ours, plain) in enumerate(zip(*stores, strict=True)):
            assert ours.shape == plain.shape
            error = relative_error(ours, plain)
            assert error <= STORES_FLOAT32, f"row {row}, layer {layer}, store {store}: {error:.1e}"


def tiny_vision_model(seed: int = 0) -> PreTrainedModel:
    """Qwen3.5 inside its vision-language class, with one vision layer."""
    config = transformers.Qwen3_5Config(
        text_config={**_BASIC, **_HYBRID, "rope_parameters": _ROPE_QWEN3_5},
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 20,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 16,
        },
        image_token_id=58,
        video_token_id=59,
        vision_start_token_id=56,
        vision_end_token_id=57,
    )
    model = transformers.Qwen3_5ForConditionalGeneration(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model
