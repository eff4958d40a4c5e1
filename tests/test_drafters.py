"""The drafters: prompt lookup, and the draft model, whose state must never be corrupted by what was not accepted.

A draft model that lost its place would still draft, only worse, and generation would still be right: no test of tokens
sees it. Here every proposal is compared with one computed from the text alone, without any state.
"""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from draft_targets import DRAFTS, Target, logits_after
from models import fresh_model, plain_model, random_tokens
from treewy import AssistantDrafter, Drafter, DraftTree, PromptLookupDrafter

SHAPES = ((1, 1, 1), (2, 2), (3, 1, 2))


# Prompt lookup.


@settings(max_examples=300)
@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=12), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_lookup_continues_the_latest_earlier_occurrence_of_the_longest_suffix(
    texts: list[list[int]], num_tokens: int, max_ngram_size: int
) -> None:
    longest = max(map(len, texts))
    padded = torch.tensor([text + [2] * (longest - len(text)) for text in texts])  # pads that would match
    lengths = torch.tensor([len(text) for text in texts])
    tree = PromptLookupDrafter(num_tokens, max_ngram_size).propose(padded, lengths)
    assert tree.parents.tolist() == [list(range(-1, tree.parents.shape[1] - 1))] * len(texts)
    for text, tokens, count in zip(texts, tree.token_ids.tolist(), tree.num_nodes.tolist(), strict=True):
        occurrences = {
            size: [start for start in range(len(text) - size) if text[start : start + size] == text[-size:]]
            for size in range(1, min(max_ngram_size, len(text) - 1) + 1)
        }
        sizes = [size for size, starts in occurrences.items() if starts]
        if not sizes:
            assert count == 0
            continue
        after = max(occurrences[max(sizes)]) + max(sizes)
        assert tokens[:count] == text[after : after + num_tokens]
        assert count >= 1


def test_lookup_keeps_no_memory_between_calls() -> None:
    drafter = PromptLookupDrafter(2)
    text, length = torch.tensor([[1, 2, 3, 4, 1, 2]]), torch.tensor([6])
    before = drafter.propose(text, length)
    drafter.update(torch.tensor([[3]]), torch.tensor([1]))
    drafter.reorder(torch.tensor([0]))
    drafter.reset()
    assert torch.equal(drafter.propose(text, length).token_ids, before.token_ids)
    assert drafter.propose(text[:, :4], torch.tensor([4])).num_nodes.tolist() == [0]


@pytest.mark.parametrize(("arguments", "message"), [((0,), "num_tokens is 0"), ((3, -1), "max_ngram_size is -1")])
def test_lookup_with_a_number_that_is_not_positive_raises(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}; it must be at least 1"):
        PromptLookupDrafter(*arguments)


@pytest.mark.parametrize("drafter", [PromptLookupDrafter(1), AssistantDrafter(plain_model("qwen3"), (1,))])
def test_the_ready_made_drafters_satisfy_the_protocol(drafter: object) -> None:
    assert isinstance(drafter, Drafter)


def by_level(parents: Sequence[int]) -> list[int]:
    """The nodes in the order of their depths, otherwise as they are."""
    depth: list[int] = []
    for parent in parents:
        depth.append(0 if parent < 0 else depth[parent] + 1)
    return sorted(range(len(parents)), key=depth.__getitem__)


