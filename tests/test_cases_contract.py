"""Public reports of `generate` that broke its contract with speculation: a test for each kind, with the report's input.

Group G of cases.md but for G13, which is in test_sampled_generate.py, and G39, which is in test_vocabularies.py. With
top_k=1 sampling has one possible text, the greedy one, and goes its own way through the engine to it.
"""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

import oracle
import treewy
from api_models import PROMPT, ProcessorRecorder, knowing, noisy_draft
from contract import NEW, THREE, THREE_MASK
from models import PREDICTABLE, fresh_model, plain_model, random_tokens
from treewy import AssistantDrafter, DraftTree
from treewy._generate import COMMIT_POLICIES
from treewy.testing import NOTHING, Proposal, always_wrong, chain, perfect, tree

every_policy = pytest.mark.parametrize("commit", COMMIT_POLICIES)
greedy_or_sampled = pytest.mark.parametrize("way", [{"do_sample": False}, {"do_sample": True, "top_k": 1}], ids=str)

FAMILY = "qwen3_next"  # where the family does not matter
PENALTIES = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
LOOPING = PREDICTABLE / 2  # of models that like to repeat themselves at once
ONE_ROW = random_tokens(1, 9, seed=11)
THREE_ROWS = torch.cat([random_tokens(1, 9, seed=seed) for seed in (2, 11, 3)])
PROMPTS = pytest.mark.parametrize("prompt", [ONE_ROW, THREE_ROWS], ids=["one row", "three rows"])
PADDED = {"inputs": THREE, "attention_mask": THREE_MASK, "pad_token_id": 0}
TREES = (  # right through a second child, right throughout, right nowhere, right through a first child and then wrong
    tree((2, 2), (0, 2, 6)),
    tree((3, 1, 2), (0, 2, 5, 9)),
    tree((2, 2), (0,)),
    NOTHING,
    tree((2, 2), (0, 1)),
)


@functools.cache
def compiled(family: str, commit: str, mixing: float = 1.0) -> PreTrainedModel:
    """One compiled model for all tests, each of which must leave it as it was."""
    return treewy.compile(fresh_model(family, mixing=mixing), commit=commit)


def plain_text(model: PreTrainedModel, number: int, **options: Any) -> Tensor:
    text: Tensor = model.generate(do_sample=False, max_new_tokens=number, **options)
    return text


# --- G16. Processors and rejected drafts


def penalties() -> LogitsProcessorList:
    return LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(2)])


def penalties_without_the_round(input_ids: Tensor, scores: Tensor) -> Tensor:
    """What an engine would do that shows a processor the text before a round, for each node of the round."""
    of_the_round = (input_ids.shape[1] - ONE_ROW.shape[1]) % 3
    processed: Tensor = penalties()(input_ids[:, : input_ids.shape[1] - of_the_round], scores)
    return processed


@every_policy
@greedy_or_sampled
@PROMPTS
def test_penalties_see_the_path_of_each_node_and_no_rejected_one(
    commit: str, way: dict[str, Any], prompt: Tensor
) -> None:
    """Case G16: vmlx-swift#357. Rejected drafts were recorded in the penalties' memory."""
    plain = plain_model(FAMILY, mixing=LOOPING)
    text = plain_text(plain, NEW + 8, inputs=prompt, **PENALTIES)
    for wrong in (LogitsProcessorList(), LogitsProcessorList([penalties_without_the_round])):
        other = plain_text(plain, NEW, inputs=prompt, logits_processor=wrong)
        assert (other != text[:, :-8]).any(dim=1).all()
    for script in (TREES, (always_wrong(3), chain(5, 2), perfect(4))):
        drafter = knowing(text, prompt, script)
        actual = compiled(FAMILY, commit, LOOPING).generate(
            prompt, max_new_tokens=NEW, drafter=drafter, **PENALTIES, **way
        )
        assert torch.equal(actual, text[:, :-8])
        drafter.assert_followed()


