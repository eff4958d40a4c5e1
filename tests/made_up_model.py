"""A hybrid model that nobody else knows, written as the model files of transformers are, with names of its own.

What it shares with them is what is imported from one of them, the table of attention functions, and the cache: what a
layer calls, and in which way it keeps its window and its state. All else is different: the names of modules and of the
configuration, a bias in the convolution, no path for single tokens, gates and norms in other places.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_next.modeling_qwen3_next import (
    apply_mask_to_padding_states,
    causal_conv1d_fn,
    eager_attention_forward,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
"""What transformers calls the cache: files of models follow the version that they come with."""


class TidalConfig(PreTrainedConfig):
    """Sizes, most of them with names of its own."""

    model_type = "tidal"

    vocab_size: int = 61
    hidden_size: int = 24
    num_hidden_layers: int = 4
    layer_types: tuple[str, ...] = ("linear_attention", "full_attention") * 2
    moon_heads: int = 6
    moon_groups: int = 2
    moon_width: int = 10
    tide_key_heads: int = 2
    tide_value_heads: int = 4
    tide_key_width: int = 7
    tide_value_width: int = 9
    tide_reach: int = 3
    num_attention_heads: int = 6


class Tide(nn.Module):
    """The Gated DeltaNet layer."""

    def __init__(self, config: TidalConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.num_k_heads = config.tide_key_heads
        self.heads = config.tide_value_heads
        self.widths = config.tide_key_width, config.tide_value_width
        self.reach = config.tide_reach
        self.sizes = [self.num_k_heads * self.widths[0]] * 2 + [self.heads * self.widths[1]]
        self.inward = nn.Linear(config.hidden_size, sum(self.sizes))
        self.gates = nn.Linear(config.hidden_size, 2 * self.heads)
        self.shore = nn.Conv1d(sum(self.sizes), sum(self.sizes), self.reach, groups=sum(self.sizes))
        self.ebb = nn.Parameter(torch.zeros(self.heads))
        self.outward = nn.Linear(self.sizes[2], config.hidden_size)

    def forward(
        self, flow: Tensor, cache: Cache | None = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        flow = apply_mask_to_padding_states(flow, attention_mask)
        batch, length, _ = flow.shape
        state = None
        if cache is not None and cache.has_previous_state(self.layer_idx):
            state = cache.layers[self.layer_idx].recurrent_states[0]
        mixed = self.inward(flow).transpose(1, 2)
        if cache is not None:
            mixed = self.with_window(mixed, cache)
        mixed = causal_conv1d_fn(mixed, self.shore.weight.squeeze(1), bias=self.shore.bias, activation="silu", **kwargs)
        query, key, value = mixed[:, :, -length:].transpose(1, 2).split(self.sizes, dim=-1)
        query, key = (
            x.reshape(batch, length, -1, self.widths[0]).repeat_interleave(self.heads // self.num_k_heads, dim=2)
            for x in (query, key)
        )
        strength, decay = self.gates(flow).chunk(2, dim=-1)
        rule = torch_chunk_gated_delta_rule if state is None or length > 1 else torch_recurrent_gated_delta_rule
        output, state = rule(
            query,
            key,
            value.reshape(batch, length, -1, self.widths[1]),
            g=-F.softplus(decay.float() + self.ebb),
            beta=strength.sigmoid(),
            initial_state=state,
            output_final_state=cache is not None,
            use_qk_l2norm_in_kernel=True,
            **kwargs,
        )
        if cache is not None:
            self.keep(state, cache)
        return self.outward(F.rms_norm(output, output.shape[-1:]).flatten(2))

    def with_window(self, mixed: Tensor, cache: Cache) -> Tensor:
        """Put the last columns before the new ones, and keep the last of both."""
        return cache.update_conv_state(mixed, self.layer_idx, conv_kernel_size=self.reach)

    def keep(self, state: Tensor, cache: Cache) -> None:
        """Keep the state."""
        cache.update_recurrent_state(state, self.layer_idx)


class EbbingTide(Tide):
    """Departs from the pattern: keeps another state than the rule returned."""

    def keep(self, state: Tensor, cache: Cache) -> None:
        super().keep(0.9 * state, cache)


class CalmTide(Tide):
    """Departs from the pattern: convolves another window than it keeps."""

    def with_window(self, mixed: Tensor, cache: Cache) -> Tensor:
        return super().with_window(mixed, cache) * 0.9


class Moon(nn.Module):
    """The attention layer."""

    def __init__(self, config: TidalConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_key_value_groups = config.moon_heads // config.moon_groups
        self.sizes = [heads * config.moon_width for heads in (config.moon_heads, *[config.moon_groups] * 2)]
        self.pull = nn.Linear(config.hidden_size, sum(self.sizes))
        self.push = nn.Linear(self.sizes[0], config.hidden_size)

    def forward(
        self,
        flow: Tensor,
        angles: Tensor,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        parts = self.pull(flow).split(self.sizes, dim=-1)
        query, key, value = (x.unflatten(-1, (-1, self.config.moon_width)).transpose(1, 2) for x in parts)
        query, key = (turned(x, angles) for x in (query, key))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        scaling = self.config.moon_width**-0.5
        attended, _ = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=scaling, **kwargs)
        return self.push(attended.flatten(2))


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs of numbers by angles that grow with the position."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles[:, None].cos(), angles[:, None].sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Day(nn.Module):
    """A layer of the decoder."""

    def __init__(self, config: TidalConfig, layer_idx: int, tide: type[Tide]) -> None:
        super().__init__()
        self.is_tide = config.layer_types[layer_idx] == "linear_attention"
        self.water = tide(config, layer_idx) if self.is_tide else Moon(config, layer_idx)
        self.night = nn.Sequential(
            nn.Linear(config.hidden_size, 2 * config.hidden_size),
            nn.GELU(),
            nn.Linear(2 * config.hidden_size, config.hidden_size),
        )

    def forward(self, flow: Tensor, angles: Tensor, masks: dict[str, Tensor | None], **kwargs: Any) -> Tensor:
        normed = F.rms_norm(flow, flow.shape[-1:])
        if self.is_tide:
            moved = self.water(normed, attention_mask=masks["linear_attention"], **kwargs)
        else:
            moved = self.water(normed, angles, attention_mask=masks["full_attention"], **kwargs)
        return flow + moved + self.night(normed)


class TidalPreTrainedModel(PreTrainedModel):
    config_class = TidalConfig
    base_model_prefix = "sea"
    _supports_sdpa = True
    _is_stateful = True


class TidalModel(TidalPreTrainedModel):
    def __init__(self, config: TidalConfig, tide: type[Tide]) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.days = nn.ModuleList(Day(config, index, tide) for index in range(config.num_hidden_layers))
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        use_cache: bool | None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        flow = self.words(input_ids)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            before = 0 if cache is None else cache.get_seq_length()
            position_ids = (torch.arange(flow.shape[1], device=flow.device) + before)[None]
        arguments = {"config": self.config, "inputs_embeds": flow, "attention_mask": attention_mask}
        arguments |= {"position_ids": position_ids, CACHE: cache}
        masks = {
            "full_attention": create_causal_mask(**arguments),
            "linear_attention": create_recurrent_attention_mask(**arguments),
        }
        speeds = 0.5 ** torch.arange(self.config.moon_width // 2, device=flow.device)
        for day in self.days:
            flow = day(flow, position_ids[..., None] * speeds, masks, cache=cache, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=flow, **{CACHE: cache})


class TidalForCausalLM(TidalPreTrainedModel, GenerationMixin):
    def __init__(self, config: TidalConfig, tide: type[Tide] = Tide) -> None:
        super().__init__(config)
        self.sea = TidalModel(config, tide)
        self.voice = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    if CACHE == "cache":

        def forward(
            self,
            input_ids: Tensor,
            attention_mask: Tensor | None = None,
            position_ids: Tensor | None = None,
            cache: Cache | None = None,
            **kwargs: Any,
        ) -> CausalLMOutputWithPast:
            return self._forward(input_ids, attention_mask, position_ids, cache, **kwargs)

    else:

        def forward(
            self,
            input_ids: Tensor,
            attention_mask: Tensor | None = None,
            position_ids: Tensor | None = None,
            past_key_values: Cache | None = None,
            **kwargs: Any,
        ) -> CausalLMOutputWithPast:
            return self._forward(input_ids, attention_mask, position_ids, past_key_values, **kwargs)

    def _forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        output = self.sea(input_ids, attention_mask, position_ids, cache, use_cache, **kwargs)
        logits = self.voice(output.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, **{CACHE: output[CACHE] if use_cache else None})


def tidal_model(tide: type[Tide] = Tide) -> TidalForCausalLM:
    """A model with weights large enough for its text to be varied."""
    model = TidalForCausalLM(TidalConfig(pad_token_id=0, eos_token_id=None), tide).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model
