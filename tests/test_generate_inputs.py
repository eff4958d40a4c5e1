"""What generate takes with a drafter is what it takes without one; and the cache that it hands out can be taken too."""

import functools
import inspect
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

import treewy
from api_models import (
    BATCH,
    BATCH_MASK,
    MIXED,
    PROMPT,
    cache_keyword,
    knowing,
    noisy_draft,
    plain_text,
)
from contract import DRAFTING, NEW, THREE, THREE_MASK, Drafting, compiled, longer_text, speculate
from models import VOCAB_SIZE, fresh_model, plain_model, random_tokens
from treewy import AssistantDrafter, DraftTree, PromptLookupDrafter
from treewy.ops import depths
from treewy.testing import chain, perfect

# The cache that is handed out.


@pytest.mark.parametrize("first", [1, 2, 9])
def test_plain_generation_continues_the_returned_cache(family: str, drafting: Drafting, first: int) -> None:
    plain = plain_model(family)
    expected = plain_text(plain, PROMPT, NEW)
    options = drafting(longer_text(family, PROMPT), PROMPT)
    output = speculate(compiled(family), max_new_tokens=first, return_dict_in_generate=True, **options)
    cache = output[cache_keyword(plain)]
    reference = plain_text(plain, PROMPT, first, return_dict_in_generate=True)[cache_keyword(plain)]
    assert type(cache) is DynamicCache
    assert [type(layer) for layer in cache.layers] == [type(layer) for layer in reference.layers]
    assert cache.get_seq_length() == reference.get_seq_length() == PROMPT.shape[1] + first - 1
    continued = plain_text(plain, output.sequences, NEW - first, **{cache_keyword(plain): cache})
    assert torch.equal(continued, expected)


def test_plain_generation_continues_a_cache_that_eos_ended(family: str) -> None:
    plain = plain_model(family)
    known = longer_text(family, PROMPT)
    eos = int(known[0, PROMPT.shape[1] + 4])
    output = speculate(
        compiled(family),
        drafter=knowing(known, PROMPT, (perfect(6),)),
        eos_token_id=eos,
        return_dict_in_generate=True,
    )
    assert output.sequences.shape[1] < PROMPT.shape[1] + NEW
    cache = output[cache_keyword(plain)]
    missing = known.shape[1] - output.sequences.shape[1]
    assert torch.equal(plain_text(plain, output.sequences, missing, **{cache_keyword(plain): cache}), known)


def test_the_returned_cache_keeps_nothing_of_the_generation_alive() -> None:
    """What later calls write does not reach a cache that was handed out before."""
    plain, known = plain_model("qwen3_next"), longer_text("qwen3_next", PROMPT)
    outputs = [
        speculate(compiled(), max_new_tokens=6, drafter=knowing(known, PROMPT), return_dict_in_generate=True)
        for _ in range(2)
    ]
    for output in outputs:
        cache = output[cache_keyword(plain)]
        assert torch.equal(plain_text(plain, output.sequences, NEW - 6, **{cache_keyword(plain): cache}), known[:, :25])


def test_rows_that_committed_different_lengths_get_no_cache(family: str) -> None:
    known = longer_text(family, THREE)
    new = known[:, THREE.shape[1] :].tolist()
    name, options = cache_keyword(plain_model(family)), {"return_dict_in_generate": True}
    same = speculate(compiled(family), THREE, drafter=knowing(known, THREE), **options)
    assert same[name].get_seq_length() == THREE.shape[1] + NEW - 1
    ended = speculate(compiled(family), THREE, drafter=knowing(known, THREE), eos_token_id=new[0][2], **options)
    assert getattr(ended, name) is None
    assert name not in ended
    assert ended.speculation.tokens < 3 * NEW


# Configuration objects.


def test_prompt_lookup_may_come_from_a_configuration_object_which_stays_as_it_is(family: str) -> None:
    config = GenerationConfig(max_new_tokens=NEW, prompt_lookup_num_tokens=3, max_matching_ngram_size=1)
    before = config.to_dict()
    output = compiled(family).generate(PROMPT, config, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain_text(plain_model(family), PROMPT, NEW))
    arguments = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1}
    same = speculate(compiled(family), return_dict_in_generate=True, **arguments)
    assert output.speculation == same.speculation
    assert config.to_dict() == before


