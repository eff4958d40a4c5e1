"""Sampled rounds of compiled backends, and greedy ones behind processors: one graph, compiled once for equal settings.

What `sample` and `tree_sample` draw by themselves is in `test_sampling.py` and `ops/test_sample.py`. Models have two
layers, and most graphs run as they are: the distribution of one kind of siblings, and the text of greedy rounds behind
processors, are also those behind AOTAutograd.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import (
    EtaLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
)

import treewy
from compiled_calls import graphs
from contract import NEW, THREE, THREE_MASK
from distributions import p_value
from models import fresh_model, greedy, plain_model
from small_vocabulary import drawn_texts, eight_tokens, expected_texts, sample
from tolerances import CHI_SQUARE_P_VALUE
from treewy import AssistantDrafter, _compiled_session
from treewy._decoding import Decoding
from treewy._scores import Scores

pytestmark = pytest.mark.usefixtures("nothing_compiled_is_kept")

SMALL = "qwen3_next short"
ASSISTED = {"prompt_lookup_num_tokens": 3}


@pytest.fixture
def model(graphs_run_as_they_are: None) -> PreTrainedModel:
    return treewy.compile(fresh_model(SMALL), backend="aot_eager")


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Trees of more nodes than the root that were chosen from on the host, from now on."""
    seen: list[int] = []
    emit = Decoding.emit

    def noted(self: Decoding, logits: Tensor, *rest: Any) -> Any:
        if rest[-1] is not None:  # the first token is chosen behind the prefill
            seen.append(logits.shape[1])
        return emit(self, logits, *rest)

    monkeypatch.setattr(Decoding, "emit", noted)
    return seen


@pytest.mark.parametrize(
    ("sampling", "shape"), [("without_replacement", (3, 2)), ("with_replacement", (2, 2)), ("top", (1, 1))]
)
def test_continuations_have_the_distribution_of_plain_sampling(
    sampling: Any, shape: tuple[int, ...], on_the_host: list[int], request: pytest.FixtureRequest
) -> None:
    if sampling != "without_replacement":
        request.getfixturevalue("graphs_run_as_they_are")

    def drafting() -> dict[str, Any]:
        return {"drafter": AssistantDrafter(eight_tokens(1), shape, sampling=sampling)}

    model = treewy.compile(copy.deepcopy(eight_tokens(0)), backend="aot_eager")
    texts, accepted = drawn_texts(drafting, number=1000, model=model)
    assert p_value(texts, expected_texts()) > CHI_SQUARE_P_VALUE
    assert accepted > 0.05  # "top" is accepted least: 0.08
    assert not on_the_host


def test_a_generator_gives_the_same_text_again_and_leaves_pytorchs_own_alone(model: PreTrainedModel) -> None:
    drafting = {"assistant_model": plain_model("qwen3_5 short", seed=7), "draft_tree": (2, 2)}
    state = torch.get_rng_state()
    texts = [sample(model, **drafting, generator=torch.Generator().manual_seed(seed)).tolist() for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), state)
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(sample(model, **drafting).tolist())
    assert texts[3] == texts[4] != texts[5]


def test_with_one_possible_token_sampling_is_greedy(model: PreTrainedModel, on_the_host: list[int]) -> None:
    """Also where the processor is not for graphs: that of `top_h` alone."""
    text = greedy(plain_model(SMALL), THREE, THREE_MASK, NEW)
    for setting in (
        {"top_k": 1, "temperature": 0.6},
        {"top_k": 0, "min_p": 1.0},
        {"top_k": 1, "eta_cutoff": 0.5},
        {"top_k": 0, "top_h": 1e-6},
    ):
        assert torch.equal(sample(model, **setting, **ASSISTED), text)
        assert bool(on_the_host) == ("top_h" in setting)


def test_equal_settings_are_compiled_once_and_others_compile_the_acceptance_alone(model: PreTrainedModel) -> None:
    seen = []
    for temperature in (0.7, 0.7, 1.3, 0.7):
        drafter = AssistantDrafter(plain_model("qwen3_5 short", seed=7), (2, 1), sampling="top")
        sample(model, temperature=temperature, top_k=5, drafter=drafter)
        seen.append(graphs())
    assert seen == [5, 5, 6, 6]  # the forward, what it accepts twice, the commit, and two of the draft model


