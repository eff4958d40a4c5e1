"""Qwen3.5 inside its vision-language class: an image in the prompt, and attention chosen for the text part alone."""

from typing import Any

import pytest
import torch
import transformers

import treewy
from models import fresh_model, noisy_copy, plain_model

IMAGE_TOKEN = 58
PROMPT = torch.tensor([[5, 6, 56, *[IMAGE_TOKEN] * 4, 57, 7, 8]])


FAMILIES = ("qwen3_5_vision", "qwen3_5_moe_vision")


def image() -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(16, 96, generator=torch.Generator().manual_seed(1)),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (PROMPT == IMAGE_TOKEN).long(),
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("with_image", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_text_is_that_of_plain_generation(attention: str, with_image: bool, family: str) -> None:
    options = {"max_new_tokens": 14, "do_sample": False, **(image() if with_image else {})}
    plain = plain_model(family, attention=attention)
    expected = plain.generate(PROMPT, **options)
    model = treewy.compile(fresh_model(family, attention=attention))
    for drafting in (
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": noisy_copy(plain, 0.05), "draft_tree": (2, 2)},
        {"assistant_model": plain_model("qwen3_5"), "draft_tree": (3, 1)},
    ):
        assert torch.equal(model.generate(PROMPT, **options, **drafting), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_image_matters(family: str) -> None:
    options = {"max_new_tokens": 14, "do_sample": False}
    texts = [plain_model(family).generate(PROMPT, **options, **more) for more in (image(), {})]
    assert not torch.equal(*texts)


def test_an_attention_of_the_text_part_that_takes_no_mask_is_refused() -> None:
    model = fresh_model("qwen3_5_vision")
    model.config.text_config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2' cannot take a tree's mask; call model"):
        treewy.compile(model)


def test_the_models_are_of_the_vision_language_classes() -> None:
    assert isinstance(plain_model(FAMILIES[0]), transformers.Qwen3_5ForConditionalGeneration)
    assert isinstance(plain_model(FAMILIES[1]), transformers.Qwen3_5MoeForConditionalGeneration)
