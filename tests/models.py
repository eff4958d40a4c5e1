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
from treewy._cache import KeyValueLayer, StateLayer, TreeCache
from treewy._nodes import DeferredNodes, FusedNodes, WyNodes
from treewy._session import Session
from treewy._snapshots import SnapshotNodes

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

VOCAB_SIZE = 61

POLICIES = (WyNodes, FusedNodes, DeferredNodes, SnapshotNodes)

ALL_FAMILIES = (
    "qwen3_next",
    "qwen3_next_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_vision",
    "olmo_hybrid",
    "lara_mini",
)
FAMILIES = tuple(name for name in ALL_FAMILIES if name != "lara_mini" or hasattr(transformers, "LaraMiniConfig"))
"""Families of targets. LARA came to transformers behind the oldest version that is supported."""

MIXTURES = tuple(name for name in FAMILIES if "moe" in name or name == "lara_mini")
"""Those with experts."""

INTERFACE_FAMILIES = ("qwen3_next", "qwen3_5", FAMILIES[-1])
"""Those of the tests of the interface, most of which knows nothing of layers."""

VARIANTS = (
    "qwen3_next equal heads",
    "qwen3_5 one key head",
    "qwen3_5 wide keys",
    "olmo_hybrid rope",
    "qwen3_5_moe_vision",
)
"""Further targets, for the tests of the stores."""

ATTENTION_ONLY = ("qwen3", "qwen3 sliding", "mistral")
"""Draft models without GDN layers: full attention, a window in one of two layers, windows everywhere."""

EXPERTS = ("batched_mm", "grouped_mm", "eager")
BITWISE_EXPERTS = "batched_mm"
"""The implementation in which a token's bits do not depend on how many others go to the same expert."""

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
_LAYOUTS = {
    "equal heads": {"linear_num_key_heads": 3, "linear_num_value_heads": 3},
    "one key head": {"linear_num_key_heads": 1, "linear_num_value_heads": 4},
    "wide keys": {"linear_key_head_dim": 14, "linear_value_head_dim": 6},
    "short": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}