def test_processors_that_a_user_changes_are_not_those_that_were_compiled(model: PreTrainedModel) -> None:
    text = greedy(plain_model(SMALL), THREE, THREE_MASK, NEW)
    warper = TopKLogitsWarper(1)
    mine = {"top_k": 0, "logits_processor": LogitsProcessorList([warper])}
    assert torch.equal(sample(model, **mine, **ASSISTED), text)
    warper.top_k = 61
    torch.manual_seed(0)
    assert not torch.equal(sample(model, **mine, temperature=9.0, **ASSISTED), text)
    others = mine | {"logits_processor": LogitsProcessorList([TopKLogitsWarper(1)])}
    assert torch.equal(sample(model, **others, **ASSISTED), text)


def test_greedy_rounds_behind_processors_give_the_plain_text(on_the_host: list[int]) -> None:
    plain, model = plain_model(SMALL), treewy.compile(fresh_model(SMALL), backend="aot_eager")
    without = greedy(plain, THREE, THREE_MASK, NEW)
    unwanted = without[:, -NEW:].unique().tolist()[::2]
    options = {"attention_mask": THREE_MASK, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    right = plain.generate(THREE, suppress_tokens=unwanted, **options)
    assert not torch.equal(right, without)
    assert torch.equal(model.generate(THREE, suppress_tokens=unwanted, **options, **ASSISTED), right)
    assert not on_the_host


def test_scores_that_are_no_distribution_raise_in_a_compiled_round_and_the_model_stays_usable(
    model: PreTrainedModel, on_the_host: list[int]
) -> None:
    options = {"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": True, "top_k": 1, **ASSISTED}
    text = model.generate(THREE[2:], **options)
    first = int(text[0, THREE.shape[1]])  # the prefill chooses it, a round looks behind it
    assert first not in THREE[2].tolist()
    weight = model.get_input_embeddings().weight
    kept = weight.detach().clone()
    weight[first] = float("nan")
    with pytest.raises(ValueError, match=r"scores of row 0 are NaN.*look for an overflow"):
        model.generate(THREE[2:], **options)
    weight.copy_(kept)
    assert torch.equal(model.generate(THREE[2:], **options), text)
    assert not on_the_host


def test_settings_are_all_that_processors_of_equal_types_differ_in() -> None:
    def settings(*processors: Any) -> Any:
        return Scores(LogitsProcessorList(processors), 1).settings

    makers = (
        lambda: [TemperatureLogitsWarper(0.5)],
        lambda: [TemperatureLogitsWarper(0.7)],
        lambda: [TopKLogitsWarper(5)],
        lambda: [TopKLogitsWarper(5, min_tokens_to_keep=2)],
        lambda: [TopKLogitsWarper(5, filter_value=-9.0)],
        lambda: [TemperatureLogitsWarper(0.5), TopKLogitsWarper(5)],
        lambda: [TopKLogitsWarper(5), TemperatureLogitsWarper(0.5)],
        lambda: [EtaLogitsWarper(0.1)],
        lambda: [EtaLogitsWarper(0.2)],
        lambda: [SuppressTokensLogitsProcessor([1, 2])],
        lambda: [SuppressTokensLogitsProcessor([1, 3])],
    )
    assert [settings(*make()) for make in makers] == [settings(*make()) for make in makers]
    assert len({settings(*make()) for make in makers}) == len(makers)
    assert not Scores(LogitsProcessorList([TopHLogitsWarper(0.5)]), 1).traceable


def test_the_graphs_of_a_few_ways_of_choosing_are_kept(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treewy._compiled_forward._KEPT_ROUNDS", 2)
    for temperature in (0.5, 0.6, 0.7):
        sample(model, temperature=temperature, **ASSISTED)
    (place,) = model.generate.target._free
    assert isinstance(place, _compiled_session.Place)
    assert all(len(forward._rounds) <= 2 for forward in place._forwards.values())