def test_prompt_lookup_on_the_models_own_configuration_is_refused() -> None:
    model = treewy.compile(fresh_model("qwen3_next"))
    expected = plain_text(plain_model("qwen3_next"), PROMPT, NEW)
    model.generation_config.prompt_lookup_num_tokens = 3
    for options in ({}, {"prompt_lookup_num_tokens": 3}, {"drafter": knowing(expected, PROMPT)}):
        with pytest.raises(ValueError, match=r"generation_config\.prompt_lookup_num_tokens is set.*set it to None"):
            speculate(model, **options)
    model.generation_config.prompt_lookup_num_tokens = None
    assert torch.equal(speculate(model, drafter=knowing(expected, PROMPT)), expected)


def test_the_models_own_configuration_is_heeded_and_stays_as_it_is(drafting: Drafting) -> None:
    plain, model = fresh_model("qwen3_next"), treewy.compile(fresh_model("qwen3_next"))
    for m in (plain, model):
        m.generation_config.repetition_penalty = 1.4
        m.generation_config.max_new_tokens = 11
        m.generation_config.eos_token_id = [4, 13, 22]
    before = model.generation_config.to_dict()
    expected = plain.generate(PROMPT)
    assert torch.equal(model.generate(PROMPT, **drafting(expected, PROMPT)), expected)
    assert model.generation_config.to_dict() == before


# Attention masks.


HOLE = torch.ones_like(PROMPT)


HOLE[0, 3:6] = 0


HOLES = BATCH_MASK.clone()


HOLES[0, 5:7] = HOLES[1, 8] = 0


MASKS: dict[str, tuple[Tensor, Tensor | None]] = {
    "none": (PROMPT, None),
    "ones": (PROMPT, torch.ones_like(PROMPT)),
    "inferred from pads": (BATCH, None),
    "left pads": (BATCH, BATCH_MASK),
    "left pads, bool": (BATCH, BATCH_MASK.bool()),
    "pads of other tokens": (BATCH + 2 * (1 - BATCH_MASK), BATCH_MASK),
    "a row of one token": (BATCH, (torch.arange(11) >= torch.tensor([[10], [4]])).long()),
    "left pads at batch 1": (BATCH[:1], BATCH_MASK[:1]),
    "a hole": (PROMPT, HOLE),
    "right pads": (BATCH.flip(1), BATCH_MASK.flip(1)),
    "a last token that looks like a pad": (torch.cat([PROMPT[:, :-1], 0 * PROMPT[:, :1]], dim=1), None),
    "left pads and holes": (BATCH, HOLES),
}


@pytest.mark.parametrize(("prompt", "mask"), MASKS.values(), ids=MASKS)
def test_any_attention_mask_gives_the_plain_text(family: str, prompt: Tensor, mask: Tensor | None) -> None:
    expected = plain_text(plain_model(family), prompt, NEW, attention_mask=mask)
    for drafting in (DRAFTING["scripted"], DRAFTING["assistant"]):
        actual = speculate(compiled(family), prompt, attention_mask=mask, **drafting(expected, prompt))
        assert torch.equal(actual, expected)


def test_positions_go_on_from_those_of_the_prompt(family: str) -> None:
    options = {"position_ids": 3 * torch.arange(PROMPT.shape[1])[None]}
    expected = plain_text(plain_model(family), PROMPT, NEW, **options)
    for drafting in (DRAFTING["scripted"], DRAFTING["assistant"]):
        assert torch.equal(speculate(compiled(family), **options, **drafting(expected, PROMPT)), expected)