class RecordingDrafter(AssistantDrafter):
    """Keep what was proposed, and for what text."""

    def reset(self) -> None:
        super().reset()
        self.proposed: list[tuple[Tensor, Tensor, DraftTree]] = []

    def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
        tree = super().propose(input_ids, lengths)
        self.proposed.append((input_ids, lengths, tree))
        return tree


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 1)], ids=str)
@PROMPTS
def test_drafts_are_penalised_by_the_path_of_each_node(family: str, shape: tuple[int, ...], prompt: Tensor) -> None:
    """Case G16: vmlx-swift#357. The children of each node are what the draft model finds best behind penalties that see
    the node's own text. A model that drafts for itself so is always right."""
    plain = plain_model(family, mixing=LOOPING)
    drafter = RecordingDrafter(plain, shape)
    output = compiled(family, "immediate", LOOPING).generate(
        prompt, max_new_tokens=NEW, drafter=drafter, do_sample=False, return_dict_in_generate=True, **PENALTIES
    )
    assert torch.equal(output.sequences, plain_text(plain, NEW, inputs=prompt, **PENALTIES))
    assert output.speculation.acceptance_by_depth == (1.0, 1.0, 1.0)
    for input_ids, lengths, proposed in drafter.proposed[:2]:
        for row, length in enumerate(lengths.tolist()):
            parents, token_ids = proposed.parents[row].tolist(), proposed.token_ids[row]
            for node in {*parents}:
                text = torch.cat([input_ids[row, :length], token_ids[oracle.path(parents, node)]])[None]
                children = [child for child, parent in enumerate(parents) if parent == node]
                best = penalties()(text, plain(text).logits[:, -1]).topk(len(children)).indices[0]
                assert torch.equal(token_ids[children], best), (row, node)


@greedy_or_sampled
def test_a_processor_with_a_memory_is_shown_each_text_once(family: str, way: dict[str, Any]) -> None:
    """Case G16: vmlx-swift#357. Whatever was drafted beside it, in the order of plain generation."""
    plain_recorder = ProcessorRecorder()
    processors = LogitsProcessorList([plain_recorder])
    text = plain_text(plain_model(family), NEW, inputs=PROMPT, logits_processor=processors)
    for drafting in (
        {"drafter": knowing(text, PROMPT, TREES)},
        {"assistant_model": noisy_draft("qwen3_next"), "draft_tree": (2, 2)},
    ):
        ours = ProcessorRecorder()
        actual = compiled(family, "immediate").generate(
            PROMPT, max_new_tokens=NEW, logits_processor=LogitsProcessorList([ours]), **way, **drafting
        )
        assert torch.equal(actual, text)
        assert ours.texts == plain_recorder.texts


# --- G27. Ends


DRAFTS: dict[str, tuple[Proposal, ...]] = {
    "chain of five": (perfect(5),),
    "trees": (tree((2, 2, 1), (0, 2, 5, 9)), tree((2, 2), (0, 2, 6))),
}


@every_policy
@greedy_or_sampled
@pytest.mark.parametrize("script", DRAFTS.values(), ids=DRAFTS)
def test_text_ends_at_each_greedy_token_that_is_declared_its_end(
    commit: str, way: dict[str, Any], script: tuple[Proposal, ...]
) -> None:
    """Case G27: transformers#47912, transformers#47195, transformers#46790. Only the last committed token was compared
    with the end, the cap with the wrong index, and no end at all was a crash."""
    known = plain_text(plain_model(FAMILY), NEW + 8, inputs=PROMPT)
    new = known[0, PROMPT.shape[1] :].tolist()

    def text(number: int, eos: int | list[int] | None) -> list[int]:
        output: Tensor = compiled(FAMILY, commit).generate(
            PROMPT,
            max_new_tokens=number,
            eos_token_id=eos,
            pad_token_id=0,
            drafter=knowing(known, PROMPT, script),
            **way,
        )
        return output[0, PROMPT.shape[1] :].tolist()

    for number in (1, 2, 3, 12):
        assert text(number, None) == new[:number]
    for position, eos in enumerate(new[:7]):
        end = new.index(eos) + 1
        for number in (n for n in (1, 2, 3, 12) if n > position):
            assert text(number, eos) == new[: min(end, number)], (position, number)
        several = [60, eos, 59]
        assert text(12, several) == new[: min(new.index(token) + 1 for token in several if token in new)], position
    assert text(12, new[2:12]) == new[: min(new.index(token) + 1 for token in new[2:12])]


@pytest.mark.parametrize("script", DRAFTS.values(), ids=DRAFTS)
def test_sampled_rows_end_each_at_its_own_end(script: tuple[Proposal, ...]) -> None:
    """Case G27: transformers#47912, transformers#47195, transformers#46790, in a batch, whose rows end at different
    times."""
    rows, plain = PADDED, plain_model(FAMILY)
    known = plain_text(plain, NEW + 8, **rows)
    new = known[:, THREE.shape[1] :]
    for eos in (None, *new[:, :2].flatten().tolist(), new[0, -20:].tolist()):
        for number in (3, 12):
            actual = compiled(FAMILY, "immediate").generate(
                max_new_tokens=number,
                eos_token_id=eos,
                drafter=knowing(known, THREE, script),
                do_sample=True,
                top_k=1,
                **rows,
            )
            assert torch.equal(actual, plain_text(plain, number, eos_token_id=eos, **rows)), (eos, number)
