"""What generate returns, streams and takes with a drafter is what it returns, streams and takes without one."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList
from transformers.generation.utils import GenerateDecoderOnlyOutput

import treewy
from api_models import (
    BATCH,
    BATCH_MASK,
    MIXED,
    PROMPT,
    StreamRecorder,
    cache_keyword,
    knowing,
    noisy_draft,
    plain_text,
)
from contract import DRAFTING, NEW, THREE, THREE_MASK, Drafting, compiled, longer_text, speculate, stats_of
from models import VOCAB_SIZE, fresh_model, plain_model, random_tokens
from treewy import AssistantDrafter, DraftTree, PromptLookupDrafter
from treewy.ops import depths
from treewy.testing import NOTHING, Proposal, ScriptedDrafter, chain, perfect

# Streamers.


def test_a_streamer_is_told_what_plain_generation_tells_it(family: str, drafting: Drafting) -> None:
    plain, ours = StreamRecorder(), StreamRecorder()
    text = plain_text(plain_model(family), PROMPT, NEW, streamer=plain)
    assert torch.equal(speculate(compiled(family), streamer=ours, **drafting(text, PROMPT)), text)
    assert ours.calls == plain.calls
    prompt, *tokens, end = [call if call == "end" else call[1] for call in ours.calls]
    assert (prompt, end) == (PROMPT.tolist(), "end")
    assert tokens == [[token] for token in text[0, PROMPT.shape[1] :].tolist()]


@pytest.mark.parametrize("max_new_tokens", [1, 4, NEW])
@pytest.mark.parametrize("eos_at", [0, 1, 5])
def test_a_streamer_is_told_nothing_behind_the_end(max_new_tokens: int, eos_at: int) -> None:
    known = longer_text("qwen3_next", PROMPT)
    options = {"eos_token_id": int(known[0, PROMPT.shape[1] + eos_at]), "max_new_tokens": max_new_tokens}
    plain, ours = StreamRecorder(), StreamRecorder()
    plain_text(plain_model("qwen3_next"), PROMPT, streamer=plain, **options)
    speculate(compiled(), streamer=ours, drafter=knowing(known, PROMPT, (perfect(6),)), **options)
    assert ours.calls == plain.calls


# Where a text ends.


def test_a_batch_ends_where_plain_generation_ends_with_each_greedy_token_as_eos(family: str) -> None:
    """Case G27: transformers#47912, transformers#47195, transformers#46790. Text ran past its end or its length."""
    known = longer_text(family, BATCH)
    for eos in sorted(set(known[:, BATCH.shape[1] : BATCH.shape[1] + 10].flatten().tolist())):
        expected = plain_text(plain_model(family), BATCH, NEW, eos_token_id=eos)
        actual = speculate(compiled(family), BATCH, eos_token_id=eos, drafter=knowing(known, BATCH))
        assert torch.equal(actual, expected), eos


@pytest.mark.parametrize("eos", [None, 60, [60, 5, 7], list(range(2, 61, 4)), list(range(61))], ids=str)
def test_any_set_of_eos_tokens_ends_a_text_where_it_ends_the_plain_one(
    eos: int | list[int] | None, drafting: Drafting
) -> None:
    """Case G27: transformers#47912, transformers#47195, transformers#46790. Text ran past its end or its length."""
    expected = plain_text(plain_model("qwen3_next"), BATCH, NEW, eos_token_id=eos)
    known = longer_text("qwen3_next", BATCH)
    assert torch.equal(speculate(compiled(), BATCH, eos_token_id=eos, **drafting(known, BATCH)), expected)


@pytest.mark.parametrize("accept", range(6))
@pytest.mark.parametrize("max_new_tokens", [1, 2, 3])
def test_a_draft_of_five_makes_no_text_longer_than_asked_for(max_new_tokens: int, accept: int) -> None:
    """Case G27: transformers#47912, transformers#47195, transformers#46790. Text ran past its end or its length."""
    stats = stats_of((chain(5, accept),), max_new_tokens=max_new_tokens)
    expected = plain_text(plain_model("qwen3_next"), PROMPT, max_new_tokens)
    drafter = knowing(longer_text("qwen3_next", PROMPT), PROMPT, (chain(5, accept),))
    assert torch.equal(speculate(compiled(), max_new_tokens=max_new_tokens, drafter=drafter), expected)
    assert stats.tokens == max_new_tokens
    assert stats.rounds == {1: 0, 2: 1, 3: 1 if accept else 2}[max_new_tokens]