def test_a_draft_is_cut_to_the_room_that_is_left() -> None:
    """Also where the draft model has positions for no more than the text."""
    config = transformers.GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=PROMPT.shape[1] + NEW, n_embd=16, n_layer=2, n_head=2
    )
    draft = transformers.GPT2LMHeadModel(config).eval()
    draft.generation_config.assistant_confidence_threshold = 0.0
    model = treewy.compile(fresh_model("qwen3_next"), max_cache_len=PROMPT.shape[1] + NEW)
    output = speculate(model, assistant_model=draft, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain_text(plain_model("qwen3_next"), PROMPT, NEW))


@pytest.mark.parametrize("widths", [(1, 1, 1, 1), (2, 2, 1)])
def test_trees_are_as_deep_as_asked_for_and_as_the_row_with_most_room_can_use(widths: tuple[int, ...]) -> None:
    """Deeper ones would cost the draft model forwards. The last token of a round is the target's own."""
    prompt = random_tokens(3, 6, seed=5)
    drafted: list[tuple[int, int, int]] = []  # shortest and longest text and depth of the tree, in each round

    class Measured(AssistantDrafter):
        def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
            tree = super().propose(input_ids, lengths)
            depth = int(depths(tree.parents).amax()) + 1 if tree.parents.numel() else 0
            drafted.append((int(lengths.min()), int(lengths.max()), depth))
            return tree

    speculate(compiled(), prompt, drafter=Measured(noisy_draft("qwen3_next"), widths))
    end = prompt.shape[1] + NEW
    assert [depth for *_, depth in drafted] == [min(len(widths), end - shortest - 1) for shortest, *_ in drafted]
    assert any(end - longest - 1 < depth < len(widths) for _, longest, depth in drafted)


def test_a_drafter_is_shown_the_tokens_of_each_row_without_its_pads() -> None:
    shown: list[list[list[int]]] = []

    class Watching(PromptLookupDrafter):
        def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
            shown.append([row[:length] for row, length in zip(input_ids.tolist(), lengths.tolist(), strict=True)])
            return super().propose(input_ids, lengths)

    output = speculate(compiled(), THREE, attention_mask=THREE_MASK, pad_token_id=0, drafter=Watching(2))
    for row, pads in enumerate((THREE_MASK == 0).sum(1).tolist()):
        text = output[row, pads:].tolist()
        assert all(rows[row] == text[: len(rows[row])] for rows in shown)
        assert len(shown[0][row]) == THREE.shape[1] - pads + 1


def test_a_hole_in_the_mask_matters(family: str) -> None:
    texts = [plain_text(plain_model(family), PROMPT, NEW, attention_mask=mask) for mask in (None, HOLE)]
    assert not torch.equal(*texts)


@pytest.mark.parametrize("chunk", [1, 4, 50])
@pytest.mark.parametrize("name", ["none", "left pads and holes"])
def test_a_prompt_may_be_prefilled_in_chunks(family: str, chunk: int, name: str) -> None:
    prompt, mask = MASKS[name]
    options = {"attention_mask": mask, "prefill_chunk_size": chunk}
    expected = plain_text(plain_model(family), prompt, NEW, **options)
    for drafting in (DRAFTING["scripted"], DRAFTING["assistant"]):
        assert torch.equal(speculate(compiled(family), prompt, **options, **drafting(expected, prompt)), expected)


# The rest of the interface.


def test_the_tree_of_compile_is_the_default_of_draft_tree() -> None:
    model = treewy.compile(fresh_model("qwen3_next"), tree=(3, 2))
    shape = treewy.DraftTree(torch.zeros(1, 3).long(), torch.tensor([-1, -1, 0]))
    text = plain_text(plain_model("qwen3_next"), PROMPT, NEW)
    for draft_tree, nodes in ((None, 1 + 3 + 6), ((2, 1), 1 + 2 + 2), (shape, 1 + 3), (None, 1 + 3 + 6)):
        options = {"assistant_model": noisy_draft("qwen3_next"), "draft_tree": draft_tree}
        output = speculate(model, return_dict_in_generate=True, **options)
        assert output.speculation.nodes == nodes
        assert torch.equal(output.sequences, text)
    # it shapes what an assistant drafts, and nothing else
    assert torch.equal(speculate(model, prompt_lookup_num_tokens=2), text)
    assert torch.equal(speculate(model, drafter=knowing(text, PROMPT)), text)
    assert torch.equal(speculate(model), text)


