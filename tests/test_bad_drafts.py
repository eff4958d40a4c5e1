"""Bad proposals, drafters and trees: each is refused by name with a remedy, and leaves everything as it was."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

from api_models import (
    PROMPT,
    FixedDrafter,
    StreamRecorder,
    noisy_draft,
)
from models import VOCAB_SIZE, fresh_model, plain_model
from refusals import (
    FAMILY,
    TWO_ROWS,
    Call,
    Case,
    OwnError,
    generate,
    ids,
    parameters,
    right,
    shape,
    text,
)
from treewy import AssistantDrafter, DraftTree, PromptLookupDrafter

# What drafters propose.


def sampled(name: str, message: str, **options: Any) -> Case:
    """A draft for sampling: three nodes, and two parents."""
    options = {"sampling": "with_replacement"} | options

    def call(model: PreTrainedModel) -> Any:
        tree = DraftTree(ids([3, 3, 5]), torch.tensor([-1, -1, 0]), **options)
        return generate(model, drafter=FixedDrafter(tree, after=1), do_sample=True, generator=torch.Generator())

    return Case(name, call, message, options.pop("error", ValueError))


def flat(*shape: int) -> Tensor:
    return torch.full(shape, 1 / shape[-1])


NO_NUMBERS = torch.stack([flat(1, 61), torch.full((1, 61), float("nan"))], dim=1)
DRAWN = [
    sampled("drawn from nothing", "sampling 'with_replacement' needs draft_probs.*pass them, or sampling='top'"),
    sampled(
        "probabilities as a list",
        r"draft_probs \[\[0.5, 0.5\]\] must be a tensor \[B, P, V\]",
        draft_probs=[[0.5, 0.5]],
        error=TypeError,
    ),
    sampled("no parents in the probabilities", r"draft_probs \[1, 61\] must be \[B, P, V\]", draft_probs=flat(1, 61)),
    sampled("another batch", r"draft_probs \[2, 2, 61\] must be \[B, P, V\]", draft_probs=flat(2, 2, 61)),
    sampled("integers", "draft_probs must be floating, .*, not torch.int64", draft_probs=torch.ones(1, 2, 61).long()),
    sampled(
        "on another device", "draft_probs is on meta but token_ids is on cpu", draft_probs=flat(1, 2, 61).to("meta")
    ),
    sampled(
        "another vocabulary", "draft_probs has a vocabulary of 60 but the target one of 61", draft_probs=flat(1, 2, 60)
    ),
    sampled(
        "too few parents",
        r"draft_probs has 1 distributions but row 0.* has 2; pass one a parent \(not one a node\)",
        draft_probs=flat(1, 1, 61),
    ),
    sampled(
        "too many parents",
        r"draft_probs has 4 distributions but row 0.* has 2; pass one a parent \(not one a node\)",
        draft_probs=flat(1, 4, 61),
    ),
    sampled(
        "probabilities that nothing would use",
        "draft_probs are given but sampling='top' does not use them; pass sampling='with_replacement' or",
        draft_probs=flat(1, 2, 61),
        sampling="top",
    ),
    sampled(
        "scores", r"draft token 3 \(row 0, node 0\).*do not add up to 1.*normalise", draft_probs=2 * flat(1, 2, 61)
    ),
    sampled(
        "NaN",
        r"draft token 5 \(row 0, node 2\).*add up to 1",
        draft_probs=NO_NUMBERS,
    ),
    sampled(
        "negative probabilities",
        r"draft token 3 \(row 0, node 0\).*are negative; normalise",
        draft_probs=torch.tensor([1.5, -0.5, *[0.0] * 59]).expand(1, 2, 61),
    ),
    sampled(
        "an impossible token",
        r"draft token 3 \(row 0, node 0\) has probability 0 in draft_probs; pass the distribution that it was drawn",
        draft_probs=torch.eye(61)[[4, 5]][None],
    ),
    sampled(
        "a sibling twice",
        r"draft token 3 \(row 0, node 1\) repeats an earlier sibling; draw without replacement, or pass",
        draft_probs=flat(1, 2, 61),
        sampling="without_replacement",
    ),
]


@pytest.mark.parametrize("case", parameters(DRAWN))
def test_a_draft_that_cannot_be_sampled_from_is_refused(model: PreTrainedModel, case: Case) -> None:
    with pytest.raises(case.error, match=case.message):
        case.call(model)


class Proposing(FixedDrafter):
    """Propose what a function makes in the third round."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(None, after=2)
        self._make = make

    def propose(self, input_ids: Tensor, lengths: Tensor) -> Any:
        return self._make() if self.rounds_before == 0 else super().propose(input_ids, lengths)


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


def flash_draft() -> PreTrainedModel:
    model = fresh_model("qwen3")
    model.config._attn_implementation = "flash_attention_2"
    return model


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
        assistant(assistant_model=drafting_model(70)),
        "assistant_model has a vocabulary of 70, the model one of 61; pass an assistant that shares the.*tokenizer",
    ),
    Case(
        "an assistant with a smaller vocabulary",
        assistant(assistant_model=drafting_model(50), draft_tree=(2,)),
        "assistant_model has a vocabulary of 50, the model one of 61; pass an assistant that shares the.*tokenizer",
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
