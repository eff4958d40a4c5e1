"""Bad input is refused with the value and the remedy in the message, and leaves nothing behind."""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MistralConfig,
    MistralForCausalLM,
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
    knowing,
    model_snapshot,
    modeling_globals,
    noisy_draft,
    plain_text,
    process_state,
    tiny_tokenizer,
)
from models import VOCAB_SIZE, fresh_model, plain_model
from treewy import AssistantDrafter, DraftTree, PromptLookupDrafter

FAMILY = "qwen3_next"
NEW = 10
TWO_ROWS = PROMPT.repeat(2, 1)

Call = Callable[[PreTrainedModel], Any]


@dataclass(frozen=True)
class Case:
    """One bad input: the call, and what the message must say."""

    name: str
    call: Call
    message: str  # the value, then the remedy
    error: type[Exception] = ValueError


def parameters(cases: Sequence[Case]) -> list[Any]:
    assert len({case.name for case in cases}) == len(cases)
    return [pytest.param(case, id=case.name) for case in cases]


@functools.cache
def text() -> Tensor:
    return plain_text(plain_model(FAMILY), PROMPT, NEW)


def generate(model: PreTrainedModel, prompt: Tensor = PROMPT, **options: Any) -> Any:
    return model.generate(prompt, **({"max_new_tokens": NEW, "do_sample": False} | options))


def right(prompt: Tensor = PROMPT) -> dict[str, Any]:
    """A drafter that nothing is wrong with."""
    return {"drafter": knowing(text().repeat(len(prompt), 1), prompt)}


def assert_works(model: PreTrainedModel) -> None:
    """Generation returns the plain text, with drafters of two kinds and without one."""
    for options in (right(), {"assistant_model": noisy_draft(FAMILY), "draft_tree": (2, 1)}, {}):
        assert torch.equal(generate(model, **options), text())


@dataclass(frozen=True)
class Compiled:
    model: PreTrainedModel
    before: tuple[Any, ...]


def visible_state(*models: PreTrainedModel) -> tuple[Any, ...]:
    """What a user can see of some models and of the files that define them."""
    return (*map(model_snapshot, models), modeling_globals(*models))


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    model = treewy.compile(fresh_model(FAMILY))
    for attention in ("eager", "sdpa"):  # at the first change transformers remembers something of the class
        model.set_attn_implementation(attention)
    assert_works(model)
    return Compiled(model, visible_state(model, noisy_draft(FAMILY)))


@pytest.fixture
def model(compiled: Compiled) -> Iterator[PreTrainedModel]:
    """A compiled model, which must come back as it was given and still work."""
    process = process_state()
    yield compiled.model
    assert process_state() == process
    assert visible_state(compiled.model, noisy_draft(FAMILY)) == compiled.before
    assert_works(compiled.model)


# What drafters propose.