@pytest.mark.parametrize("length", [10, 20])
def test_max_length_counts_the_prompt(drafting: Drafting, length: int) -> None:
    known = longer_text("qwen3_next", PROMPT)
    expected = plain_model("qwen3_next").generate(PROMPT, max_length=length, do_sample=False)
    actual = compiled().generate(PROMPT, max_length=length, do_sample=False, **drafting(known, PROMPT))
    assert actual.shape[1] == length
    assert torch.equal(actual, expected)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
def test_without_a_length_the_text_is_as_long_as_the_plain_one(drafting: Drafting) -> None:
    known = longer_text("qwen3_next", PROMPT)
    assert torch.equal(
        compiled().generate(PROMPT, **drafting(known, PROMPT)), plain_model("qwen3_next").generate(PROMPT)
    )


def test_without_a_prompt_the_text_begins_with_bos() -> None:
    expected = plain_model("qwen3_next").generate(max_new_tokens=NEW)
    drafter = knowing(expected, expected[:, :1])
    assert torch.equal(compiled().generate(max_new_tokens=NEW, drafter=drafter), expected)


# What is returned.


def test_the_output_is_hugging_faces_with_what_the_speculation_did(family: str, drafting: Drafting) -> None:
    text = plain_text(plain_model(family), PROMPT, NEW)
    options = drafting(text, PROMPT)
    plain = plain_text(plain_model(family), PROMPT, NEW, return_dict_in_generate=True)
    output = speculate(compiled(family), return_dict_in_generate=True, **options)
    assert isinstance(output, GenerateDecoderOnlyOutput)
    assert set(output.keys()) == {*plain.keys(), "speculation"}
    assert torch.equal(output.sequences, text)
    assert torch.equal(output[0], text)
    assert output["speculation"] is output.speculation
    assert type(output[cache_keyword(plain_model(family))]) is DynamicCache
    assert (output.scores, output.logits, output.attentions, output.hidden_states) == (None,) * 4


def test_return_dict_may_come_from_a_configuration_object() -> None:
    config = GenerationConfig(max_new_tokens=5, return_dict_in_generate=True)
    text = plain_text(plain_model("qwen3_next"), PROMPT, 5)
    output = compiled().generate(PROMPT, generation_config=config, drafter=knowing(text, PROMPT))
    assert torch.equal(output.sequences, text)
    assert output.speculation.tokens == 5


def test_statistics_cannot_be_changed() -> None:
    stats = stats_of()
    assert dataclasses.is_dataclass(stats)
    for field in dataclasses.fields(stats):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(stats, field.name, 0)
    assert isinstance(stats.acceptance_by_depth, tuple)
    assert hash(stats) == hash(stats_of())


@dataclasses.dataclass(frozen=True)
class Counted:
    """A generation at batch 1, and the numbers that follow from its script."""

    script: tuple[Proposal, ...]
    max_new_tokens: int
    rounds: int
    mean: float
    by_depth: tuple[float, ...]
    nodes: int
    eos_at: int | None = None


THREE_TREES = (Proposal((-1, -1, 1, 1, 3), (1, 3)), Proposal((-1, -1), (1,)), Proposal((-1, -1), ()))
COUNTED = {
    # 1 + (3+1) + (3+1) + (3+1)
    "every draft right": Counted((perfect(3),), 13, 3, 4.0, (1.0, 1.0, 1.0), 4),
    "every draft wrong": Counted((chain(3, 0),), 5, 4, 1.0, (0.0, 0.0, 0.0), 4),
    "no draft": Counted((NOTHING,), 5, 4, 1.0, (), 1),
    "no round": Counted((perfect(3),), 1, 0, 0.0, (), 0),
    # 1 + 3 + 1 + 5, depths 2, none, 4
    "drafts of different depths": Counted((chain(2, 2), NOTHING, chain(4, 4)), 10, 3, 3.0, (1.0, 1.0, 1.0, 1.0), 5),
    # 1 + 3 + 2 + 1: a tree of depth 3, then one of depth 1, then one that there is no room for
    "trees": Counted(THREE_TREES, 7, 3, 2.0, (1.0, 1.0, 0.0), 6),
    # 1 + 6 + 2: the second draft is cut to one token, since the bonus token fills the text
    "cut to the room": Counted((perfect(5),), 9, 2, 4.0, (1.0,) * 5, 6),
    "cut to the room in the first round": Counted((perfect(5),), 6, 1, 5.0, (1.0,) * 4, 5),
    # token 3 is the third of the first round
    "cut by eos": Counted((perfect(5),), 16, 1, 3.0, (1.0, 1.0, 1.0, 0.0, 0.0), 6, eos_at=3),
    "cut by eos that is the bonus token": Counted((chain(5, 2),), 16, 1, 3.0, (1.0, 1.0, 0.0, 0.0, 0.0), 6, eos_at=3),
    "cut by eos of a wrong draft's round": Counted((chain(2, 0),), 16, 3, 1.0, (0.0, 0.0), 3, eos_at=3),
}


