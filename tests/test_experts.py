"""Mixtures of experts: settings of theirs that reach a tree forward."""

import pytest
import torch

import treewy
from models import MIXTURES, fresh_model, greedy, left_padded


@pytest.mark.parametrize("family", [*MIXTURES, "qwen3_5_moe_vision"])
def test_a_configuration_that_asks_for_router_logits_gives_the_plain_text(family: str) -> None:
    """They are for a loss that reads the mask as one of tokens; a tree's is not."""
    model = fresh_model(family)
    model.config.get_text_config().output_router_logits = True
    prompt, mask = left_padded([5], seed=1)
    expected = greedy(model, prompt, mask, 8)
    treewy.compile(model)
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, prompt_lookup_num_tokens=4, **options), expected)
