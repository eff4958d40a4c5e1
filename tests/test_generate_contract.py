"""What generate returns and streams with a drafter is what it returns and streams without one."""

import dataclasses
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from api_models import (
    BATCH,
    PROMPT,
    StreamRecorder,
    cache_keyword,
    knowing,
    plain_text,
)
from contract import NEW, THREE, Drafting, compiled, longer_text, speculate, stats_of
from models import plain_model
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
