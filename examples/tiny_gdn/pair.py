"""The two models: a Qwen3.5 text target of about 7.5 M parameters and a draft of about an eighth."""

import math
from pathlib import Path

import bpe
import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig

EOS_ID = 0
PAD_ID = 1


def _config(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, gdn_k: int, gdn_v: int
) -> Qwen3_5TextConfig:
    """Build a configuration; every fourth layer is full attention, the others Gated DeltaNet."""
    return Qwen3_5TextConfig(
        vocab_size=bpe.VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=gdn_k,
        linear_num_value_heads=gdn_v,
        linear_conv_kernel_dim=4,
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=EOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        partial_rotary_factor=0.5,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    )


def target_config() -> Qwen3_5TextConfig:
    """Return the target's configuration: hidden size 256, 8 layers."""
    return _config(256, 704, 8, heads=4, kv_heads=2, gdn_k=2, gdn_v=4)


def draft_config() -> Qwen3_5TextConfig:
    """Return the draft's configuration: hidden size 128, 4 layers."""
    return _config(128, 112, 4, heads=2, kv_heads=1, gdn_k=1, gdn_v=2)


def create(config: Qwen3_5TextConfig, seed: int, device: torch.device) -> Qwen3_5ForCausalLM:
    """Create a model in fp32 with the gates of Mamba-2: decay rates of 1 to 16 and time steps of 0.001 to 0.1.

    The default initialisation forgets within a token or two, which costs a short training run dearly.

    Args:
        config: its configuration.
        seed: of the initialisation.
        device: where it goes.

    Returns:
        The model in training mode.
    """
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.empty_like(parameter).uniform_(1, 16).log())
            elif name.endswith("dt_bias"):
                low, high = math.log(1e-3), math.log(1e-1)
                step = torch.empty_like(parameter).uniform_(low, high).exp()
                parameter.copy_(step + torch.log(-torch.expm1(-step)))
    return model.to(device).train()


def save(model: Qwen3_5ForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    """Save weights in bf16, configurations and tokenizer; the model itself stays as it is.

    Args:
        model: trained model.
        tokenizer: the pair's tokenizer.
        directory: created if missing.
    """
    directory.mkdir(parents=True, exist_ok=True)
    half = Qwen3_5ForCausalLM(model.config).to(torch.bfloat16)
    half.load_state_dict({k: v.to("cpu", torch.bfloat16) for k, v in model.state_dict().items()})
    half.generation_config = GenerationConfig(
        do_sample=False, bos_token_id=EOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )
    half.save_pretrained(directory)
    bpe.save(tokenizer, directory)


def count_parameters(model: torch.nn.Module) -> int:
    """Count parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())
