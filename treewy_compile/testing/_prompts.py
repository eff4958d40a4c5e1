"""The prompts of a check: the user's, or drawn ones."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

_LENGTHS = (5, 12, 1, 8, 17, 3)  # tokens; one is shorter than a convolution kernel, none is equal to another
_TOKEN_DTYPES = (torch.int32, torch.int64)
_NUM_PADS = 2  # to the left of the longest prompt of a batch, so that every row has some


def drawn_prompts(model: PreTrainedModel, rng: random.Random) -> list[Tensor]:
    """Draw ordinary tokens; the second half of a prompt repeats the first, so that prompt lookup finds something."""
    config = model.config.get_text_config(decoder=True)
    special = _special_tokens(model.config.to_dict())
    ordinary = [token for token in range(config.vocab_size) if token not in special]
    prompts = []
    for length in _LENGTHS:
        half = [rng.choice(ordinary) for _ in range((length + 1) // 2)]
        prompts.append(torch.tensor((half + half)[:length], device=model.device))
    return prompts


def checked_prompts(model: PreTrainedModel, prompts: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Return a user's prompts as a list of rows on the model's device.

    Raises:
        ValueError: If there is no prompt, a prompt is not a row of tokens, or a token is outside the vocabulary.
    """
    rows = list(prompts)
    if not rows:
        raise ValueError("prompts is empty; pass at least one, or None for drawn ones")
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    for index, row in enumerate(rows):
        if not isinstance(row, Tensor) or row.ndim != 1 or row.numel() == 0 or row.dtype not in _TOKEN_DTYPES:
            what = f"{row.dtype} {list(row.shape)}" if isinstance(row, Tensor) else type(row).__name__
            raise ValueError(f"prompt {index} is {what}; pass token ids [B, T] or a list of 1-D tensors of token ids")
        wrong = row[(row < 0) | (row >= vocab_size)]
        if wrong.numel() > 0:
            raise ValueError(f"prompt {index} has the token {int(wrong[0])}, but the vocabulary has {vocab_size}")
    return [row.long().to(model.device) for row in rows]


def left_padded(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the prompts as a batch [B, T], each with pads on its left, and its mask."""
    width = max(len(prompt) for prompt in prompts) + _NUM_PADS
    batch = torch.stack([torch.nn.functional.pad(prompt, (width - len(prompt), 0)) for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=batch.device)
    mask = torch.arange(width, device=batch.device) >= width - lengths[:, None]
    return batch, mask.long()


def _special_tokens(config: dict[object, object]) -> set[object]:
    """Return the token ids that a configuration gives a meaning, such as an image's place, at any depth."""
    special: set[object] = set()
    for name, value in config.items():
        if isinstance(value, dict):
            special |= _special_tokens(value)
        elif str(name).endswith("token_id"):
            special |= set(value) if isinstance(value, list) else {value}
    return special
