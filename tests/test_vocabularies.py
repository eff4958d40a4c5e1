"""Case G39: transformers#45307. One tokenizer, but vocabularies that were padded to different sizes."""

import copy
import functools

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import treewy
from models import greedy, left_padded, plain_model
from test_generate_equality import speculative


@functools.cache
def resized(vocab_size: int, seed: int = 0) -> PreTrainedModel:
    """A plain model with another number of embeddings; the first 64 are those of every other size."""
    model = copy.deepcopy(plain_model("qwen3_next", seed))
    generator = torch.Generator().manual_seed(3)
    embeddings, head = (0.3 * torch.randn(80, model.config.hidden_size, generator=generator) for _ in range(2))
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    model.get_input_embeddings().weight.copy_(embeddings[:vocab_size])
    model.get_output_embeddings().weight.copy_(head[:vocab_size])
    return model.requires_grad_(False)


@pytest.mark.parametrize("sampling", ["top", "with_replacement", "without_replacement"])
@pytest.mark.parametrize(("target", "draft"), [(70, 64), (64, 70)])
def test_a_draft_model_whose_vocabulary_is_padded_differently(target: int, draft: int, sampling: str) -> None:
    """The larger one emits, or proposes, tokens that the smaller one does not have."""
    model = resized(target)
    prompt, mask = left_padded([5, 9], seed=1)
    expected = greedy(model, prompt, mask, 40)
    drafter = treewy.AssistantDrafter(resized(draft), (2, 1), sampling=sampling)
    compiled = treewy.compile(copy.deepcopy(model))
    output = speculative(compiled, prompt, mask, max_new_tokens=40, drafter=drafter)
    assert output.sequences.tolist() == expected.tolist()
    assert output.speculation.mean_accepted_length > 1
    assert int(greedy(resized(70), prompt, mask, 40).max()) >= 64
    sampled = compiled.generate(
        prompt, attention_mask=mask, pad_token_id=0, max_new_tokens=40, temperature=2.0, do_sample=True, drafter=drafter
    )
    assert int(sampled.max()) < target


@pytest.mark.parametrize("sampling", ["top", "with_replacement", "without_replacement"])
def test_a_draft_model_proposes_only_tokens_that_it_has(sampling: str) -> None:
    """Of a target with a larger vocabulary it knows nothing more."""
    proposed = []

    class Recorded(treewy.AssistantDrafter):
        def propose(self, input_ids: Tensor, lengths: Tensor) -> treewy.DraftTree:
            proposed.append(super().propose(input_ids, lengths))
            return proposed[-1]

    model = treewy.compile(resized(70))
    prompt, mask = left_padded([5, 9], seed=1)
    speculative(model, prompt, mask, max_new_tokens=20, drafter=Recorded(resized(64), (2, 1), sampling=sampling))
    assert max(int(tree.token_ids.max()) for tree in proposed if tree.token_ids.numel()) < 64
    for tree in proposed:
        if tree.draft_probs is not None:
            assert bool((tree.draft_probs[..., 64:] == 0).all())


def test_a_tree_wider_than_the_targets_vocabulary_is_refused() -> None:
    compiled = treewy.compile(copy.deepcopy(resized(64)))
    prompt, mask = left_padded([5], seed=1)
    with pytest.raises(ValueError, match=r"a node has 66 children, but the target has only 64 tokens.*narrower tree"):
        speculative(compiled, prompt, mask, max_new_tokens=4, assistant_model=resized(70), draft_tree=(66,))