_OLMO_HEADS = {  # values are twice as wide as keys, and there are as many heads of either
    "linear_num_key_heads": 5,
    "linear_num_value_heads": 5,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 14,
}
_EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_VISION = {
    "vision_config": {
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
    "image_token_id": 58,
    "video_token_id": 59,
    "vision_start_token_id": 56,
    "vision_end_token_id": 57,
}
_ROPE_QWEN3_5 = {**_ROPE, "mrope_section": [1, 1, 1], "mrope_interleaved": True}

SLIDING_WINDOW = 7  # tokens; prompts and texts are longer

_WRITES_TO_RESIDUAL = ("out_proj.weight", "o_proj.weight", "down_proj.weight", "experts.down_proj")


def _new_model(family: str) -> tuple[type[PreTrainedModel], transformers.PreTrainedConfig]:
    """Class and configuration of a family, in its usual layout or, behind a space, in another one."""
    family, _, layout = family.partition(" ")
    hybrid = _HYBRID | _LAYOUTS.get(layout, {})
    if family == "qwen3_next":
        config = transformers.Qwen3NextConfig(**_BASIC, **hybrid, rope_parameters=_ROPE, num_experts=0)
        return transformers.Qwen3NextForCausalLM, config
    if family == "qwen3_next_moe":  # experts in every other layer
        config = transformers.Qwen3NextConfig(
            **_BASIC, **hybrid, **_EXPERTS, rope_parameters=_ROPE, decoder_sparse_step=2
        )
        return transformers.Qwen3NextForCausalLM, config
    if family == "qwen3_5":
        config = transformers.Qwen3_5TextConfig(**_BASIC, **hybrid, rope_parameters=_ROPE_QWEN3_5)
        return transformers.Qwen3_5ForCausalLM, config
    if family == "qwen3_5_moe":
        config = transformers.Qwen3_5MoeTextConfig(**_BASIC, **hybrid, **_EXPERTS, rope_parameters=_ROPE_QWEN3_5)
        return transformers.Qwen3_5MoeForCausalLM, config
    if family == "qwen3_5_vision":
        text = {**_BASIC, **hybrid, "rope_parameters": _ROPE_QWEN3_5}
        return transformers.Qwen3_5ForConditionalGeneration, transformers.Qwen3_5Config(text_config=text, **_VISION)
    if family == "qwen3_5_moe_vision":
        text = {**_BASIC, **hybrid, **_EXPERTS, "rope_parameters": _ROPE_QWEN3_5}
        config = transformers.Qwen3_5MoeConfig(text_config=text, **_VISION)
        return transformers.Qwen3_5MoeForConditionalGeneration, config
    if family == "olmo_hybrid":  # without rotary positions and with write strengths up to 2, as its checkpoints are
        rope = _ROPE if layout == "rope" else None
        config = transformers.OlmoHybridConfig(**_BASIC, **hybrid | _OLMO_HEADS, rope_parameters=rope)
        return transformers.OlmoHybridForCausalLM, config
    if family == "lara_mini":
        hybrid = {
            **hybrid,
            "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
        }
        config = transformers.LaraMiniConfig(**_BASIC, **hybrid, **_EXPERTS, sliding_window=SLIDING_WINDOW)
        return transformers.LaraMiniForCausalLM, config
    if family == "mistral":  # attention only, all of it with a window
        config = transformers.MistralConfig(**_BASIC, num_hidden_layers=2, sliding_window=SLIDING_WINDOW)
        return transformers.MistralForCausalLM, config
    assert family == "qwen3"
    sliding = {
        "use_sliding_window": True,
        "sliding_window": SLIDING_WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    config = transformers.Qwen3Config(**_BASIC, num_hidden_layers=2, **(sliding if layout == "sliding" else {}))
    return transformers.Qwen3ForCausalLM, config


@functools.cache
def plain_model(
    family: str, seed: int = 0, attention: str = "sdpa", mixing: float = 1.0, experts: str = BITWISE_EXPERTS
) -> PreTrainedModel:
    """A model that nobody compiles or changes: the same object at every call. "qwen3" is the attention-only family."""
    model_class, config = _new_model(family)
    model = model_class(config).eval().requires_grad_(False)
    model.set_attn_implementation(attention)
    if "moe" in family or family == "lara_mini":
        model.set_experts_implementation(experts)
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


def fresh_model(
    family: str, seed: int = 0, attention: str = "sdpa", mixing: float = 1.0, experts: str = BITWISE_EXPERTS
) -> PreTrainedModel:
    """A copy of the plain model, to compile."""
    return copy.deepcopy(plain_model(family, seed, attention, mixing, experts))


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
def draft_with_embeddings_of(
    target: PreTrainedModel, family: str = "qwen3", seed: int = 1, mixing: float = 1.0
) -> PreTrainedModel:
    """A model of another kind, by default without GDN layers, that shares the target's embeddings."""
    draft = fresh_model(family, seed, mixing=mixing)
    draft.get_input_embeddings().weight.copy_(target.get_input_embeddings().weight)
    draft.get_output_embeddings().weight.copy_(target.get_output_embeddings().weight)
    return draft


def hide_attention(model: PreTrainedModel, layer_idx: int) -> None:
    """Let a layer's attention come from a class whose code asks transformers for nothing."""
    attention = model.model.layers[layer_idx].self_attn

    class Hidden(type(attention)):  # type: ignore[misc]
        def forward(self, *args: object, **kwargs: object) -> object:
            return super().forward(*args, **kwargs)

    attention.__class__ = Hidden


def set_window(model: PreTrainedModel, window: int) -> None:
    """Give the layers of a LARA that have a sliding window another one."""
    model.config.sliding_window = window
    for module in model.modules():
        if getattr(module, "sliding_window", None) is not None:
            module.sliding_window = window


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


def _visible_columns(layer: KeyValueLayer, row: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """A row's columns that a plain cache would still have: of a window all but the place of the next token."""
    if layer.is_sliding:
        start = max(start, stop - (SLIDING_WINDOW - 1))
    return layer.keys[row, :, start:stop].clone(), layer.values[row, :, start:stop].clone()


def committed_stores(cache: TreeCache, row: int, start: int) -> Stores:
    """What a cache of ours has committed for a row whose first `start` columns are pads."""
    stop = int(cache.lengths[row])
    return [
        (committed_state(layer)[row], layer.window[row].clone())
        if isinstance(layer, StateLayer)
        else _visible_columns(layer, row, start, stop)
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
        # the position by itself: a vision model remembers an offset of its last prompt
        position = torch.tensor([[len(before)]])
        output = self._model(torch.tensor([[token]]), position_ids=position, use_cache=True, **{self._keyword: cache})
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
            error = relative_error(ours.to(plain.device), plain)
            assert error <= STORES_FLOAT32, f"row {row}, layer {layer}, store {store}: {error:.1e}"
