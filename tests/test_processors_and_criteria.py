"""Logits processors and stopping criteria see what they see in plain generation, and do what they do there."""

from collections.abc import Callable, Iterator
from math import ceil
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

import treewy
from api_models import (
    BATCH,
    PROMPT,
    CriterionRecorder,
    ProcessorRecorder,
    knowing,
    plain_text,
    tiny_tokenizer,
)
from contract import DRAFTING, NEW, THREE, THREE_MASK, Drafting, compiled, longer_text, speculate
from models import PREDICTABLE, VOCAB_SIZE, fresh_model, plain_model, random_tokens

# Logits processors.


EOS_IS_LIKELY = {"eos_token_id": list(range(2, 40))}
PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[5], [7, 9], [11], *[[n] for n in range(20, 30)]]},
    "min_new_tokens": {"min_new_tokens": 9, **EOS_IS_LIKELY},
    "min_length": {"min_length": 14, **EOS_IS_LIKELY},
    "sequence_bias": {"sequence_bias": [[[n], 4.0] for n in range(30, 40)] + [[[31, 32], -9.0]]},
    "suppress_tokens": {"suppress_tokens": list(range(10, 50))},
    "begin_suppress_tokens": {"begin_suppress_tokens": [*range(4, 60)]},
    "forced_eos_token_id": {"forced_eos_token_id": 17},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (4, 1.6), "eos_token_id": 3},
    "several": {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "suppress_tokens": [3, 4, 5, 6],
        "min_length": 14,
    },
}
AT_BATCH_1 = ("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "min_new_tokens", "several")


def with_batches() -> Iterator[Any]:
    for name, options in PROCESSORS.items():
        for batch in (1, 3) if name in AT_BATCH_1 else (3,):
            yield pytest.param(options, batch, id=f"{name}-{batch}")


@pytest.mark.parametrize(("options", "batch"), list(with_batches()))
def test_processors_see_what_they_see_in_plain_generation(options: dict[str, Any], batch: int) -> None:
    """Case G16: vmlx-swift#357. Rejected drafts were recorded in the penalties' memory."""
    prompt = THREE[-batch:]
    options = options | {"attention_mask": THREE_MASK[-batch:], "pad_token_id": 0}
    plain = plain_model("qwen3_next", mixing=PREDICTABLE)  # loops, so that there is something to penalise
    model = compiled("qwen3_next", PREDICTABLE)
    expected = plain_text(plain, prompt, NEW, **options)
    assert not torch.equal(expected, longer_text("qwen3_next", prompt, PREDICTABLE)[:, : expected.shape[1]])
    output = speculate(model, prompt, drafter=knowing(expected, prompt), return_dict_in_generate=True, **options)
    assert torch.equal(output.sequences, expected)
    assert output.speculation.mean_accepted_length > 1
    assert torch.equal(speculate(model, prompt, **options, **DRAFTING["assistant"](expected, prompt)), expected)


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_model_that_drafts_for_itself_is_right_behind_processors_too(name: str) -> None:
    """Its drafts are processed as its choices are, with the same text before them: pads, prompt and drafted path."""
    options = PROCESSORS[name] | {"attention_mask": THREE_MASK, "pad_token_id": 0}
    plain = plain_model("qwen3_next", mixing=PREDICTABLE)
    output = speculate(
        compiled("qwen3_next", PREDICTABLE),
        THREE,
        assistant_model=plain,
        draft_tree=(1, 1, 1),
        return_dict_in_generate=True,
        **options,
    )
    new = output.sequences[:, THREE.shape[1] :].tolist()
    eos = torch.tensor(PROCESSORS[name].get("eos_token_id", [])).flatten().tolist()
    ends = [next((at + 1 for at, token in enumerate(row) if token in eos), NEW) for row in new]
    assert output.speculation.rounds == max(ceil((end - 1) / 4) for end in ends)


def test_a_repetition_penalty_at_batch_3_without_pads_sees_what_it_sees_in_plain_generation() -> None:
    prompt = random_tokens(3, 6, seed=5)
    expected = plain_text(plain_model("qwen3_next", mixing=PREDICTABLE), prompt, NEW, repetition_penalty=1.3)
    model = compiled("qwen3_next", PREDICTABLE)
    assert torch.equal(speculate(model, prompt, repetition_penalty=1.3, drafter=knowing(expected, prompt)), expected)


def test_constrained_and_guided_generation_are_plain_generations_at_batch_1(family: str) -> None:
    def even_after_odd(row: int, text: Tensor) -> list[int]:
        return list(range(2 + int(text[-1]) % 2, VOCAB_SIZE, 2))

    for options in (
        {"prefix_allowed_tokens_fn": even_after_odd},
        {"guidance_scale": 1.7},
        {"renormalize_logits": True},
    ):
        expected = plain_text(plain_model(family), PROMPT, NEW, **options)
        actual = speculate(compiled(family), **options, drafter=knowing(expected, PROMPT))
        assert torch.equal(actual, expected), options


@pytest.mark.parametrize("eos_at", [None, 0, 5])
@pytest.mark.parametrize("max_new_tokens", [1, 4, NEW])
def test_a_processor_with_a_memory_gets_exactly_the_calls_of_plain_generation(
    max_new_tokens: int, eos_at: int | None
) -> None:
    family = "qwen3_next"
    recorder = LogitsProcessorList([ProcessorRecorder()])
    known = plain_text(plain_model(family), PROMPT, NEW + 8, logits_processor=recorder)
    assert not torch.equal(known, longer_text(family, PROMPT))
    eos = None if eos_at is None else int(known[0, PROMPT.shape[1] + eos_at])
    options = {"max_new_tokens": max_new_tokens, "eos_token_id": eos, "pad_token_id": 0}
    plain = ProcessorRecorder()
    expected = plain_text(plain_model(family), PROMPT, logits_processor=LogitsProcessorList([plain]), **options)
    for drafting in DRAFTING.values():
        ours = ProcessorRecorder()
        processors = LogitsProcessorList([ours])
        actual = speculate(compiled(family), logits_processor=processors, **options, **drafting(known, PROMPT))
        assert torch.equal(actual, expected)
        assert ours.texts == plain.texts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_processor_gets_float32_scores_of_its_own(dtype: torch.dtype) -> None:
    """As in plain generation: it may write into them."""

    def overwrite(input_ids: Tensor, scores: Tensor) -> Tensor:
        assert (scores.dtype, tuple(scores.shape)) == (torch.float32, (1, VOCAB_SIZE))
        scores[:, int(input_ids[0, -1]) % 5 :: 5] -= 3
        return scores

    plain, model = (fresh_model("qwen3_next").to(dtype) for _ in range(2))
    processors = LogitsProcessorList([overwrite])
    expected = plain_text(plain, PROMPT, 8, logits_processor=processors)
    treewy.compile(model)
    options = {"logits_processor": processors, "drafter": knowing(expected, PROMPT)}
    assert torch.equal(speculate(model, max_new_tokens=8, **options), expected)


# Stopping criteria.


@pytest.mark.parametrize("stop_at", [10, 13, 99])
@pytest.mark.parametrize("eos_at", [None, 5])
def test_a_criterion_gets_exactly_the_calls_of_plain_generation(
    drafting: Drafting, stop_at: int, eos_at: int | None
) -> None:
    family = "qwen3_next"
    known = longer_text(family, PROMPT)
    eos = None if eos_at is None else int(known[0, PROMPT.shape[1] + eos_at])
    options = {"max_new_tokens": 10, "eos_token_id": eos, "pad_token_id": 0}
    plain, ours = CriterionRecorder(stop_at), CriterionRecorder(stop_at)
    expected = plain_text(plain_model(family), PROMPT, stopping_criteria=StoppingCriteriaList([plain]), **options)
    criteria = StoppingCriteriaList([ours])
    actual = speculate(compiled(family), stopping_criteria=criteria, **options, **drafting(known, PROMPT))
    assert torch.equal(actual, expected)
    assert ours.texts == plain.texts


class ShorterLength(MaxLengthCriteria):
    """A criterion of the user's own, derived from Hugging Face's."""


class LaterEnd(EosTokenCriteria):
    """Likewise: a token ends the text only from some length on."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        stop: Tensor = super().__call__(input_ids, scores, **kwargs) & (input_ids.shape[1] >= 18)
        return stop


CRITERIA: dict[str, Callable[[], list[Any]]] = {
    "shorter than the prompt": lambda: [MaxLengthCriteria(5)],
    "shorter than asked for": lambda: [MaxLengthCriteria(14)],
    "two lengths": lambda: [MaxLengthCriteria(20), MaxLengthCriteria(14)],
    "a length of the user's own class": lambda: [ShorterLength(14)],
    "an end of the user's own class": lambda: [LaterEnd(torch.arange(VOCAB_SIZE))],
    "two sets of end tokens": lambda: [EosTokenCriteria([*range(2, 30, 2)]), EosTokenCriteria([*range(30, 61, 2)])],
    "likewise, in the other order": lambda: [
        EosTokenCriteria([*range(30, 61, 2)]),
        EosTokenCriteria([*range(2, 30, 2)]),
    ],
}


@pytest.mark.parametrize("make", CRITERIA.values(), ids=CRITERIA)
def test_criteria_of_the_user_end_a_text_where_they_end_the_plain_one(make: Callable[[], list[Any]]) -> None:
    known = longer_text("qwen3_next", PROMPT)
    options: dict[str, Any] = {"eos_token_id": 60, "pad_token_id": 0}
    criteria = StoppingCriteriaList(make())
    expected = plain_text(plain_model("qwen3_next"), PROMPT, NEW, stopping_criteria=criteria, **options)
    assert expected.shape[1] < PROMPT.shape[1] + NEW
    for drafting in DRAFTING.values():
        criteria = StoppingCriteriaList(make())
        actual = speculate(compiled(), stopping_criteria=criteria, **options, **drafting(known, PROMPT))
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("make", [lambda: MaxLengthCriteria(14), lambda: StopStringCriteria(tiny_tokenizer(), "gg")])
def test_criteria_end_the_rows_of_a_batch_where_they_end_the_plain_ones(make: Callable[[], Any]) -> None:
    known = longer_text("qwen3_next", BATCH)
    options: dict[str, Any] = {
        "eos_token_id": 60,
        "pad_token_id": 0,
    }  # plain generation pads only where there is an eos
    criteria = StoppingCriteriaList([make()])
    expected = plain_text(plain_model("qwen3_next"), BATCH, NEW, stopping_criteria=criteria, **options)
    assert expected.shape[1] < BATCH.shape[1] + NEW
    for drafting in DRAFTING.values():
        criteria = StoppingCriteriaList([make()])
        actual = speculate(compiled(), BATCH, stopping_criteria=criteria, **options, **drafting(known, BATCH))
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(("prompt", "eos"), [(PROMPT, None), (PROMPT, 60), (BATCH, 60)])
def test_no_time_at_all_is_time_for_one_token(drafting: Drafting, prompt: Tensor, eos: int | None) -> None:
    known = longer_text("qwen3_next", prompt)
    options = {"max_time": 0.0, "eos_token_id": eos}
    expected = plain_text(plain_model("qwen3_next"), prompt, NEW, **options)
    assert expected.shape[1] == prompt.shape[1] + 1
    assert torch.equal(speculate(compiled(), prompt, **options, **drafting(known, prompt)), expected)


def stop_string(known: Tensor, position: int) -> str:
    """A string that begins in the middle of one token and ends in the next."""
    first, second = tiny_tokenizer().convert_ids_to_tokens(known[0, PROMPT.shape[1] + position :][:2].tolist())
    return first[1:] + second[:1]


@pytest.mark.parametrize("position", [0, 3, 6])
def test_a_criterion_of_stop_strings_ends_a_text_where_it_ends_the_plain_one(drafting: Drafting, position: int) -> None:
    known = longer_text("qwen3_next", PROMPT)
    criteria = StoppingCriteriaList([StopStringCriteria(tiny_tokenizer(), stop_string(known, position))])
    expected = plain_text(plain_model("qwen3_next"), PROMPT, NEW, stopping_criteria=criteria)
    assert expected.shape[1] <= PROMPT.shape[1] + position + 2
    assert torch.equal(speculate(compiled(), stopping_criteria=criteria, **drafting(known, PROMPT)), expected)


def test_stop_strings_end_a_text_where_they_end_the_plain_one(drafting: Drafting) -> None:
    known = longer_text("qwen3_next", PROMPT)
    options = {"stop_strings": [stop_string(known, 5)], "tokenizer": tiny_tokenizer()}
    expected = plain_text(plain_model("qwen3_next"), PROMPT, NEW, **options)
    assert expected.shape[1] < PROMPT.shape[1] + NEW
    assert torch.equal(speculate(compiled(), **options, **drafting(known, PROMPT)), expected)
