"""Families with another recurrent rule than Gated DeltaNet's are refused by name, as target and as draft model."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import treewy
from api_models import modeling_globals, plain_text
from models import VOCAB_SIZE, fresh_model, random_tokens

PROMPT = random_tokens(1, 9, seed=5)

_BASIC = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}


def _bamba() -> PreTrainedModel:
    config = transformers.BambaConfig(**_BASIC, **_MAMBA, attn_layer_indices=[1, 3], mamba_n_groups=1)
    return transformers.BambaForCausalLM(config)


def _falcon_h1() -> PreTrainedModel:
    return transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**_BASIC, **_MAMBA, mamba_d_ssm=64))


def _granite() -> PreTrainedModel:
    kinds = {"layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0}
    return transformers.GraniteMoeHybridForCausalLM(transformers.GraniteMoeHybridConfig(**_BASIC, **_MAMBA, **kinds))


def _nemotron_h() -> PreTrainedModel:
    sizes = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1}
    config = transformers.NemotronHConfig(**_BASIC, **sizes, hybrid_override_pattern="M*M*")
    return transformers.NemotronHForCausalLM(config)


_MOE = {"num_experts": 2, "moe_intermediate_size": 12}
_LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}


def _kimi_linear() -> PreTrainedModel:
    sizes = {**_MOE, **_LATENT, "num_experts_per_token": 1, "q_lora_rank": None, "qk_rope_head_dim": 4}
    return transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**_BASIC, **_LINEAR, **sizes))


def _bailing_hybrid() -> PreTrainedModel:
    sizes = {**_MOE, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    return transformers.BailingHybridForCausalLM(transformers.BailingHybridConfig(**_BASIC, **_LINEAR, **sizes))


def _glm5_next() -> PreTrainedModel:
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 12}
    index = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "index_kpool": 2}
    sizes = {"q_lora_rank": 8, "qk_rope_head_dim": 0, "linear_head_dim": 8, "linear_num_heads": 4, "hc_mult": 2}
    text = {**_BASIC, **_LINEAR, **_LATENT, **experts, **index, **sizes, "head_dim": 0}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Glm5NextConfig(text_config=text, vision_config=vision)
    return transformers.Glm5NextForConditionalGeneration(config)


def _qwen4_exp(**options: Any) -> PreTrainedModel:
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    heads |= {"linear_value_head_dim": 8, "hc_count": 2, "hc_lowrank": 4}
    experts = {**_MOE, "num_experts_per_tok": 1, "shared_expert_intermediate_size": 12}
    embedding = {"ple_embed_dim": 8, "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 4}
    embedding |= {"split_ngram_parts": 1, "heads_per_ngram": 2}
    index = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4}
    index |= {"indexer_compress_ratio": 2}
    config = transformers.Qwen4ExpTextConfig(**_BASIC | options, **heads, **experts, **embedding, **index)
    return transformers.Qwen4ExpForCausalLM(config)


MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "BambaForCausalLM": _bamba,
    "FalconH1ForCausalLM": _falcon_h1,
    "GraniteMoeHybridForCausalLM": _granite,
    "NemotronHForCausalLM": _nemotron_h,
    "KimiLinearForCausalLM": _kimi_linear,
    "BailingHybridForCausalLM": _bailing_hybrid,
    "Glm5NextForConditionalGeneration": _glm5_next,
    "Qwen4ExpForCausalLM": _qwen4_exp,
}

# What `compile` says, and what is said of the model as a draft model.
MESSAGES = {
    "BambaForCausalLM": (r"layers \[0, 2\] of Bamba", "layer 0 caches a LinearAttentionLayer"),
    "FalconH1ForCausalLM": (
        r"layers \[0, 1, 2, 3\] of Falcon",
        "layer 0 caches a LinearAttentionAndFullAttentionLayer",
    ),
    "GraniteMoeHybridForCausalLM": (r"layers \[0, 2\] of Granite", "layer 0 caches a LinearAttentionLayer"),
    "NemotronHForCausalLM": (r"layers \[0, 2\] of Nemotron", "layer 0 caches a LinearAttentionLayer"),
    "KimiLinearForCausalLM": (r"layer 'model\.layers\.0\.self_attn' \(Kimi\w+\) uses Kimi delta attention",) * 2,
    "BailingHybridForCausalLM": (r"layer 'model\.layers\.0\.self_attn' \(Bailing\w+\) uses Kimi delta attention",) * 2,
    "Glm5NextForConditionalGeneration": (r"layers\.0\.self_attn' \(Glm5\w+\) uses Kimi delta attention",) * 2,
    "Qwen4ExpForCausalLM": ("layer 3 caches a DynamicIndexedLayer",) * 2,
}
PRESENT = [name for name in MAKERS if hasattr(transformers, name)]


@functools.cache
def refused(name: str) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MAKERS[name]().eval().requires_grad_(False)


def test_only_the_newest_families_may_be_absent() -> None:
    assert set(MAKERS) - set(PRESENT) <= {"BailingHybridForCausalLM"}


@pytest.mark.parametrize("name", PRESENT)
def test_a_family_with_another_rule_cannot_be_compiled(name: str) -> None:
    model = refused(name)
    text, modules = plain_text(model, PROMPT, 6), modeling_globals(model)
    with pytest.raises(ValueError, match=f"{MESSAGES[name][0]}.*generate without a drafter"):
        treewy.compile(model)
    assert "generate" not in vars(model)
    assert modeling_globals(model) == modules
    assert torch.equal(plain_text(model, PROMPT, 6), text)


@pytest.mark.parametrize("name", PRESENT)
def test_a_family_with_another_rule_cannot_draft(name: str) -> None:
    target, draft = treewy.compile(fresh_model("qwen3_5")), refused(name)
    texts = [plain_text(model, PROMPT, 6) for model in (target, draft)]
    modules = modeling_globals(target, draft)
    message = f"the draft model {name} cannot draft: .*{MESSAGES[name][1]}.*generate without a drafter"
    with pytest.raises(ValueError, match=message):
        target.generate(PROMPT, assistant_model=draft, max_new_tokens=6, do_sample=False)
    assert modeling_globals(target, draft) == modules
    for model, text in zip((target, draft), texts, strict=True):
        assert torch.equal(plain_text(model, PROMPT, 6), text)


def test_attention_in_chunks_cannot_draft() -> None:
    sizes = {"intermediate_size_mlp": 44, "num_local_experts": 2, "attention_chunk_size": 8}
    with torch.random.fork_rng():
        draft = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**_BASIC, **sizes))
    target = treewy.compile(fresh_model("qwen3_5"))
    text = plain_text(target, PROMPT, 6)
    with pytest.raises(ValueError, match=r"Llama4\w+ cannot draft: layer 0 attends in chunks.*without a drafter"):
        target.generate(PROMPT, assistant_model=draft, max_new_tokens=6, do_sample=False)
    assert torch.equal(plain_text(target, PROMPT, 6), text)


def test_a_gated_deltanet_layer_with_more_than_one_convolution_is_refused() -> None:
    with torch.random.fork_rng():
        model = _qwen4_exp(layer_types=["linear_attention"] * 4, ple_layer_ids=[1], eos_token_id=2)
    with pytest.raises(ValueError, match=r"layer 0 keeps 3 convolution states.*generate without a drafter"):
        treewy.compile(model)