@pytest.mark.parametrize("case", COUNTED.values(), ids=COUNTED)
@pytest.mark.parametrize("processor", [None, "a processor that changes nothing"])
def test_statistics_are_those_of_the_script(case: Counted, processor: str | None) -> None:
    options: dict[str, Any] = {"max_new_tokens": case.max_new_tokens}
    new = longer_text("qwen3_next", PROMPT)[0, PROMPT.shape[1] :].tolist()
    if case.eos_at is not None:
        assert new[case.eos_at] not in new[: case.eos_at]
        options["eos_token_id"] = new[case.eos_at]
    if processor:  # another way through the engine
        options["logits_processor"] = LogitsProcessorList([lambda input_ids, scores: scores])
    stats = stats_of(case.script, **options)
    assert stats.rounds == case.rounds
    assert stats.target_forwards == case.rounds + 1
    assert stats.tokens == (case.max_new_tokens if case.eos_at is None else case.eos_at + 1)
    assert stats.mean_accepted_length == case.mean
    assert stats.acceptance_by_depth == case.by_depth
    assert stats.nodes == case.nodes


def test_statistics_of_a_batch_count_rows_until_they_end(family: str) -> None:
    known = longer_text(family, THREE)
    new = known[:, THREE.shape[1] :].tolist()
    eos = new[0][2]  # row 0 ends inside its first draft; the others go on
    ends = [row.index(eos) + 1 if eos in row[:NEW] else NEW for row in new]
    assert ends[0] == 3 < min(ends[1:])
    scripts = ((perfect(4),), (chain(4, 1),), (NOTHING,))
    drafter = ScriptedDrafter(new, scripts)
    output = speculate(compiled(family), THREE, drafter=drafter, eos_token_id=eos, return_dict_in_generate=True)
    stats, rounds = output.speculation, [1, -(-(ends[1] - 1) // 2), ends[2] - 1]
    assert stats.tokens == sum(ends)
    assert output.sequences.shape[1] == THREE.shape[1] + max(ends)
    assert stats.rounds == max(rounds)
    assert stats.mean_accepted_length == (sum(ends) - 3) / sum(rounds)
    full = ends[1] == NEW and NEW % 2 == 0  # row 1 emits two a round: no room for a draft in its last one
    drafted = 1 + rounds[1] - full  # rounds of rows that drafted anything
    assert stats.acceptance_by_depth == (1.0, 1 / drafted, 0.0, 0.0)


def test_kept_bytes_are_fewer_than_those_of_snapshots(family: str, drafting: Drafting) -> None:
    text = longer_text(family, BATCH)
    stats = speculate(compiled(family), BATCH, return_dict_in_generate=True, **drafting(text, BATCH)).speculation
    config = compiled(family).config
    heads, keys, values = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * keys + heads * values
    node = heads * keys * values + channels * config.linear_conv_kernel_dim
    layers = config.layer_types.count("linear_attention")
    assert stats.snapshot_bytes == 4 * layers * len(BATCH) * stats.nodes * node
    assert 0 < stats.state_bytes < stats.snapshot_bytes


@pytest.mark.parametrize("batch", [1, 2])
def test_forwards_of_the_target_are_those_that_a_hook_counts(family: str, drafting: Drafting, batch: int) -> None:
    prompt = BATCH[:batch]
    calls: list[int] = []
    handle = compiled(family).register_forward_hook(lambda *_: calls.append(1))
    text = longer_text(family, prompt)
    stats = speculate(compiled(family), prompt, return_dict_in_generate=True, **drafting(text, prompt)).speculation
    handle.remove()
    assert stats.target_forwards == len(calls) == stats.rounds + 1


def test_forwards_of_a_chunked_prefill_are_counted() -> None:
    calls: list[int] = []
    handle = compiled().register_forward_hook(lambda *_: calls.append(1))
    stats = stats_of(prefill_chunk_size=4)
    handle.remove()
    assert stats.target_forwards == len(calls)


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
