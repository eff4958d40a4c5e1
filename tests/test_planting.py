"""A draft behind its root: trees of known shapes are those that any tree would become."""

import dataclasses
import random

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria

from treewy import DraftTree
from treewy._draft_tree import parents_from_widths
from treewy._greedy import GreedyDecoding
from treewy._planting import Planting
from treewy._texts import Texts
from treewy.ops import depths

CPU = torch.device("cpu")
WIDTHS, LEVEL_ENDS = (2, 2, 1), (2, 6, 10)
MAX_LENGTH, VOCAB_SIZE = 12, 50


def test_a_tree_of_a_known_shape_is_planted_as_any_other_one() -> None:
    """Whatever room is left, whichever rows have ended, from one round to the next and back."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    shape = torch.tensor(parents_from_widths(WIDTHS))
    drafts = DraftTree(torch.zeros(3, len(shape), dtype=torch.int64), shape)
    decoding = GreedyDecoding(LogitsProcessorList(), StoppingCriteriaList([MaxLengthCriteria(MAX_LENGTH)]), 3)
    planting = Planting(decoding, VOCAB_SIZE, CPU)
    sizes = set()
    for _ in range(300):
        texts = Texts(torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.ones(3, 2), CPU)
        counts = [rng.randint(3, MAX_LENGTH - 3) for _ in range(3)]
        texts.append(torch.randint(VOCAB_SIZE, (3, max(counts)), generator=generator), torch.tensor(counts), counts)
        ended = [rng.random() < 0.3 for _ in range(3)]
        if all(ended):
            continue
        known = drafts.with_token_ids(torch.randint(VOCAB_SIZE, (3, len(shape)), generator=generator), LEVEL_ENDS)
        planted = [planting.plant(known, texts, ended), planting.plant(dataclasses.replace(known), texts, ended)]
        assert planted[0].token_ids.tolist() == planted[1].token_ids.tolist()
        assert planted[0].parents.tolist() == planted[1].parents.tolist()
        assert planted[0].depths == planted[1].depths
        assert planted[0].token_ids[:, :1].tolist() == texts.last_tokens().tolist()
        sizes.add(planted[0].parents.shape[1])
        for row, depth in enumerate(depths(planted[0].parents).amax(dim=1).tolist()):
            assert depth == (-1 if ended[row] else min(len(WIDTHS), MAX_LENGTH - texts.lengths[row] - 1))
    assert sizes == {1, *(1 + end for end in LEVEL_ENDS)}
