"""Arguments that cannot go with a drafter: each is refused by name with a remedy, and leaves everything as it was."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

import treewy
from api_models import (
    PROMPT,
    CriterionRecorder,
    FixedDrafter,
    ProcessorRecorder,
    StreamRecorder,
    cache_keyword,
    modeling_globals,
    noisy_draft,
    tiny_tokenizer,
)
from models import fresh_model, plain_model
from refusals import (
    FAMILY,
    NEW,
    TWO_ROWS,
    Case,
    OwnError,
    assert_works,
    generate,
    ids,
    parameters,
    right,
    text,
    visible_state,
)
from treewy import DraftTree

# Arguments of Hugging Face's that cannot go with a drafter.


def drafted(name: str, message: str, options: dict[str, Any], prompt: Tensor = PROMPT) -> Case:
    def call(model: PreTrainedModel) -> Any:
        return generate(model, prompt, **right(prompt), **options)

    return Case(name, call, message)


def filled_cache() -> DynamicCache:
    cache = DynamicCache(config=plain_model(FAMILY).config)
    plain_model(FAMILY)(PROMPT[:, :-1], use_cache=True, **{cache_keyword(plain_model(FAMILY)): cache})
    return cache


CACHE = cache_keyword(plain_model(FAMILY))
WHOLE_TEXT = "cannot be combined with a drafter yet; pass the whole text as input_ids"
MASK = r"attention_mask is \[{}\] but input_ids is \[1, 9\]"

ARGUMENTS = [
    drafted(
        "an argument of forward", "output_router_logits is an argument.*leave it out", {"output_router_logits": True}
    ),
    drafted("settings of the draft", "num_assistant_tokens is read from.*set it on", {"num_assistant_tokens": 3}),
    drafted("a suffix without lookup", "max_matching_ngram_size=3.*pass prompt_lookup", {"max_matching_ngram_size": 3}),
    drafted("beams", "mode 'beam_search' cannot be combined.*use greedy search or sampling", {"num_beams": 2}),
    drafted("sampled beams", "mode 'beam_sample' cannot be combined.*sampling", {"num_beams": 2, "do_sample": True}),
    Case(
        "a seed for a generator",
        lambda model: generate(model, PROMPT, **right(PROMPT), generator=3),
        "generator is 3; pass a torch.Generator",
        TypeError,
    ),
    Case(
        "a generator without a drafter",
        lambda model: generate(model, PROMPT, do_sample=True, generator=torch.Generator()),
        "generator needs a drafter.*see torch.manual_seed",
    ),
    drafted(
        "contrastive search",
        "mode 'contrastive_search' cannot be combined.*use greedy search",
        {"penalty_alpha": 0.6, "top_k": 4},
    ),
    drafted("several sequences", "num_return_sequences.*got 2", {"num_return_sequences": 2}),
    drafted("no cache", "use_cache=False cannot be combined.*drop it", {"use_cache": False}),
    drafted("an empty cache of the user", f"{CACHE} {WHOLE_TEXT}", {CACHE: DynamicCache()}),
    drafted("a filled cache of the user", f"{CACHE} {WHOLE_TEXT}", {CACHE: filled_cache()}),
    drafted("a cache under its old name", f"past_key_values {WHOLE_TEXT}", {"past_key_values": filled_cache()}),
    drafted(
        "an offloaded cache",
        "cache_implementation='offloaded' cannot be combined.*leave it out",
        {"cache_implementation": "offloaded"},
    ),
    drafted(
        "a quantized cache", "cache_implementation='quantized'.*leave it out", {"cache_implementation": "quantized"}
    ),
    drafted("an unknown cache", "cache_implementation.*nonsense", {"cache_implementation": "nonsense"}),
    drafted(
        "embeddings",
        "inputs_embeds cannot be combined.*pass input_ids, which drafts continue",
        {"inputs_embeds": torch.zeros(1, 9, 32)},
    ),
    *(
        drafted(name, f"{name}=True cannot be combined.*leave it out", {name: True, "return_dict_in_generate": True})
        for name in ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
    ),
    drafted("an early exit", "assistant_early_exit cannot.*pass an assistant_model", {"assistant_early_exit": 1}),
    drafted(
        "a tokenizer of the assistant",
        "assistant_tokenizer cannot be combined.*pass an assistant that shares the model's tokenizer",
        {"assistant_tokenizer": tiny_tokenizer()},
    ),
    drafted("another decoding", "custom_generate cannot.*leave out one", {"custom_generate": lambda model, ids: ids}),
    drafted(
        "a negative prompt",
        "negative_prompt_ids cannot be combined.*leave it out",
        {"negative_prompt_ids": PROMPT, "guidance_scale": 1.5},
    ),
    drafted("an unknown argument", "draft_trees", {"draft_trees": (2, 2)}),
    drafted(
        "a streamer and two rows",
        "streamer cannot be combined with a drafter and 2 rows; stream one row at a time",
        {"streamer": StreamRecorder()},
        TWO_ROWS,
    ),
    drafted(
        "a processor with a memory and two rows",
        "logits processor ProcessorRecorder may.*cannot be used with a drafter and 2 rows; generate row by row",
        {"logits_processor": LogitsProcessorList([ProcessorRecorder()])},
        TWO_ROWS,
    ),
    drafted(
        "a constraint and two rows",
        "logits processor PrefixConstrainedLogitsProcessor may.*2 rows; generate row by row",
        {"prefix_allowed_tokens_fn": lambda row, text: [row + 2, 7]},
        TWO_ROWS,
    ),
    drafted(
        "a criterion and two rows",
        "stopping criterion CriterionRecorder cannot be used with a drafter and 2 rows.*; generate row by row",
        {"stopping_criteria": StoppingCriteriaList([CriterionRecorder(12)])},
        TWO_ROWS,
    ),
    drafted(
        "a time limit and two rows without an end token",
        "stopping criterion MaxTimeCriteria cannot be used with a drafter and 2 rows.*; generate row by row",
        {"max_time": 100.0},
        TWO_ROWS,
    ),
    drafted("a mask with a pad that is too long", MASK.format("1, 10"), {"attention_mask": ids([0] + [1] * 9)}),
    drafted("a mask with a pad that is too short", MASK.format("1, 8"), {"attention_mask": ids([0] + [1] * 7)}),
    drafted("a mask of ones, too long", MASK.format("1, 10"), {"attention_mask": ids([1] * 10)}),
    drafted("a mask of ones, too short", MASK.format("1, 8"), {"attention_mask": ids([1] * 8)}),
    drafted(
        "a mask of ones with too many rows",
        MASK.format("2, 9"),
        {"attention_mask": torch.ones(2, 9)},
    ),
    drafted("a mask without rows", MASK.format("9"), {"attention_mask": torch.ones(9)}),
    drafted("a mask of pairs", "attention_mask.*must be 2D", {"attention_mask": torch.ones(1, 9, 9)}),
    drafted(
        "a mask, with a remedy",
        MASK.format("1, 10") + "; ",
        {"attention_mask": ids([0] + [1] * 9)},
    ),
]


@pytest.mark.parametrize("case", parameters(ARGUMENTS))
def test_an_argument_that_cannot_go_with_a_drafter_is_refused(model: PreTrainedModel, case: Case) -> None:
    with pytest.raises(case.error, match=case.message):
        case.call(model)


@pytest.mark.parametrize("kind", ["static", "offloaded_static", "paged"])
def test_a_cache_of_another_kind_is_refused_and_nothing_is_left_of_it(kind: str) -> None:
    own = treewy.compile(fresh_model(FAMILY))
    before = visible_state(own)
    with pytest.raises(ValueError, match=rf"cache_implementation='{kind}' cannot be combined.*leave it out"):
        generate(own, cache_implementation=kind, **right())
    assert_works(own)
    assert visible_state(own) == before


def test_prompt_lookup_on_the_models_configuration_is_refused_for_plain_generation_too() -> None:
    own = treewy.compile(fresh_model(FAMILY))
    for name, value in (("prompt_lookup_num_tokens", 3), ("assistant_early_exit", 1)):
        setattr(own.generation_config, name, value)
        with pytest.raises(ValueError, match=f"generation_config.{name} is set.*set it to None and pass"):
            generate(own)
        setattr(own.generation_config, name, None)
    assert_works(own)


# The cache limit.


def test_a_text_that_does_not_fit_the_cache_is_refused_before_it_begins() -> None:
    own = treewy.compile(fresh_model(FAMILY), max_cache_len=PROMPT.shape[1] + NEW - 1)
    drafter = FixedDrafter(OwnError())
    with pytest.raises(
        ValueError, match="max_length is 19 but max_cache_len is 18; compile with a larger max_cache_len"
    ):
        generate(own, drafter=drafter)
    before = modeling_globals(own)
    assert torch.equal(generate(own, max_new_tokens=5, prompt_lookup_num_tokens=1), text()[:, :14])
    assert torch.equal(generate(own), text())  # plain generation has no limit
    assert modeling_globals(own) == before
    assert_works(treewy.compile(own))


@pytest.mark.parametrize("commit", ["immediate", "snapshots"])
def test_a_tree_that_does_not_fit_the_cache_is_refused(commit: str) -> None:
    own = treewy.compile(fresh_model(FAMILY), max_cache_len=25, commit=commit)
    before = visible_state(own)
    options = {"assistant_model": noisy_draft(FAMILY), "draft_tree": (4, 4)}
    with pytest.raises(
        ValueError,
        match="30 columns are needed but max_cache_len is 25: the tree's 21 nodes do not fit; raise max_cache_len or",
    ):
        generate(own, **options)
    assert visible_state(own) == before
    assert torch.equal(generate(own, **(options | {"draft_tree": (2, 1)})), text())
    assert torch.equal(generate(treewy.compile(own, max_cache_len=60, commit=commit), **options), text())


def test_a_text_and_its_trees_may_fill_the_cache_exactly() -> None:
    own = treewy.compile(fresh_model(FAMILY), max_cache_len=PROMPT.shape[1] + NEW)
    # when two tokens are missing, all but the last of the text is committed, and a root and two drafts fill the rest
    siblings = DraftTree(ids([3, 4]), ids([-1, -1]))
    assert torch.equal(generate(own, drafter=FixedDrafter(siblings)), text())
    with pytest.raises(
        ValueError, match="20 columns are needed but max_cache_len is 19: the tree's 4 nodes do not fit"
    ):
        generate(own, drafter=FixedDrafter(DraftTree(ids([3, 4, 5]), ids([-1, -1, -1]))))