class Proposing(FixedDrafter):
    """Propose what a function makes in the third round."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(None, after=2)
        self._make = make

    def propose(self, input_ids: Tensor, lengths: Tensor) -> Any:
        return self._make() if self.rounds_before == 0 else super().propose(input_ids, lengths)


def ids(*rows: Sequence[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def proposing(name: str, make: Callable[[], Any], message: str, error: type[Exception] = ValueError) -> Case:
    return Case(name, lambda model: generate(model, drafter=Proposing(make)), message, error)


PROPOSALS = [
    proposing(
        "a parent behind its child",
        lambda: DraftTree(ids([3, 4, 5]), torch.tensor([-1, 2, 0])),
        r"parent of node 1 in row 0 is 2; .*list every node after its parent",
    ),
    proposing(
        "a node that is its own parent",
        lambda: DraftTree(ids([3, 4]), torch.tensor([-1, 1])),
        r"parent of node 1 in row 0 is 1; .*list every node after its parent",
    ),
    proposing(
        "a parent out of range",
        lambda: DraftTree(ids([3, 4]), torch.tensor([-1, 7])),
        r"parent of node 1 in row 0 is 7; parents must be -1 or the index of an earlier node",
    ),
    proposing(
        "a parent below -1",
        lambda: DraftTree(ids([3, 4]), torch.tensor([-2, 0])),
        r"parent of node 0 in row 0 is -2; parents must be -1 or the index of an earlier node",
    ),
    proposing(
        "a negative token",
        lambda: DraftTree(ids([3, -1]), torch.tensor([-1, 0])),
        r"token id -1 \(row 0, node 1\) is outside the target's vocabulary of 61; .*use the target's tokenizer",
    ),
    proposing(
        "a token just too large",
        lambda: DraftTree(ids([VOCAB_SIZE]), torch.tensor([-1])),
        r"token id 61 \(row 0, node 0\) is outside the target's vocabulary of 61; .*use the target's tokenizer",
    ),
    proposing(
        "a token much too large",
        lambda: DraftTree(ids([3, 2**40]), torch.tensor([-1, -1])),
        r"token id 1099511627776 \(row 0, node 1\) is outside the target's vocabulary of 61; .*tokenizer",
    ),
    proposing(
        "too many rows",
        lambda: DraftTree(ids([3], [3]), torch.tensor([-1])),
        r"proposed for 2 rows but the batch has 1; .*one tree a row, with num_nodes 0 for rows without",
    ),
    proposing(
        "no rows",
        lambda: DraftTree(torch.zeros(0, 2).long(), torch.tensor([-1, 0])),
        r"proposed for 0 rows but the batch has 1; .*one tree a row",
    ),
    proposing(
        "a tree on another device",
        lambda: DraftTree(ids([3]).to("meta"), torch.tensor([-1], device="meta")),
        r"draft tree is on meta but the batch is on cpu; move its tensors with \.to\('cpu'\)",
    ),
    proposing("nothing", lambda: None, r"proposed a NoneType; propose\(\) must return a treewy\.DraftTree"),
    proposing("tokens only", lambda: ids([3, 4]), r"proposed a Tensor; propose\(\) must return a treewy\.DraftTree"),
    proposing(
        "a pair", lambda: (ids([3]), ids([-1])), r"proposed a tuple; propose\(\) must return a treewy\.DraftTree"
    ),
    proposing(
        "a tree of lists",
        lambda: DraftTree([[3]], [-1]),  # type: ignore[arg-type]
        r"token_ids and parents must be tensors; wrap them in torch\.tensor",
        TypeError,
    ),
    Case(
        "too few rows",
        lambda model: generate(model, TWO_ROWS, drafter=FixedDrafter(DraftTree(ids([3]), torch.tensor([-1])), after=1)),
        r"proposed for 1 rows but the batch has 2; .*one tree a row",
    ),
]


@pytest.mark.parametrize("case", parameters(PROPOSALS))
def test_a_bad_proposal_is_refused(model: PreTrainedModel, case: Case) -> None:
    with pytest.raises(case.error, match=case.message):
        case.call(model)


def test_tokens_and_parents_of_padding_nodes_are_not_looked_at(model: PreTrainedModel) -> None:
    tree = DraftTree(ids([3, -1, 2**40]), torch.tensor([-1, 7, -9]), num_nodes=torch.tensor([1]))
    assert torch.equal(generate(model, drafter=FixedDrafter(tree)), text())


class OwnError(Exception):
    """An error of the user's own."""


@pytest.mark.parametrize(
    "error", [OwnError("no idea"), KeyboardInterrupt(), StopIteration(), ValueError("mine")], ids=repr
)
@pytest.mark.parametrize("where", ["propose", "propose later", "update", "reset"])
def test_an_error_of_the_drafter_is_the_one_that_the_caller_gets(
    model: PreTrainedModel, error: BaseException, where: str
) -> None:
    def fail(*_: Any) -> None:
        raise error

    drafter = FixedDrafter(error, after=2 if where == "propose later" else 0)
    if where in ("update", "reset"):
        drafter = FixedDrafter(DraftTree(ids([3, 4]), torch.tensor([-1, 0])))
        setattr(drafter, where, fail)
    with pytest.raises(type(error)) as caught:
        generate(model, drafter=drafter)
    assert caught.value is error


