"""``generate`` with ``do_sample=True``: what does not depend on chance."""

from typing import Any

import pytest
import torch
from torch import Tensor

import treewy
from contract import DRAFTING, NEW, THREE, THREE_MASK, Drafting, compiled, longer_text
from distributions import p_value
from models import fresh_model, greedy, plain_model
from small_vocabulary import DrawingDrafter, drawn_texts, expected_texts, sample
from tolerances import CHI_SQUARE_P_VALUE
from treewy import AssistantDrafter, Drafter, DraftTree


@pytest.mark.parametrize(
    ("do_sample", "given", "expected"),
    [
        (True, None, "without_replacement"),
        (False, None, "top"),
        (True, "top", "top"),
        (True, "with_replacement", "with_replacement"),
    ],
)
def test_drafts_are_drawn_if_the_target_draws_and_nothing_else_was_asked_for(
    do_sample: bool, given: Any, expected: str
) -> None:
    drafted = set()

    class Recorded(AssistantDrafter):
        def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
            tree = super().propose(input_ids, lengths)
            drafted.add(tree.sampling)
            return tree

    sample(compiled(), do_sample=do_sample, drafter=Recorded(plain_model("qwen3_next"), (2, 1), sampling=given))
    assert drafted == {expected}


def test_with_one_possible_token_sampling_is_greedy(family: str, drafting: Drafting) -> None:
    text = greedy(plain_model(family), THREE, THREE_MASK, NEW + 8)
    sampled = sample(compiled(family), top_k=1, **drafting(text, THREE))
    assert torch.equal(sampled, text[:, : sampled.shape[1]])
    assert sampled.shape[1] == THREE.shape[1] + NEW


def test_a_seed_gives_the_same_text_again(drafting: Drafting) -> None:
    text = longer_text("qwen3_next", THREE)
    texts = []
    for seed in (1, 1, 2):
        model, options = compiled(), drafting(text, THREE)  # which may draw initial weights
        torch.manual_seed(seed)
        texts.append(sample(model, **options).tolist())
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2)])
def test_a_generator_gives_the_same_text_again_and_leaves_pytorchs_own_alone(shape: tuple[int, ...]) -> None:
    models = compiled(), plain_model("qwen3_5", seed=7)
    state = torch.get_rng_state()
    texts = [
        sample(
            models[0],
            assistant_model=models[1],
            draft_tree=shape,
            generator=torch.Generator().manual_seed(seed),
        ).tolist()
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), state)


def test_the_checkpoints_own_settings_are_used() -> None:
    """Qwen checkpoints ask for sampling in their generation_config."""
    model = treewy.compile(fresh_model("qwen3_next"))
    model.generation_config.update(do_sample=True, top_k=1, temperature=0.6)
    text = greedy(plain_model("qwen3_next"), THREE, THREE_MASK, NEW)
    options = {"attention_mask": THREE_MASK, "pad_token_id": 0, "max_new_tokens": NEW}
    assert torch.equal(model.generate(THREE, **options, prompt_lookup_num_tokens=3), text)


@pytest.mark.parametrize("drafting_name", DRAFTING)
def test_several_sequences_a_prompt(drafting_name: str) -> None:
    text = longer_text("qwen3_next", THREE).repeat_interleave(2, dim=0)
    options = DRAFTING[drafting_name](text, THREE.repeat_interleave(2, dim=0))
    torch.manual_seed(0)
    sampled = sample(compiled(), num_return_sequences=2, temperature=3.0, **options)
    assert sampled.shape == (6, THREE.shape[1] + NEW)
    assert torch.equal(sampled[:, : THREE.shape[1]], THREE.repeat_interleave(2, dim=0))
    assert len({tuple(row) for row in sampled.tolist()}) == 6


NO_DISTRIBUTION = {
    "no token left": {"suppress_tokens": list(range(61))},
    "scores that overflow": {"temperature": 1e-39, "top_k": 0},
}


@pytest.mark.parametrize("name", [*NO_DISTRIBUTION, "logits that are NaN"])
@pytest.mark.parametrize("penalty", [1.0, 1.2], ids=["all rows at once", "row by row"])
def test_scores_that_are_no_distribution_raise_as_in_plain_sampling(name: str, penalty: float) -> None:
    model = compiled()
    options = {"repetition_penalty": penalty, **NO_DISTRIBUTION.get(name, {})}
    if name == "logits that are NaN":
        model = treewy.compile(fresh_model("qwen3_next"))
        model.lm_head.weight[7] = float("nan")
    with pytest.raises(RuntimeError, match="probability tensor"):
        sample(model, **options)
    with pytest.raises(ValueError, match=r"scores of row 0 are NaN.*look for an overflow"):
        sample(model, **options, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_draft_model_that_gives_no_numbers_is_named(do_sample: bool) -> None:
    draft = fresh_model("qwen3_next")
    draft.lm_head.weight[7] = float("nan")
    with pytest.raises(ValueError, match=r"draft model Qwen3NextForCausalLM gave logits that are NaN"):
        sample(compiled(), assistant_model=draft, do_sample=do_sample)


def test_drafts_of_a_row_may_have_anything_in_their_padding() -> None:
    class Padded(DrawingDrafter):
        def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
            tree = super().propose(input_ids, lengths)
            parents, token_ids = (torch.nn.functional.pad(x, (0, 1), value=50) for x in (tree.parents, tree.token_ids))
            return DraftTree(
                token_ids,
                parents,
                num_nodes=tree.num_nodes,
                draft_probs=tree.draft_probs,
                sampling=tree.sampling,
            )

    texts, _ = drawn_texts(lambda: {"drafter": Padded((2, 3), "without_replacement")})
    assert p_value(texts, expected_texts()) > CHI_SQUARE_P_VALUE


def test_an_assistant_inside_another_drafter_remembers_nothing_of_its_last_use() -> None:
    class Wrapper(Drafter):
        def __init__(self, drafter: Drafter) -> None:
            self._drafter = drafter

        def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
            return self._drafter.propose(input_ids, lengths)

        def update(self, token_ids: Tensor, num_tokens: Tensor) -> None:
            self._drafter.update(token_ids, num_tokens)

        def reset(self) -> None:
            self._drafter.reset()

    def stats(drafter: Drafter) -> treewy.SpeculationStats:
        output = compiled().generate(
            THREE,
            attention_mask=THREE_MASK,
            pad_token_id=0,
            max_new_tokens=NEW,
            do_sample=False,
            drafter=drafter,
            return_dict_in_generate=True,
        )
        result: treewy.SpeculationStats = output.speculation
        return result

    assistant = AssistantDrafter(plain_model("qwen3_next"), (2, 1))
    fresh = stats(Wrapper(assistant))
    compiled().generate(THREE[:1], max_new_tokens=4, do_sample=True, drafter=assistant)
    assert stats(Wrapper(assistant)) == fresh


def test_nothing_follows_an_end_of_sequence_token(drafting: Drafting) -> None:
    eos = list(range(2, 14))
    torch.manual_seed(0)
    sampled = sample(compiled(), eos_token_id=eos, **drafting(longer_text("qwen3_next", THREE), THREE))
    ended = 0
    for row in sampled[:, THREE.shape[1] :].tolist():
        end = next((place for place, token in enumerate(row) if token in eos), len(row))
        ended += end < len(row)
        assert all(token == 0 for token in row[end + 1 :])
    assert ended > 0
