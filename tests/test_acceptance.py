"""A GDN draft model whose stores are carried along is accepted as often as one that reads the whole text every round.

A draft model that lost its place would still draft, only worse, and no comparison of texts would notice. So acceptance
is compared with that of the same draft model without any memory, row by row and round by round.
"""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import treewy
from models import FAMILIES, fresh_model, greedy, left_padded, noisy_copy, plain_model
from treewy import AssistantDrafter, Drafter, DraftTree
from treewy._draft_tree import parents_from_widths

NEW = 16


class WithoutMemory(Drafter):
    """Propose the same trees as an assistant, from plain forwards over each node's whole text, without a cache."""

    def __init__(self, draft_model: PreTrainedModel, widths: tuple[int, ...]) -> None:
        self._model = draft_model
        self._widths = widths

    def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
        rows = [self._tokens(row[:length]) for row, length in zip(input_ids, lengths.tolist(), strict=True)]
        return DraftTree(torch.stack(rows), torch.tensor(parents_from_widths(self._widths)))

    def _tokens(self, text: Tensor) -> Tensor:
        texts = text[None]  # of the nodes of a level
        levels = []
        for width in self._widths:
            best = self._model(texts, use_cache=False).logits[:, -1].topk(width).indices
            texts = torch.cat([texts.repeat_interleave(width, dim=0), best.reshape(-1, 1)], dim=1)
            levels.append(best.flatten())
        return torch.cat(levels)


class Recorder(Drafter):
    """Note what each round emitted."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.emitted: list[list[int]] = []  # by round and row

    def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
        return self._drafter.propose(input_ids, lengths)

    def update(self, token_ids: Tensor, num_tokens: Tensor) -> None:
        self.emitted.append(num_tokens.tolist())
        self._drafter.update(token_ids, num_tokens)

    def reset(self) -> None:
        self._drafter.reset()


@pytest.mark.parametrize("widths", [(1, 1, 1, 1), (3, 1, 1), (2, 2, 1)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_acceptance_is_that_of_a_draft_model_recomputed_in_every_round(family: str, widths: tuple[int, ...]) -> None:
    plain = plain_model(family)
    draft = noisy_copy(plain, 0.05)
    target = treewy.compile(fresh_model(family))
    prompt, mask = left_padded([3, 14, 1], seed=11)
    expected = greedy(plain, prompt, mask, NEW)
    recorders = []
    for drafter in (AssistantDrafter(draft, widths), WithoutMemory(draft, widths)):
        recorders.append(Recorder(drafter))
        options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(target.generate(prompt, drafter=recorders[-1], **options), expected)
    assert recorders[0].emitted == recorders[1].emitted
    counts = {count for rounds in recorders[0].emitted for count in rounds}
    assert 1 in counts  # so that a worse draft would show, and a better one too
    assert max(counts) >= 3