@pytest.mark.parametrize("who", ["processor", "criterion", "streamer"])
def test_an_error_of_another_object_of_the_user_is_the_one_that_the_caller_gets(
    model: PreTrainedModel, who: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OwnError

    streamer = StreamRecorder()
    streamer.put = lambda value: fail() if len(streamer.calls) > 3 else streamer.calls.append(value)  # type: ignore
    options = {
        "processor": {"logits_processor": LogitsProcessorList([fail])},
        "criterion": {"stopping_criteria": StoppingCriteriaList([fail])},
        "streamer": {"streamer": streamer},
    }[who]
    with pytest.raises(OwnError):
        generate(model, **right(), **options)


def test_a_drafter_that_failed_may_be_used_again(model: PreTrainedModel) -> None:
    draft = copy.deepcopy(noisy_draft(FAMILY))
    drafter = AssistantDrafter(draft, (2, 1))

    def fail(*_: Any) -> None:
        raise OwnError

    handle = draft.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(OwnError):
        generate(model, drafter=drafter)
    handle.remove()
    assert torch.equal(generate(model, drafter=drafter), text())


# Who drafts, and which tree.


class NoUpdate:
    def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree: ...

    def reset(self) -> None: ...

    def reorder(self, index: Tensor) -> None: ...


def assistant(**options: Any) -> Call:
    return lambda model: generate(model, **({"assistant_model": noisy_draft(FAMILY)} | options))


def drafting_model(vocab_size: int) -> PreTrainedModel:
    config = copy.deepcopy(plain_model("qwen3").config)
    config.vocab_size = vocab_size
    return type(plain_model("qwen3"))(config).eval()


def sliding_mistral() -> PreTrainedModel:
    config = MistralConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
    )
    return MistralForCausalLM(config).eval()


def flash_draft() -> PreTrainedModel:
    model = fresh_model("qwen3")
    model.config._attn_implementation = "flash_attention_2"
    return model


def shape(parents: Sequence[Sequence[int]], device: str = "cpu", **options: Any) -> DraftTree:
    nodes = torch.tensor(parents, device=device)
    return DraftTree(torch.zeros_like(nodes), nodes, **options)


DRAFTERS = [
    Case("a width of 0", assistant(draft_tree=(2, 0)), r"widths \(2, 0\) must be positive integers.*chain of 3"),
    Case("a negative width", assistant(draft_tree=(-1,)), r"widths \(-1,\) must be positive integers"),
    Case("no widths", assistant(draft_tree=()), r"widths \(\) must be positive integers"),
    Case("a fractional width", assistant(draft_tree=(2, 1.5)), r"widths \(2, 1\.5\) must be positive integers"),
    Case("a number for widths", assistant(draft_tree=5), "widths 5 must be a sequence with one integer", TypeError),
    Case(
        "a width larger than the vocabulary",
        assistant(draft_tree=(2, VOCAB_SIZE + 1)),
        "62 children, but the draft model has only 61 tokens to offer",
    ),
    Case(
        "a shape that differs from row to row",
        assistant(draft_tree=shape([[-1, 0], [-1, -1]])),
        "same full topology in every row",
    ),
    Case(
        "a shape with padding",
        assistant(draft_tree=shape([[-1, 0]], num_nodes=torch.tensor([1]))),
        "same full topology in every row",
    ),
    Case(
        "a shape on another device",
        assistant(draft_tree=shape([[-1, 0]], device="meta")),
        "meta",
    ),
    Case(
        "a tree and nobody to draft it",
        lambda model: generate(model, draft_tree=(2, 2)),
        r"draft_tree=\(2, 2\) needs somebody to draft it; pass assistant_model",
    ),
    Case(
        "a tree for prompt lookup",
        lambda model: generate(model, draft_tree=(2, 2), prompt_lookup_num_tokens=3),
        r"draft_tree=\(2, 2\) shapes the drafts of an assistant_model, not of prompt_lookup_num_tokens",
    ),
    Case(
        "a tree for a drafter",
        lambda model: generate(model, draft_tree=(2, 2), **right()),
        r"draft_tree=\(2, 2\) shapes the drafts of an assistant_model, not of drafter",
    ),
    Case("an assistant and a drafter", assistant(**right()), "assistant_model and drafter both.*pass one of them"),
    Case(
        "an assistant and prompt lookup",
        assistant(prompt_lookup_num_tokens=2),
        "assistant_model and prompt_lookup_num_tokens both.*pass one of them",
    ),
    Case(
        "a drafter and prompt lookup of a configuration object",
        lambda model: model.generate(PROMPT, GenerationConfig(prompt_lookup_num_tokens=2), **right()),
        "drafter and prompt_lookup_num_tokens both.*pass one of them",
    ),
    Case(
        "an object that is no drafter",
        lambda model: generate(model, drafter="auto"),
        r"drafter='auto' is not an object with the methods of treewy\.Drafter \(propose, .*; it lacks.*see",
    ),
    Case(
        "a drafter that lacks a method",
        lambda model: generate(model, drafter=NoUpdate()),
        r"drafter=<.*NoUpdate object.* is not an object with the methods of treewy\.Drafter \(propose, update",
    ),
    Case(
        "a class for a drafter",
        lambda model: generate(model, drafter=PromptLookupDrafter),
        r"drafter=<class '.*PromptLookupDrafter'> is not an object with the methods of treewy\.Drafter",
    ),
    Case(
        "a name for an assistant",
        assistant(assistant_model="gpt2"),
        "gpt2",
        TypeError,
    ),
    Case(
        "a drafter for an assistant",
        assistant(assistant_model=PromptLookupDrafter(2)),
        "PromptLookupDrafter",
        TypeError,
    ),
    Case(
        "an assistant with a larger vocabulary",
        assistant(assistant_model=drafting_model(64)),
        "assistant_model has a vocabulary of 64, the model one of 61; pass an assistant that shares the.*tokenizer",
    ),
    Case(
        "an assistant with a smaller vocabulary",
        assistant(assistant_model=drafting_model(50), draft_tree=(2,)),
        "assistant_model has a vocabulary of 50, the model one of 61; pass an assistant that shares the.*tokenizer",
    ),
    Case(
        "an assistant with a sliding window",
        assistant(assistant_model=sliding_mistral()),
        "layer 0 caches a DynamicSlidingWindowLayer.*supports Gated DeltaNet and full attention.*without a drafter",
    ),
    Case(
        "an assistant with flash attention",
        assistant(assistant_model=flash_draft(), draft_tree=(2,)),
        r"'flash_attention_2' cannot take a tree's mask; call model\.set_attn_implementation\('sdpa'\)",
    ),
    Case(
        "no tokens to look up", lambda model: generate(model, prompt_lookup_num_tokens=0), "num_tokens is 0; .*least 1"
    ),
    Case(
        "fewer than no tokens to look up",
        lambda model: generate(model, prompt_lookup_num_tokens=-2),
        "num_tokens is -2; it must be at least 1",
    ),
    Case(
        "an empty suffix to look up",
        lambda model: generate(model, prompt_lookup_num_tokens=2, max_matching_ngram_size=0),
        "max_.*ngram_size is 0; it must be at least 1",
    ),
    Case(
        "a negative suffix to look up",
        lambda model: generate(model, prompt_lookup_num_tokens=2, max_matching_ngram_size=-1),
        "max_ngram_size is -1; it must be at least 1",
    ),
]


