"""Bad proposals: each is refused by name with a remedy, and leaves everything as it was."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

from api_models import (
    FixedDrafter,
    StreamRecorder,
    noisy_draft,
)
from models import VOCAB_SIZE
from refusals import (
    FAMILY,
    TWO_ROWS,
    Case,
    OwnError,
    generate,
    ids,
    parameters,
    right,
    text,
)
from treewy import AssistantDrafter, DraftTree


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
    """And drafts as a new one does: nothing is left of the text at which it failed."""
    draft = copy.deepcopy(noisy_draft(FAMILY))
    drafter = AssistantDrafter(draft, (2, 1))
    calls: list[None] = []

    def fail(*_: Any) -> None:
        calls.append(None)
        if len(calls) > 4:  # in a round
            raise OwnError

    handle = draft.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(OwnError):
        generate(model, drafter=drafter)
    handle.remove()
    again, new = (
        generate(model, drafter=who, return_dict_in_generate=True) for who in (drafter, AssistantDrafter(draft, (2, 1)))
    )
    assert torch.equal(again.sequences, text())
    assert again.speculation == new.speculation
