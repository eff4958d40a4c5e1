"""``generate`` with ``do_sample=True``: what is drawn has the distribution of plain sampling."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

import treewy
from contract import DRAFTING, NEW, THREE, THREE_MASK, Drafting, compiled, longer_text
from distributions import Text, p_value
from models import fresh_model, greedy, plain_model
from tolerances import CHI_SQUARE_P_VALUE, STANDARD_ERRORS
from treewy import AssistantDrafter, Drafter, DraftTree
from treewy._draft_tree import parents_from_widths
from treewy._sampling import draw, draw_without_replacement

VOCAB_SIZE = 8
WARPERS = {"do_sample": True, "temperature": 0.7, "top_k": 3}
PROMPT = torch.tensor([[7, 6, 5, 4, 3, 2, 1, 0]])
LENGTH = 4  # new tokens: the first from prefill, then two levels of drafts and a token behind them
NUM_DRAWS = 5000
Options = dict[str, Any]


@functools.cache
def eight_tokens(seed: int) -> PreTrainedModel:
    """A tiny hybrid with a vocabulary of eight and distributions that are neither flat nor certain."""
    plain = plain_model("qwen3_next")
    config = copy.deepcopy(plain.config)
    smaller = {"vocab_size": VOCAB_SIZE, "pad_token_id": None, "bos_token_id": None, "hidden_size": 12}
    smaller |= {"num_hidden_layers": 2, "layer_types": config.layer_types[:2], "linear_num_value_heads": 2}
    smaller |= {"num_attention_heads": 2, "num_key_value_heads": 1, "linear_num_key_heads": 1, "linear_key_head_dim": 4}
    config.update(smaller)
    model = type(plain)(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@functools.cache
def compiled_eight(seed: int) -> PreTrainedModel:
    return treewy.compile(copy.deepcopy(eight_tokens(seed)))


def expected_texts(**options: Any) -> dict[Text, float]:
    """The probability of every continuation under plain sampling, from the plain model and transformers' processors."""
    model = eight_tokens(0)
    prepared, _ = model._prepare_generation_config(GenerationConfig(**WARPERS, **options))
    processors = model._get_logits_processor(prepared, input_ids_seq_length=PROMPT.shape[1], logits_processor=[])
    texts: dict[Text, float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[Text, float] = {}
        for text, probability in texts.items():
            ids = torch.cat([PROMPT, torch.tensor([text], dtype=torch.int64)], dim=1)
            probs = processors(ids, model(ids).logits[:, -1]).softmax(dim=-1)[0]
            longer |= {(*text, token): probability * p for token, p in enumerate(probs.tolist()) if p > 0}
        texts = longer
    return texts


def drawn_texts(
    drafting: Callable[[], Options], number: int = NUM_DRAWS, length: int = LENGTH, **options: Any
) -> tuple[list[Text], float]:
    """Many continuations, and how often a node of the first level was accepted."""
    texts: list[Text] = []
    accepted = rounds = 0.0
    generator = torch.Generator().manual_seed(0)
    for _ in range(number // 500):
        output = compiled_eight(0).generate(
            PROMPT.expand(500, -1),
            attention_mask=torch.ones(500, PROMPT.shape[1]),
            max_new_tokens=length,
            pad_token_id=0,
            return_dict_in_generate=True,
            generator=generator,
            **WARPERS,
            **options,
            **drafting(),
        )
        texts += map(tuple, output.sequences[:, PROMPT.shape[1] :].tolist())
        accepted += output.speculation.acceptance_by_depth[0]
        rounds += 1
    return texts, accepted / rounds


def assistant(seed: int, shape: tuple[int, ...], **options: Any) -> Callable[[], Options]:
    return lambda: {"drafter": AssistantDrafter(eight_tokens(seed), shape, **options)}


TARGET, OTHER = 0, 1  # seeds
DRAFTERS: dict[str, Callable[[], Options]] = {
    "the target itself, chain": lambda: {"assistant_model": eight_tokens(TARGET), "draft_tree": (1, 1)},
    "the target itself, top": assistant(TARGET, (2, 1), sampling="top"),
    "another model, chain": assistant(OTHER, (1, 1)),
    "another model, top": assistant(OTHER, (2, 2), sampling="top"),
    "another model, with replacement": assistant(OTHER, (3, 2), sampling="with_replacement"),
    # three possible tokens: some nodes get fewer than four children
    "another model, without replacement": lambda: {"assistant_model": eight_tokens(OTHER), "draft_tree": (4, 2)},
    "prompt lookup": lambda: {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_continuations_have_the_distribution_of_plain_sampling(drafter: str) -> None:
    """Case G13: transformers#47932. With top-3 of eight, drafts have no mass where the target has, and vice versa."""
    texts, accepted = drawn_texts(DRAFTERS[drafter])
    assert p_value(texts, expected_texts()) > CHI_SQUARE_P_VALUE
    assert accepted > 0
    if drafter == "the target itself, chain":
        assert accepted == 1.0


@pytest.mark.parametrize("sampling", ["top", "without_replacement"])
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"min_p": 0.2, "top_p": 0.8},
        {"typical_p": 0.7, "epsilon_cutoff": 0.1, "suppress_tokens": [2]},
    ],
)
def test_distributions_are_compared_behind_the_processors(options: Options, sampling: Any) -> None:
    number = 2000 if {"repetition_penalty", "no_repeat_ngram_size"} & {*options} else NUM_DRAWS  # row by row
    texts, _ = drawn_texts(assistant(OTHER, (2, 2), sampling=sampling), number, **options)
    assert p_value(texts, expected_texts(**options)) > CHI_SQUARE_P_VALUE
    assert p_value(texts, expected_texts()) < CHI_SQUARE_P_VALUE  # the processors matter


def test_a_draft_that_claims_another_distribution_is_noticed_by_this_test() -> None:
    class Lying(AssistantDrafter):
        def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
            tree = super().propose(input_ids, lengths)
            if tree.draft_probs is None:  # nothing was drafted
                return tree
            uniform = torch.full_like(tree.draft_probs, 1 / VOCAB_SIZE)
            return DraftTree(
                tree.token_ids,
                tree.parents,
                num_nodes=tree.num_nodes,
                draft_probs=uniform,
                sampling=tree.sampling,
            )

    texts, _ = drawn_texts(lambda: {"drafter": Lying(eight_tokens(OTHER), (1, 1))})
    assert p_value(texts, expected_texts()) < CHI_SQUARE_P_VALUE


def test_the_rate_of_acceptance_is_the_overlap_of_the_distributions() -> None:
    """Of the second token, over the first ones of plain sampling."""
    overlap = 0.0
    for (first,), probability in _first_tokens().items():
        ids = torch.cat([PROMPT, torch.tensor([[first]])], dim=1)
        p, q = (_warped(eight_tokens(seed)(ids).logits[:, -1]) for seed in (TARGET, OTHER))
        overlap += probability * float(torch.minimum(p, q).sum())
    _, accepted = drawn_texts(assistant(OTHER, (1,)), length=3)  # there is room for one drafted token, in one round
    assert abs(accepted - overlap) <= STANDARD_ERRORS * (overlap * (1 - overlap) / NUM_DRAWS) ** 0.5


def _warped(logits: Tensor) -> Tensor:
    top = logits.topk(3, dim=-1)
    return torch.full_like(logits, float("-inf")).scatter(1, top.indices, top.values / 0.7).softmax(dim=-1)


def _first_tokens() -> dict[Text, float]:
    first: dict[Text, float] = {}
    for text, probability in expected_texts().items():
        first[text[:1]] = first.get(text[:1], 0.0) + probability
    return first


class DrawingDrafter(Drafter):
    """Draw trees from made-up distributions, another for each round, node and row."""

    def __init__(self, widths: tuple[int, ...], sampling: Any) -> None:
        self._parents, self._sampling = parents_from_widths(widths), sampling
        self._generator = torch.Generator().manual_seed(7)

    def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
        batch, own = len(lengths), sorted({*self._parents})
        probs = torch.randn(batch, len(own), VOCAB_SIZE, generator=self._generator).mul(2).softmax(dim=-1)
        token_ids = torch.zeros(batch, len(self._parents), dtype=torch.int64)
        for rank, parent in enumerate(own):
            children = [node for node, other in enumerate(self._parents) if other == parent]
            if self._sampling == "with_replacement":
                drawn = [draw(probs[:, rank], self._generator) for _ in children]
                token_ids[:, children] = torch.stack(drawn, dim=1)
            else:
                token_ids[:, children], _ = draw_without_replacement(probs[:, rank], len(children), self._generator)
        return DraftTree(token_ids, torch.tensor(self._parents), draft_probs=probs, sampling=self._sampling)


@pytest.mark.parametrize("sampling", ["with_replacement", "without_replacement"])
def test_a_drafter_of_ones_own_may_draw_from_any_distributions(sampling: str) -> None:
    texts, accepted = drawn_texts(lambda: {"drafter": DrawingDrafter((2, 3), sampling)})
    assert p_value(texts, expected_texts()) > CHI_SQUARE_P_VALUE
    assert accepted > 0.1


def test_a_drafter_of_ones_own_learns_what_it_drafts_for() -> None:
    """From ``prepare``: here the processors and the generator, so that the text repeats."""

    class Prepared(Drafter):
        def prepare(self, context: treewy.DraftingContext) -> None:
            self.context = context

        def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
            logits = torch.zeros(len(lengths), 1, self.context.vocab_size)
            probs = self.context.scores.of_nodes(logits, lambda row, node: input_ids[row]).softmax(dim=-1)
            token_ids = draw(probs, self.context.generator)
            return DraftTree(token_ids, torch.tensor([-1]), draft_probs=probs, sampling="with_replacement")

    model = compiled()
    texts = []
    for seed in (1, 1, 2):
        drafter, generator = Prepared(), torch.Generator().manual_seed(seed)
        texts.append(sample(model, drafter=drafter, generator=generator, suppress_tokens=[5, 6]).tolist())
        assert drafter.context.generator is generator
        assert drafter.context.do_sample
        assert drafter.context.max_length == THREE.shape[1] + NEW
    assert texts[0] == texts[1] != texts[2]


# What does not depend on chance.


def sample(model: PreTrainedModel, **options: Any) -> Tensor:
    tokens: Tensor = model.generate(
        THREE, attention_mask=THREE_MASK, pad_token_id=0, max_new_tokens=NEW, **({"do_sample": True} | options)
    )
    return tokens


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