@pytest.mark.parametrize("case", parameters(DRAFTERS))
def test_a_bad_drafter_or_tree_is_refused(model: PreTrainedModel, case: Case) -> None:
    with pytest.raises(case.error, match=case.message):
        case.call(model)


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
    drafted("sampling", "do_sample=True cannot be combined.*pass do_sample=False", {"do_sample": True}),
    drafted("beams", "mode 'beam_search' cannot be combined.*use greedy search", {"num_beams": 2}),
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
    # before the last round all but its tokens are committed: nine columns less one, a root and a draft
    assert torch.equal(generate(own, drafter=FixedDrafter(DraftTree(ids([3]), ids([-1])))), text())


# What `compile` refuses.


def compile_with(change: Callable[[PreTrainedModel], None] = lambda model: None, **options: Any) -> Callable[[], Any]:
    def call() -> Any:
        model = fresh_model(FAMILY)
        change(model)
        try:
            return treewy.compile(model, **options)
        finally:
            assert "generate" not in vars(model)

    return call


def sliding_target() -> Any:
    config = copy.deepcopy(plain_model(FAMILY).config)
    config.layer_types = ["linear_attention", "full_attention", "linear_attention", "sliding_attention"]
    config.sliding_window = 8
    with torch.random.fork_rng():
        model = type(plain_model(FAMILY))(config)
    return treewy.compile(model)


def use_attention(name: str) -> Callable[[PreTrainedModel], None]:
    def change(model: PreTrainedModel) -> None:
        model.config._attn_implementation = name

    return change


