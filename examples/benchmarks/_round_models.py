"""Models of known shapes with random weights, and the bytes that a round of theirs must read."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

_ALL = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
}
_SHAPES = {
    "dense": {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    "draft": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
    },
    "moe": {
        "vocab_size": 248320,
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
    },
}
_QUICK = {
    "vocab_size": 151,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_QUICK_SIZES = {
    "dense": {"intermediate_size": 48},
    "draft": {"intermediate_size": 24},
    "moe": {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 8},
}


def random_model(kind: str, device: str, *, num_layers: int | None = None) -> PreTrainedModel:
    """Return a Qwen3.5 with random weights: on a GPU one of full size in bfloat16, on a CPU a tiny one.

    Args:
        kind: "dense", of 4.35 billion parameters; "draft", of 0.81 billion, as one would draft for that one; or "moe",
            of 35 billion, 3 of which a token uses.
        device: Where it lies.
        num_layers: How deep it is, if not as it should be.
    """
    shape: dict[str, Any] = _ALL | _SHAPES[kind]
    if device == "cpu":
        shape |= _QUICK | _QUICK_SIZES[kind] | ({"num_experts_per_tok": 2} if kind == "moe" else {})
    if num_layers is not None:
        shape["num_hidden_layers"] = num_layers
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)  # in float32 it has no room first
    try:
        with torch.device(device):
            model: PreTrainedModel
            if kind != "moe":
                model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**shape))
            else:
                model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**shape))
    finally:
        torch.set_default_dtype(default)
    return model.eval()


def count_experts(model: PreTrainedModel, forward: Callable[[], object]) -> int:
    """Run a forward and return how many experts it uses, added up over the layers."""
    used = []

    def note(_: nn.Module, __: Any, routed: tuple[Tensor, ...]) -> None:
        used.append(routed[-1].unique().numel())

    routers = [module for name, module in model.named_modules() if name.endswith(".mlp.gate")]
    handles = [router.register_forward_hook(note) for router in routers]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return sum(used)


def bytes_read(model: PreTrainedModel, batch: int, prefix: int, num_experts: int) -> int:
    """Return the bytes that a round must read.

    All weights but embeddings and experts, those of the experts that it uses, and keys and values.

    Args:
        model: A random model.
        batch: Rows.
        prefix: Columns of each row.
        num_experts: Experts that it uses, added up over the layers.
    """
    config, all_experts, one_expert = model.config, 0, 0
    for name, weight in model.named_parameters():
        if ".experts." in name:  # [experts, outputs, inputs]
            all_experts += weight.nbytes
            one_expert += weight.nbytes // len(weight)
    one_expert //= config.num_hidden_layers
    weights = sum(weight.nbytes for weight in model.parameters()) - model.get_input_embeddings().weight.nbytes
    cache = batch * prefix * config.layer_types.count("full_attention") * 2
    cache *= config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    return weights - all_experts + num_experts * one_expert + cache
