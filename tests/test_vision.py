"""Qwen3.5 inside its vision-language class: an image in the prompt, and attention chosen for the text part alone."""

import copy
import functools
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import treewy
from models import noisy_copy, plain_model, tiny_vision_model

IMAGE_TOKEN = 58
PROMPT = torch.tensor([[5, 6, 56, *[IMAGE_TOKEN] * 4, 57, 7, 8]])


@functools.cache
def plain(attention: str = "sdpa") -> PreTrainedModel:
    model = tiny_vision_model()
    model.set_attn_implementation({"text_config": attention})
    return model


def image() -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(16, 96, generator=torch.Generator().manual_seed(1)),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (PROMPT == IMAGE_TOKEN).long(),
    }


@pytest.mark.parametrize("with_image", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_text_is_that_of_plain_generation(attention: str, with_image: bool) -> None:
    options = {"max_new_tokens": 14, "do_sample": False, **(image() if with_image else {})}
    expected = plain(attention).generate(PROMPT, **options)
    model = treewy.compile(copy.deepcopy(plain(attention)))
    text_model = plain_model("qwen3_5")
    for drafting in (
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": noisy_copy(plain(attention), 0.05), "draft_tree": (2, 2)},
        {"assistant_model": text_model, "draft_tree": (3, 1)},
    ):
        assert torch.equal(model.generate(PROMPT, **options, **drafting), expected)


def test_the_image_matters() -> None:
    options = {"max_new_tokens": 14, "do_sample": False}
    texts = [plain().generate(PROMPT, **options, **more) for more in (image(), {})]
    assert not torch.equal(*texts)


def test_an_attention_of_the_text_part_that_takes_no_mask_is_refused() -> None:
    model = tiny_vision_model()
    model.config.text_config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2' cannot take a tree's mask; call model"):
        treewy.compile(model)


def test_the_model_is_of_the_vision_language_class() -> None:
    assert isinstance(plain(), transformers.Qwen3_5ForConditionalGeneration)