class KimiLayer(nn.Module):
    """Stands for a layer of Kimi Linear."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return chunk_kimi_delta_attention(hidden_states)  # type: ignore[name-defined]  # noqa: F821


def add_kimi_layer(model: PreTrainedModel) -> None:
    model.model.layers[1].kimi = KimiLayer()


def replace_forward(model: PreTrainedModel) -> None:
    layer = model.model.layers[2].linear_attn
    original = layer.forward
    layer.forward = lambda *args, **kwargs: original(*args, **kwargs)


def dynamic_rope() -> None:
    model = fresh_model(FAMILY)
    model.config.rope_parameters["rope_type"] = "dynamic"
    treewy.compile(model)


COMPILES: list[tuple[str, Callable[[], Any], str, type[Exception]]] = [
    (
        "an unknown backend",
        compile_with(backend="nvfuser"),
        "backend 'nvfuser' is not available; .*eager",
        ValueError,
    ),
    (
        "an unknown commit policy",
        compile_with(commit="rollback"),
        "commit policy 'rollback' is not available; choose one of immediate, snapshots",
        ValueError,
    ),
    ("no cache", compile_with(max_cache_len=0), "max_cache_len is 0; it must be positive, or None", ValueError),
    ("too many nodes", compile_with(tree=(50,) * 3), "make 127550 nodes, more than 1024; draft a smaller", ValueError),
    ("a dynamic rope", dynamic_rope, "rope_type 'dynamic' rotates by.*generate without a drafter", ValueError),
    ("a width of 0", compile_with(tree=(3, 0)), r"widths \(3, 0\) must be positive integers", ValueError),
    ("a number for widths", compile_with(tree=3), "widths 3 must be a sequence", TypeError),
    (
        "a shape that no row could follow",
        compile_with(tree=shape([[-1, 0], [-1, -1]])),
        "same full topology in every row",
        ValueError,
    ),
    (
        "a model without GDN layers",
        lambda: treewy.compile(fresh_model("qwen3")),
        r"no Gated DeltaNet rule.*Qwen3ForCausalLM \(model type 'qwen3'\); it supports hybrids such as Qwen3\.5",
        ValueError,
    ),
    (
        "a layer with a sliding window",
        sliding_target,
        "layer 3 caches a DynamicSlidingWindowLayer.*supports Gated DeltaNet and full attention.*without a drafter",
        ValueError,
    ),
    *(
        (
            name,
            compile_with(use_attention(name)),
            rf"{name!r} cannot take a tree's mask; call model\.set_attn_implementation\('sdpa'\)",
            ValueError,
        )
        for name in ("flash_attention_2", "flash_attention_3", "flex_attention")
    ),
    (
        "a Kimi layer",
        compile_with(add_kimi_layer),
        r"'model\.layers\.1\.kimi' \(KimiLayer\) uses Kimi delta attention.*supports the Gated DeltaNet rule only",
        ValueError,
    ),
    (
        "a replaced forward",
        compile_with(replace_forward),
        r"forward of layer 'model\.layers\.2\.linear_attn' was replaced.*load the model with use_kernels=False",
        ValueError,
    ),
]


@pytest.mark.parametrize("case", parameters([Case(n, lambda _, c=c: c(), m, e) for n, c, m, e in COMPILES]))
def test_what_cannot_be_compiled_is_refused(model: PreTrainedModel, case: Case) -> None:
    with pytest.raises(case.error, match=case.message):
        case.call(model)


@pytest.mark.parametrize(
    ("change", "undo", "message"),
    [
        (use_attention("flash_attention_2"), use_attention("sdpa"), "'flash_attention_2' cannot take a tree's mask"),
        (replace_forward, lambda m: delattr(m.model.layers[2].linear_attn, "forward"), "use_kernels=False"),
        (add_kimi_layer, lambda m: delattr(m.model.layers[1], "kimi"), "Kimi delta attention"),
    ],
)
def test_what_changes_after_compile_is_refused_by_generate(
    change: Callable[[PreTrainedModel], None], undo: Callable[[PreTrainedModel], None], message: str
) -> None:
    own = treewy.compile(fresh_model(FAMILY))
    change(own)
    modules = modeling_globals(own)
    with pytest.raises(ValueError, match=message):
        generate(own, **right())
    assert modeling_globals(own) == modules
    undo(own)
    assert_works(own)


def test_a_failing_forward_leaves_nothing_behind(model: PreTrainedModel) -> None:
    """In prefill, and inside a tree forward, where the functions of the modeling file are replaced."""

    def fail_at(width: int) -> Callable[..., None]:
        def fail(module: nn.Module, args: Any, output: Tensor) -> None:
            if output.shape[1] == width:
                raise OwnError

        return fail

    for width in (PROMPT.shape[1], 6):
        handle = model.model.layers[2].register_forward_hook(fail_at(width))
        with pytest.raises(OwnError):
            generate(model, **right())
        handle.remove()


def test_assisted_decoding_of_a_configuration_object_is_refused(model: PreTrainedModel) -> None:
    config = GenerationConfig(max_new_tokens=NEW, assistant_early_exit=1)
    with pytest.raises(ValueError, match=r"generation_config\.assistant_early_exit is set.*pass assistant_model"):
        model.generate(PROMPT, config, **right())
