"""A draft model without a tree: its chain ends where it is not confident."""

import pytest
import torch
from transformers import PreTrainedModel

import treewy
from draft_targets import DRAFTS, Target, logits_after
from models import INTERFACE_FAMILIES, VOCAB_SIZE, fresh_model, random_tokens
from treewy import AssistantDrafter


def confident_chain(model: PreTrainedModel, text: list[int], length: int, threshold: float) -> list[int]:
    """Tokens up to and with the first whose probability is below the threshold."""
    chain: list[int] = []
    while len(chain) < length:
        probability, token = logits_after(model, text + chain).float().softmax(-1).max(-1)
        chain.append(int(token))
        if probability < threshold:
            break
    return chain


def confident_model(family: str, threshold: float | None, num_tokens: int | None) -> PreTrainedModel:
    """A model that is often confident, and often not."""
    model = fresh_model(family, seed=1)
    model.lm_head.weight.mul_(6)
    model.generation_config.num_assistant_tokens = num_tokens
    model.generation_config.assistant_confidence_threshold = threshold
    return model


@pytest.mark.parametrize("family", DRAFTS)
@pytest.mark.parametrize(("threshold", "num_tokens"), [(0.6, 4), (0.0, 3), (None, None), (1.0, 4)])
def test_without_a_tree_a_chain_ends_behind_the_first_token_below_the_threshold(
    family: str, threshold: float | None, num_tokens: int | None
) -> None:
    model = confident_model(family, threshold, num_tokens)
    target = Target([random_tokens(length, seed=20 + length).tolist() for length in (4, 2)])
    drafter = AssistantDrafter(model)
    limits = (20 if num_tokens is None else num_tokens, 0.4 if threshold is None else threshold)
    lengths = set()
    for accept in ((-1, 0), (0, -1), (1, 0), (0, 0)):
        tree = drafter.propose(*target.context())
        for row, text in enumerate(target.texts):
            expected = confident_chain(model, text, *limits)
            lengths.add(len(expected))
            assert tree.token_ids[row, : tree.num_nodes[row]].tolist() == expected
        choices = [min(node, int(count) - 1) for node, count in zip(accept, tree.num_nodes, strict=True)]
        drafter.update(*target.emit(tree, choices))
    assert threshold in (0.0, 1.0) or len(lengths) > 1


def test_the_target_may_go_on_with_what_the_drafter_held_back() -> None:
    """Row 0 is not confident, row 1 is: nodes are computed for both and proposed for one, and may come true."""
    model = confident_model("qwen3_next", 0.6, 4)
    texts = [random_tokens(5, seed=seed).tolist() for seed in range(40)]
    chains = [confident_chain(model, text, 4, 0.6) for text in texts]
    short = next(i for i, chain in enumerate(chains) if len(chain) == 1)
    long = next(i for i, chain in enumerate(chains) if len(chain) == 4)
    target = Target([list(texts[short]), list(texts[long])])
    drafter = AssistantDrafter(model)
    assert drafter.propose(*target.context()).num_nodes.tolist() == [1, 4]
    held_back = confident_chain(model, texts[short], 4, 0.0)
    emitted = [held_back[:2], [next(t for t in range(2, VOCAB_SIZE) if t != chains[long][0])]]
    for text, tokens in zip(target.texts, emitted, strict=True):
        text += tokens
    drafter.update(torch.tensor([emitted[0], [*emitted[1], 7]]), torch.tensor([2, 1]))
    tree = drafter.propose(*target.context())
    for row, text in enumerate(target.texts):
        assert tree.token_ids[row, : tree.num_nodes[row]].tolist() == confident_chain(model, text, 4, 0.6)


@pytest.mark.parametrize("family", INTERFACE_FAMILIES)
def test_rows_of_a_batch_may_end_at_different_times_with_a_confident_draft_model(family: str) -> None:
    plain, model = (confident_model(family, 0.6, 4) for _ in range(2))
    treewy.compile(model)
    for seed in range(3):
        prompt = random_tokens(2, 5, seed=seed)
        text = plain.generate(prompt, max_new_tokens=24, do_sample=False)
        for eos in text[:, 9].tolist():
            expected = plain.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=eos)
            actual = model.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=eos, assistant_model=plain)
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("schedule", ["heuristic", "heuristic_transient"])
def test_a_schedule_of_the_number_of_tokens_is_refused(schedule: str) -> None:
    model = fresh_model("qwen3")
    model.generation_config.num_assistant_tokens_schedule = schedule
    with pytest.raises(
        ValueError, match=f"num_assistant_tokens_schedule '{schedule}' is not supported; set .*constant"
    ):
        AssistantDrafter(model)
    AssistantDrafter(model, (2, 1))  # which has a number of its own