def test_a_model_may_draft_for_itself(family: str) -> None:
    model = compiled(family)
    output = speculate(model, assistant_model=model, draft_tree=(1, 1, 1), return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain_text(plain_model(family), PROMPT, NEW))
    assert output.speculation.acceptance_by_depth[0] == 1.0


@pytest.mark.parametrize("prompt", [PROMPT, BATCH], ids=["one row", "batch"])
def test_a_float64_model_gives_its_own_plain_text(family: str, prompt: Tensor) -> None:
    plain, model = (fresh_model(family).double() for _ in range(2))
    expected = plain_text(plain, prompt, NEW)
    treewy.compile(model)
    for script in (MIXED, (perfect(5),), (chain(4, 0),)):
        assert torch.equal(speculate(model, prompt, drafter=knowing(expected, prompt, script)), expected)


def test_a_bfloat16_model_leaves_its_own_plain_text_only_where_that_is_uncertain(family: str) -> None:
    """A first difference needs two best logits closer than what plain decoding and a plain forward make of the text."""
    plain, model = (fresh_model(family).bfloat16() for _ in range(2))
    treewy.compile(model)
    differences, comparisons = 0, 0
    for seed in range(6):
        prompt = random_tokens(1, 9, seed=100 + seed)
        output = plain_text(plain, prompt, NEW, return_dict_in_generate=True, output_logits=True)
        expected = output.sequences
        decoded = torch.cat(output.logits)
        noise = (decoded - plain(expected).logits[0, prompt.shape[1] - 1 : -1]).abs().max()
        best, second = decoded.topk(2).values.unbind(1)
        for script in (MIXED, (chain(4, 0),)):
            actual = speculate(model, prompt, drafter=knowing(expected, prompt, script))
            different = (actual != expected)[0, prompt.shape[1] :].nonzero()
            comparisons += 1
            if len(different) > 0:
                differences += 1
                assert best[different[0, 0]] - second[different[0, 0]] <= 2 * noise
    assert differences < comparisons / 2  # otherwise the noise would allow anything


def test_the_signature_names_the_arguments_of_both() -> None:
    theirs = inspect.signature(plain_model("qwen3_next").generate).parameters
    ours = inspect.signature(compiled().generate).parameters
    assert set(ours) == {*theirs, "draft_tree", "drafter", "generator"}
    assert [name for name in ours if name in theirs] == list(theirs)
    for name in ("draft_tree", "drafter", "generator"):
        assert ours[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert ours[name].default is None
    assert list(ours)[-1] == list(theirs)[-1]
    assert "draft_tree" not in inspect.signature(plain_model("qwen3_next").generate).parameters


def test_arguments_may_be_positional_or_named() -> None:
    text = plain_text(plain_model("qwen3_next"), PROMPT, NEW)
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False)
    calls: list[Callable[..., Tensor]] = [
        functools.partial(compiled().generate, PROMPT, config),
        functools.partial(compiled().generate, inputs=PROMPT, generation_config=config),
        functools.partial(compiled().generate, input_ids=PROMPT, max_new_tokens=NEW),
        functools.partial(compiled().generate, input_ids=PROMPT, generation_config=config, attention_mask=None),
        functools.partial(compiled().generate, PROMPT, None, None, None, max_new_tokens=NEW, draft_tree=None),
    ]
    for call in calls:
        assert torch.equal(call(drafter=knowing(text, PROMPT)), text)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_prompt_may_be_of_any_integer_type_that_plain_generation_takes(dtype: torch.dtype) -> None:
    expected = plain_text(plain_model("qwen3_next"), PROMPT.to(dtype), NEW)
    for drafting in DRAFTING.values():
        actual = speculate(compiled(), PROMPT.to(dtype), **drafting(longer_text("qwen3_next", PROMPT), PROMPT))
        assert torch.equal(actual, expected)
