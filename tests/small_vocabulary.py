"""A model of eight tokens, whose texts can be counted, and samples of models."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

import treewy
from contract import NEW, THREE, THREE_MASK
from distributions import Text
from models import plain_model
from treewy import Drafter, DraftTree
from treewy._draft_tree import parents_from_widths
from treewy._sampling import draw, draw_without_replacement

VOCAB_SIZE = 8
WARPERS = {"do_sample": True, "temperature": 0.7, "top_k": 3}
PROMPT = torch.tensor([[7, 6, 5, 4, 3, 2, 1, 0]])
LENGTH = 4  # new tokens: the first from prefill, then two levels of drafts and a token behind them
NUM_DRAWS = 5000
Options = dict[str, Any]


@functools.cache
def eight_tokens(seed: int) -> PreTrainedModel:
    """A tiny hybrid with a vocabulary of eight and distributions that are neither flat nor certain."""
    plain = plain_model("qwen3_next")
    config = copy.deepcopy(plain.config)
    smaller = {"vocab_size": VOCAB_SIZE, "pad_token_id": None, "bos_token_id": None, "hidden_size": 12}
    smaller |= {"num_hidden_layers": 2, "layer_types": config.layer_types[:2], "linear_num_value_heads": 2}
    smaller |= {"num_attention_heads": 2, "num_key_value_heads": 1, "linear_num_key_heads": 1, "linear_key_head_dim": 4}
    config.update(smaller)
    model = type(plain)(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        elif name.endswith("A_log"):  # transformers draws it from PyTorch's own generator
            parameter.copy_(torch.log(0.02 + 0.3 * torch.rand(parameter.shape, generator=generator)))
    return model


@functools.cache
def compiled_eight(seed: int) -> PreTrainedModel:
    return treewy.compile(copy.deepcopy(eight_tokens(seed)))


def expected_texts(**options: Any) -> dict[Text, float]:
    """The probability of every continuation under plain sampling, from the plain model and transformers' processors."""
    model = eight_tokens(0)
    prepared, _ = model._prepare_generation_config(GenerationConfig(**WARPERS, **options))
    processors = model._get_logits_processor(prepared, input_ids_seq_length=PROMPT.shape[1], logits_processor=[])
    texts: dict[Text, float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[Text, float] = {}
        for text, probability in texts.items():
            ids = torch.cat([PROMPT, torch.tensor([text], dtype=torch.int64)], dim=1)
            probs = processors(ids, model(ids).logits[:, -1]).softmax(dim=-1)[0]
            longer |= {(*text, token): probability * p for token, p in enumerate(probs.tolist()) if p > 0}
        texts = longer
    return texts


def drawn_texts(
    drafting: Callable[[], Options],
    number: int = NUM_DRAWS,
    length: int = LENGTH,
    model: PreTrainedModel | None = None,
    **options: Any,
) -> tuple[list[Text], float]:
    """Many continuations, of another compiled model if given, and how often a node of the first level was accepted."""
    texts: list[Text] = []
    accepted = rounds = 0.0
    generator = torch.Generator().manual_seed(0)
    model = compiled_eight(0) if model is None else model
    prompt = PROMPT.to(model.device)
    for _ in range(number // 500):
        output = model.generate(
            prompt.expand(500, -1),
            attention_mask=torch.ones(500, PROMPT.shape[1], device=prompt.device),
            max_new_tokens=length,
            pad_token_id=0,
            return_dict_in_generate=True,
            generator=generator,
            **WARPERS,
            **options,
            **drafting(),
        )
        texts += map(tuple, output.sequences[:, PROMPT.shape[1] :].tolist())
        accepted += output.speculation.acceptance_by_depth[0]
        rounds += 1
    return texts, accepted / rounds


class DrawingDrafter(Drafter):
    """Draw trees from made-up distributions, another for each round, node and row."""

    def __init__(self, widths: tuple[int, ...], sampling: Any) -> None:
        self._parents, self._sampling = parents_from_widths(widths), sampling
        self._generator = torch.Generator().manual_seed(7)

    def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
        batch, own = len(lengths), sorted({*self._parents})
        probs = torch.randn(batch, len(own), VOCAB_SIZE, generator=self._generator).mul(2).softmax(dim=-1)
        token_ids = torch.zeros(batch, len(self._parents), dtype=torch.int64)
        for rank, parent in enumerate(own):
            children = [node for node, other in enumerate(self._parents) if other == parent]
            if self._sampling == "with_replacement":
                drawn = [draw(probs[:, rank], self._generator) for _ in children]
                token_ids[:, children] = torch.stack(drawn, dim=1)
            else:
                token_ids[:, children], _ = draw_without_replacement(probs[:, rank], len(children), self._generator)
        return DraftTree(token_ids, torch.tensor(self._parents), draft_probs=probs, sampling=self._sampling)


def sample(model: PreTrainedModel, **options: Any) -> Tensor:
    tokens: Tensor = model.generate(
        THREE, attention_mask=THREE_MASK, pad_token_id=0, max_new_tokens=NEW, **({"do_sample": True} | options)
    )
    return tokens