def from_scratch(model: PreTrainedModel, text: list[int], parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Tokens and parents, level by level, of the tree whose k-th children are the k-th most probable tokens."""
    paths: dict[int, list[int]] = {-1: text}
    for node, parent in enumerate(parents):
        rank = list(parents[:node]).count(parent)
        token = int(logits_after(model, paths[parent]).topk(rank + 1).indices[rank])
        paths[node] = [*paths[parent], token]
    order = by_level(parents)
    return [paths[node][-1] for node in order], [order.index(parents[n]) if parents[n] >= 0 else -1 for n in order]


def widths_to_parents(widths: Sequence[int]) -> list[int]:
    size = sum(torch.tensor(widths).cumprod(0).tolist())
    return DraftTree.from_widths(widths, torch.zeros(1, size).long()).parents[0].tolist()


def assert_proposes_from_scratch(
    drafter: AssistantDrafter, model: PreTrainedModel, target: Target, parents: Sequence[int]
) -> DraftTree:
    tree = drafter.propose(*target.context())
    assert tree.num_nodes.tolist() == [len(parents)] * len(target.texts)
    for row in target.live():
        expected = from_scratch(model, target.texts[row], parents)
        assert (tree.token_ids[row].tolist(), tree.parents[row].tolist()) == expected, f"row {row}"
    return tree


@pytest.mark.parametrize("family", DRAFTS)
@pytest.mark.parametrize("widths", SHAPES)
def test_every_proposal_is_the_one_computed_from_the_text_alone(family: str, widths: tuple[int, ...]) -> None:
    model, parents = plain_model(family, seed=1), widths_to_parents(widths)
    target = Target([random_tokens(length, seed=length).tolist() for length in (1, 6, 3)])
    drafter = AssistantDrafter(model, widths)
    last = len(parents) - 1
    # nothing, a part, all; alternately in the rows, and twice in a row each
    for choices in (
        (-1, 0, last),
        (last, -1, 0),
        (last, 0, 0),
        (0, last, -1),
        (-1, -1, -1),
        (last, last, last),
        (0, 0, 0),
    ):
        tree = assert_proposes_from_scratch(drafter, model, target, parents)
        drafter.update(*target.emit(tree, choices))


@settings(max_examples=40)
@given(st.data())
def test_a_draft_state_is_never_corrupted(data: st.DataObject) -> None:
    """Any tree, any acceptance, rows of any length that end at any time; updates may be missing."""
    model = plain_model(data.draw(st.sampled_from(DRAFTS)), seed=1)
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(data.draw(st.integers(1, 6)))]
    shape = DraftTree(torch.zeros(1, len(parents)).long(), torch.tensor(parents))
    batch = data.draw(st.integers(1, 3))
    target = Target(
        [random_tokens(data.draw(st.integers(1, 7)), seed=row).tolist() for row in range(batch)],
        seed=data.draw(st.integers(0, 2**31 - 1)),
    )
    drafter = AssistantDrafter(model, shape)
    for _ in range(data.draw(st.integers(1, 4))):
        tree = assert_proposes_from_scratch(drafter, model, target, parents)
        choice = st.one_of(
            st.integers(-1, len(parents) - 1), st.just("end") if len(target.live()) > 1 else st.nothing()
        )
        emitted = target.emit(tree, [data.draw(choice) for _ in range(batch)])
        if not target.live():
            return
        if data.draw(st.booleans()):
            drafter.update(*emitted)


def test_nodes_are_proposed_level_by_level_whatever_the_order_of_the_shape() -> None:
    # a chain of 3, then a second child of the root with two children, the second of which was listed first in depth
    shape = DraftTree(torch.zeros(1, 6).long(), torch.tensor([-1, 0, 1, -1, 3, 3]))
    model, target = plain_model("qwen3_next"), Target([random_tokens(5, seed=0).tolist()])
    tree = assert_proposes_from_scratch(AssistantDrafter(model, shape), model, target, shape.parents[0].tolist())
    assert tree.parents.tolist() == [[-1, -1, 0, 1, 1, 2]]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (DraftTree(torch.zeros(2, 2).long(), torch.tensor([[-1, -1], [-1, 0]])), "same full topology in every row"),
        (DraftTree(torch.zeros(2, 2).long(), torch.tensor([-1, 0]), num_nodes=torch.tensor([2, 1])), "full topology"),
        (DraftTree(torch.zeros(1, 0).long(), torch.zeros(0).long()), "at least one node"),
        ((2, 0), r"widths \(2, 0\) must be positive integers"),
    ],
)
def test_a_shape_that_no_row_could_follow_raises(shape: DraftTree | tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AssistantDrafter(plain_model("qwen3"), shape)


# The rest of the protocol.


@pytest.mark.parametrize("family", DRAFTS)
@pytest.mark.parametrize("index", [[1, 0, 2], [2, 2, 0], [1, 1, 1]])
@pytest.mark.parametrize("when", ["after update", "after propose", "between updates"])
def test_after_a_reorder_each_row_continues_the_row_it_was_given(family: str, index: list[int], when: str) -> None:
    model, widths = plain_model(family, seed=1), (2, 1)
    parents = widths_to_parents(widths)
    target = Target([random_tokens(length, seed=30 + length).tolist() for length in (2, 5, 3)])
    drafter = AssistantDrafter(model, widths)
    drafter.reorder(torch.tensor(index))  # before any text there is nothing to reorder
    for choices in ((3, -1, 1), (0, 3, -1)):
        tree = drafter.propose(*target.context())
        drafter.update(*target.emit(tree, choices))
    if when == "after propose":
        drafter.propose(*target.context())
    if when == "between updates":
        drafter.update(torch.tensor([[7], [7], [7]]), torch.tensor([0, 0, 0]))
    drafter.reorder(torch.tensor(index))
    target.texts = [list(target.texts[i]) for i in index]
    for choices in ((-1, 3, 0), (3, 0, -1)):
        if when == "after propose":  # nothing was emitted since
            for text in target.texts:
                text.append(5)
        tree = assert_proposes_from_scratch(drafter, model, target, parents)
        drafter.update(*target.emit(tree, choices))


@pytest.mark.parametrize("family", DRAFTS)
def test_reset_forgets_the_text_and_the_batch_size(family: str) -> None:
    model, widths = plain_model(family, seed=1), (2, 2)
    drafter = AssistantDrafter(model, widths)
    for batch in (2, 1, 3):
        drafter.reset()
        target = Target([random_tokens(2 + row, seed=10 * batch + row).tolist() for row in range(batch)])
        for _ in range(2):
            tree = assert_proposes_from_scratch(drafter, model, target, widths_to_parents(widths))
            drafter.update(*target.emit(tree, [2] * batch))


@pytest.mark.parametrize("family", DRAFTS)
def test_an_update_before_any_proposal_changes_nothing(family: str) -> None:
    model, widths = plain_model(family, seed=1), (2, 1)
    target = Target([random_tokens(4, seed=0).tolist()])
    drafter = AssistantDrafter(model, widths)
    drafter.update(torch.tensor([[5, 6]]), torch.tensor([2]))
    tree = assert_proposes_from_scratch(drafter, model, target, widths_to_parents(widths))
    emitted = target.emit(tree, [0])
    drafter.update(*emitted)
    drafter.update(*emitted)  # told twice: the text says that it was emitted once
    assert_proposes_from_scratch(drafter, model, target, widths_to_parents(widths))


@pytest.mark.parametrize("family", DRAFTS)
@pytest.mark.parametrize("rounds_before", [0, 1])
def test_a_second_proposal_for_the_same_text_is_the_first_again(family: str, rounds_before: int) -> None:
    model, widths = plain_model(family, seed=1), (2, 1)
    target = Target([random_tokens(4, seed=0).tolist(), random_tokens(6, seed=1).tolist()])
    drafter = AssistantDrafter(model, widths)
    for _ in range(rounds_before):
        drafter.update(*target.emit(drafter.propose(*target.context()), [3, -1]))
    first = assert_proposes_from_scratch(drafter, model, target, widths_to_parents(widths))
    second = assert_proposes_from_scratch(drafter, model, target, widths_to_parents(widths))
    assert torch.equal(first.token_ids, second.token_ids)


@pytest.mark.parametrize("family", DRAFTS)
def test_rows_reordered_before_anything_was_emitted_propose_what_their_prompts_call_for(family: str) -> None:
    model, widths = plain_model(family, seed=1), (2, 1)
    target = Target([random_tokens(length, seed=length).tolist() for length in (4, 6, 3)])
    drafter = AssistantDrafter(model, widths)
    drafter.propose(*target.context())
    drafter.reorder(torch.tensor([2, 0, 0]))
    target.texts = [list(target.texts[old]) for old in (2, 0, 0)]
    assert_proposes_from_scratch(drafter, model, target, widths_to_parents(widths))


@pytest.mark.parametrize("family", DRAFTS)
def test_a_draft_model_is_read_only(family: str) -> None:
    model = fresh_model(family, seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = dict(vars(model))
    target = Target([random_tokens(4, seed=0).tolist()])
    drafter = AssistantDrafter(model, (2, 1))
    drafter.update(*target.emit(drafter.propose(*target.context()), [0]))
    drafter.propose(*target.context())
    assert vars(model) == attributes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
