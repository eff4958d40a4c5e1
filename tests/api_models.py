"""What the tests of the public interface share: plain texts, drafters that know them, recorders and snapshots."""

import functools
import inspect
import itertools
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AttentionInterface,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer
from transformers.masking_utils import AttentionMaskInterface

from models import VOCAB_SIZE, noisy_copy, plain_model, random_tokens
from treewy import DraftTree
from treewy.testing import Proposal, ScriptedDrafter, chain, perfect

PROMPT = random_tokens(1, 9, seed=3)
BATCH = torch.cat([torch.tensor([[0, 0, 0, 0], [0, 0, 0, 0]]), random_tokens(2, 7, seed=4)], dim=1)
BATCH[1, 2:4] = torch.tensor([5, 7])
BATCH_MASK = (BATCH != 0).long()

# Right at depths 1 and 2 through a second child, then wrong; all right; nothing right; no draft.
MIXED = (
    Proposal((-1, -1, 1, 1, 3), (1, 3)),
    perfect(5),
    chain(4, 0),
    Proposal((), ()),
    chain(5, 2),
)


def plain_text(model: PreTrainedModel, prompt: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
    """What the model generates without treewy, greedily."""
    text: Tensor = model.generate(prompt, max_new_tokens=max_new_tokens, do_sample=False, **options)
    return text


def knowing(text: Tensor, prompt: Tensor, script: Sequence[Proposal] = MIXED) -> ScriptedDrafter:
    """A drafter that knows the text behind the prompt and is right where the script says."""
    return ScriptedDrafter(text[:, prompt.shape[1] :].tolist(), [script] * len(text))


@functools.cache
def noisy_draft(family: str, noise: float = 0.1) -> PreTrainedModel:
    """A draft model that agrees with the plain model of its family now and then."""
    return noisy_copy(plain_model(family), noise)


@functools.cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with the tiny models' vocabulary: six single letters, then words of three others."""
    words = [*"abcdef", *map("".join, itertools.product("ghij", repeat=3))][:VOCAB_SIZE]
    tokenizer = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def cache_keyword(model: PreTrainedModel) -> str:
    """The name of the cache in this version of transformers."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class StreamRecorder(BaseStreamer):
    """What a streamer is told, in order."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.calls.append((value.dtype, value.tolist()))

    def end(self) -> None:
        self.calls.append("end")


class ProcessorRecorder(LogitsProcessor):
    """Forbid what depends on the number of calls, and note the text of each call."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.texts.append(input_ids[0].tolist())
        forbidden = torch.arange(scores.shape[1]) % 3 == len(self.texts) % 3
        return scores.masked_fill(forbidden, -torch.inf)


class CriterionRecorder(StoppingCriteria):
    """Stop at a length, and note the text of each call."""

    def __init__(self, stop_at: int) -> None:
        self.texts: list[list[int]] = []
        self.stop_at = stop_at

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs: Any) -> Tensor:
        self.texts.append(input_ids[0].tolist())
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.stop_at)


class FixedDrafter:
    """Propose whatever it is told to, each time the same: an object or an exception to raise."""

    def __init__(self, proposal: Any, after: int = 0) -> None:
        self.proposal = proposal
        self.rounds_before = after

    def propose(self, input_ids: Tensor, lengths: Tensor) -> Any:
        if self.rounds_before > 0:
            self.rounds_before -= 1
            return DraftTree(torch.ones(len(lengths), 2).long(), torch.tensor([-1, -1]))
        if isinstance(self.proposal, BaseException):
            raise self.proposal
        return self.proposal

    def update(self, token_ids: Tensor, num_tokens: Tensor) -> None: ...

    def reset(self) -> None: ...

    def reorder(self, index: Tensor) -> None: ...


def modeling_globals(*models: PreTrainedModel) -> dict[tuple[str, str], int]:
    """The identity of every global of the modules that define the layers of some models."""
    names = {type(module).__module__ for model in models for module in model.modules()}
    return {(name, key): id(value) for name in sorted(names) for key, value in vars(sys.modules[name]).items()}


def model_snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """What a user can see of a model: attributes by identity, weights by value, configuration and mode."""
    return {
        "attributes": {name: id(value) for name, value in vars(model).items()},
        "class": {(cls, name): id(value) for cls in type(model).__mro__ for name, value in vars(cls).items()},
        "modules": {name: (id(module), sorted(vars(module))) for name, module in model.named_modules() if name},
        "tensors": _tensors([*model.named_parameters(), *model.named_buffers()]),
        "training": [module.training for module in model.modules()],
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "generation_config": model.generation_config.to_dict(),
    }


def _tensors(named: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    return {name: (id(tensor), tensor.requires_grad, tensor.double().tolist()) for name, tensor in named}


def process_state() -> dict[str, Any]:
    """Settings and registries of torch and transformers that outlive a call."""
    return {
        "attention": dict(AttentionInterface._global_mapping),
        "attention masks": dict(AttentionMaskInterface._global_mapping),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "random": torch.get_rng_state().tolist(),
        "modes": torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack(),
        "hooks": [
            len(getattr(torch.nn.modules.module, name))
            for name in ("_global_forward_hooks", "_global_forward_pre_hooks")
        ],
    }
