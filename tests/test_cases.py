"""Public reports of other speculative decoders: a test for each kind of fault, with the report's small input and more.

The docstring names the case of cases.md (groups A, rollback; B, convolution window; C, tree shape; and 5, 10 and 18 of
E, batch and padding) and the report.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import oracle
import treewy
from models import (
    FAMILIES,
    POLICIES,
    VOCAB_SIZE,
    assert_stores_equal_plain_run,
    committed_stores,
    fresh_model,
    greedy,
    left_padded,
    new_tokens,
    plain_model,
    random_tokens,
    token_by_token,
)
from parents import chain as chain_of_nodes
from parents import widths
from scripted import start_rounds
from tolerances import LOGITS_FLOAT32, STORES_FLOAT32, relative_error
from treewy._nodes import DeferredNodes, FusedNodes, WyNodes
from treewy._rounds import Rounds
from treewy._session import Session
from treewy._snapshots import SnapshotNodes
from treewy._tree_forward import TreeForward
from treewy.ops import PADDING
from treewy.testing import NOTHING, Proposal, ScriptedDrafter, always_wrong, chain, perfect, tree

pytestmark = pytest.mark.parametrize("family", FAMILIES)

SEVEN_NODES = torch.tensor([widths(2, 2)])  # the root and a tree of widths (2, 2), breadth first


def decode(
    model: PreTrainedModel,
    prompt: Tensor,
    mask: Tensor,
    scripts: Sequence[Sequence[Proposal]],
    max_new_tokens: int,
    **options: object,
) -> Rounds:
    """Run a script to the end; stores are compared after each round, and the text at the end."""
    num_pads = (mask == 0).sum(1).tolist()
    drafter = ScriptedDrafter(new_tokens(model, prompt, mask, max_new_tokens + 10), scripts)
    rounds = start_rounds(model, prompt, mask, drafter, max_new_tokens=max_new_tokens, **options)
    while not rounds.all_ended:
        rounds.step()
        for row, pads in enumerate(num_pads):
            text = rounds.texts[row][pads:].tolist()
            assert_stores_equal_plain_run(rounds.session.cache, row, pads, text[:-1], model)
    drafter.assert_followed()
    assert torch.stack(list(rounds.texts)).tolist() == greedy(model, prompt, mask, max_new_tokens).tolist()
    return rounds


def prefilled(model: PreTrainedModel, length: int, seed: int = 0) -> tuple[Session, list[int]]:
    """A session behind a prompt of one row, and the prompt."""
    prompt, mask = left_padded([length], seed)
    session = Session(model)
    session.prefill(prompt, mask)
    return session, prompt[0].tolist()


def assert_logits_equal_plain_run(logits: Tensor, tokens: Sequence[int], model: PreTrainedModel) -> None:
    assert relative_error(logits, token_by_token(model).after(tokens).logits) <= LOGITS_FLOAT32


# --- A. Rollback and commit


@pytest.mark.parametrize("make_nodes", POLICIES)
def test_rounds_without_a_draft_go_on_from_what_was_accepted(family: str, make_nodes: type) -> None:
    """Case A3: vllm#56531, vllm#40875. A step with no draft read the state from before the last acceptance."""
    model = plain_model(family)
    prompt, mask = left_padded([6], seed=1)
    scripts = [
        [chain(4, 3), NOTHING, NOTHING, chain(4, 1)],
        [tree((2, 2), (0, 2, 6)), NOTHING, NOTHING, tree((3,), (0,))],
        [perfect(4), NOTHING, always_wrong(4), NOTHING],
        [NOTHING],
    ]
    for script in scripts if make_nodes is WyNodes else scripts[:2]:
        decode(model, prompt, mask, [script], max_new_tokens=40, make_nodes=make_nodes)


def test_a_perfect_a_wrong_and_a_partly_wrong_drafter_give_the_same_text(family: str) -> None:
    """Case A19: transformers#49036. The convolution window was rewound, the recurrent state never; a perfect drafter
    hides that."""
    model = treewy.compile(fresh_model(family))
    prompt, mask = left_padded([7], seed=2)
    expected = greedy(plain_model(family), prompt, mask, 30)
    continuations = new_tokens(plain_model(family), prompt, mask, 40)
    mean_accepted = []
    for proposal in (perfect(4), always_wrong(4), chain(4, 1)):
        drafter = ScriptedDrafter(continuations, [[proposal]])
        output = model.generate(
            prompt,
            attention_mask=mask,
            drafter=drafter,
            max_new_tokens=30,
            do_sample=False,
            return_dict_in_generate=True,
        )
        assert output.sequences.tolist() == expected.tolist()
        drafter.assert_followed()
        mean_accepted.append(output.speculation.mean_accepted_length)
    assert mean_accepted == [pytest.approx(29 / 6), 1, pytest.approx(29 / 15)]


@pytest.mark.parametrize("length", [1, 3, 20, 63, 64, 65])
def test_the_first_node_equals_a_plain_decode_step(family: str, length: int) -> None:
    """Case A37: transformers#45513. A cached forward of several tokens started from a zero state; 64 is Hugging Face's
    chunk."""
    model = plain_model(family)
    session, text = prefilled(model, length)
    token_ids = random_tokens(1, 5, seed=9)
    logits = session.extend(token_ids, torch.tensor([chain_of_nodes(5)]))
    for node in range(5):
        assert_logits_equal_plain_run(logits[0, node], text + token_ids[0, : node + 1].tolist(), model)


# --- B. Convolution window


@pytest.mark.parametrize("accepted", range(8))
def test_the_window_holds_accepted_inputs_only(family: str, accepted: int) -> None:
    """Case B2: vllm#50272, TensorRT-LLM#17522. The window kept rejected inputs; the kernel has 4 taps, so the next
    three tokens see it."""
    model = plain_model(family)
    session, text = prefilled(model, 5)
    token_ids = random_tokens(1, 8, seed=accepted)
    session.extend(token_ids, torch.tensor([chain_of_nodes(8)]))
    session.commit(torch.tensor([accepted]))  # the root is 0: `accepted` drafts of 7
    text += token_ids[0, : accepted + 1].tolist()
    for token in random_tokens(3, seed=100 + accepted).tolist():
        logits = session.extend(torch.tensor([[token]]), torch.tensor([[-1]]))
        text.append(token)
        assert_logits_equal_plain_run(logits[0, 0], text, model)
        session.commit(torch.tensor([0]))
        assert_stores_equal_plain_run(session.cache, 0, 0, text, model)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("accepted", [0, 1, 5])
def test_prompts_shorter_than_the_kernel_decode(family: str, length: int, accepted: int) -> None:
    """Case B9: hyprstream#1557. The stored window was shorter than the kernel needs."""
    model = plain_model(family)
    prompt, mask = left_padded([length], seed=length)
    decode(model, prompt, mask, [[chain(5, accepted)]], max_new_tokens=10)
    padded, mask = left_padded([length, 6], seed=length)
    decode(model, padded, mask, [[chain(5, accepted)], [chain(5, 5 - accepted)]], max_new_tokens=10)


# --- C. Tree shape


@pytest.mark.parametrize(
    ("batch", "path"),
    [(1, (0, 2, 6)), *((2, path) for path in [(0,), (0, 1), (0, 2), (0, 1, 3), (0, 1, 4), (0, 2, 5), (0, 2, 6)])],
)
def test_the_accepted_path_is_committed_wherever_its_nodes_lie(family: str, batch: int, path: tuple[int, ...]) -> None:
    """Case C1: sglang#27463, sglang#26866. The accepted length was used as a node index, and keys and values stayed
    where the tree had them. On path 0, 2, 6 depths and indices differ everywhere."""
    model = plain_model(family)
    prompt, mask = left_padded([6, 4][:batch], seed=sum(path))
    other = (0, 1, 3)
    scripts = [[tree((2, 2), path), tree((2, 2), other)], [tree((2, 2), other), NOTHING]][:batch]
    decode(model, prompt, mask, scripts, max_new_tokens=20)


def test_each_node_of_a_tree_equals_a_plain_forward_of_its_path(family: str) -> None:
    """Case C4: mlxcel#1214. Rotary positions were a node's index in the flattened tree, not its depth; a chain hides
    it."""
    model = plain_model(family)
    for parents in (SEVEN_NODES, torch.tensor([widths(3, 1, 2)]), torch.tensor([[-1, 0, 1, 0, 3, 4, 0, 2]])):
        session, text = prefilled(model, 9)
        token_ids = random_tokens(*parents.shape, seed=3)
        logits = session.extend(token_ids, parents)
        for node in range(parents.shape[1]):
            path = oracle.path(parents[0].tolist(), node)
            assert_logits_equal_plain_run(logits[0, node], text + token_ids[0, path].tolist(), model)


@pytest.mark.parametrize("node", range(7))
def test_a_node_sees_no_sibling_and_no_cousin(family: str, node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case C26: FastDeploy#3514. The mask was not applied below the diagonal, where cousins sit. Attention, convolution
    and delta rule are looked at by themselves, in every layer."""
    model = fresh_model(family)
    outputs: list[tuple[str, Tensor]] = []  # of each call, [1, 7, ...]

    def spy_on_module(module: torch.nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs.append((type(module).__name__, output[0] if isinstance(output, tuple) else output))

    for name, module in model.named_modules():
        if name.endswith(("linear_attn", "self_attn")):
            module.register_forward_hook(spy_on_module)
    convolve, apply_rule = TreeForward.convolve, TreeForward.apply_rule

    def spied_convolve(self: TreeForward, *inputs: Tensor) -> Tensor:
        result = convolve(self, *inputs)
        outputs.append(("convolution", result.transpose(1, 2)))
        return result

    def spied_rule(self: TreeForward, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        result = apply_rule(self, *inputs)
        outputs.append(("rule", result[0]))
        return result

    monkeypatch.setattr(TreeForward, "convolve", spied_convolve)
    monkeypatch.setattr(TreeForward, "apply_rule", spied_rule)

    token_ids = random_tokens(1, 7, seed=4)
    changed = token_ids.clone()
    changed[0, node] = (changed[0, node] + 1) % VOCAB_SIZE
    runs = []
    for tokens in (token_ids, changed):
        session, _ = prefilled(model, 9)
        outputs.clear()
        outputs.append(("logits", session.extend(tokens, SEVEN_NODES)))
        runs.append(list(outputs))
    assert len(runs[0]) == 2 * 3 + 2 + 1  # two layers of each kind, and the logits
    descendants = treewy.ops.ancestor_mask(SEVEN_NODES)[0, :, node]
    for (name, before), (_, after) in zip(*runs, strict=True):
        assert torch.equal(before[0, ~descendants], after[0, ~descendants]), name
        assert not torch.equal(before[0, node], after[0, node]), name


# --- E. Batch and padding


def test_rows_that_accept_less_do_not_drift(family: str) -> None:
    """Case E5: mlx-vlm#1962. Rejected keys and values were zeroed but still attended to."""
    model = plain_model(family)
    prompt, mask = left_padded([5, 5], seed=5)
    continuations = new_tokens(model, prompt, mask, 60)
    scripts = [[chain(4, 4)], [chain(4, 0)]]
    together = start_rounds(model, prompt, mask, ScriptedDrafter(continuations, scripts), max_new_tokens=60)
    alone = [
        start_rounds(
            model,
            prompt[[row]],
            mask[[row]],
            ScriptedDrafter([continuations[row]], [scripts[row]]),
            max_new_tokens=60,
        )
        for row in range(2)
    ]
    for _ in range(10):
        together.step()
        for row, rounds in enumerate(alone):
            rounds.step()
            assert together.texts[row].tolist() == rounds.texts[0].tolist()
            ours, own = (committed_stores(r.session.cache, i, 0) for r, i in ((together, row), (rounds, 0)))
            for pair in zip(ours, own, strict=True):
                assert all(relative_error(a, b) <= STORES_FLOAT32 for a, b in zip(*pair, strict=True))
            tokens = together.texts[row].tolist()
            assert_stores_equal_plain_run(together.session.cache, row, 0, tokens[:-1], model)
    assert [length - 5 for length in together.texts.lengths] == [1 + 10 * 5, 1 + 10]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("lengths", [(4,), (4, 9), (9, 4), (1, 1)])
def test_pads_are_never_seen(family: str, lengths: tuple[int, ...], attention: str) -> None:
    """Case E10: transformers#46773, transformers#47087. The pad mask was skipped at batch 1, or when the lengths of
    mask and input differ, as they do behind the prompt."""
    model = plain_model(family, attention=attention)
    width = 9 if len(lengths) == 1 else max(lengths) + (2 if lengths == (1, 1) else 0)
    prompt, mask = left_padded(lengths, seed=6, width=width)
    session = Session(model)
    session.prefill(prompt, mask)
    token_ids = random_tokens(len(lengths), 7, seed=6)
    logits = session.extend(token_ids, SEVEN_NODES.expand(len(lengths), -1))
    for row, length in enumerate(lengths):
        text = prompt[row, width - length :].tolist()
        for node in range(7):
            path = oracle.path(SEVEN_NODES[0].tolist(), node)
            assert_logits_equal_plain_run(logits[row, node], text + token_ids[row, path].tolist(), model)

    scripts = [[tree((2, 2), (0,)), tree((2, 2), (0, 2))], [tree((2, 2), (0,)), NOTHING, chain(3, 3)]]
    decode(model, prompt, mask, scripts[: len(lengths)], max_new_tokens=22)


class NanFillers:
    """Before a policy: padding nodes have no numbers at all."""

    def add_columns(self, window: Tensor, columns: Tensor, parents: Tensor) -> Tensor:
        absent = (parents == PADDING)[:, None]
        return super().add_columns(window, columns.masked_fill(absent, float("nan")), parents)

    def solve(self, state: Tensor, *inputs: Tensor) -> Tensor:
        *of_nodes, parents, qk_l2norm = inputs
        absent = parents == PADDING
        poisoned = [x.masked_fill(absent.view(*absent.shape, *[1] * (x.ndim - 2)), float("nan")) for x in of_nodes]
        return super().solve(state, *poisoned, parents, qk_l2norm)


class NanFillersWyNodes(NanFillers, WyNodes):
    pass


class NanFillersFusedNodes(NanFillers, FusedNodes):
    pass


class NanFillersDeferredNodes(NanFillers, DeferredNodes):
    pass


class NanFillersSnapshotNodes(NanFillers, SnapshotNodes):
    pass


@pytest.mark.parametrize("num_real", [1, 3])
@pytest.mark.parametrize(
    ("make_nodes", "nan_fillers"),
    [
        (WyNodes, NanFillersWyNodes),
        (FusedNodes, NanFillersFusedNodes),
        (DeferredNodes, NanFillersDeferredNodes),
        (SnapshotNodes, NanFillersSnapshotNodes),
    ],
)
def test_a_row_padded_with_placeholders_equals_the_row_without(
    family: str, num_real: int, make_nodes: type, nan_fillers: type
) -> None:
    """Case E18: vllm#55178. A row was padded to K + 1 placeholders and its state saved behind them."""
    model = plain_model(family)
    prompt, mask = left_padded([6, 3], seed=7)
    parents = torch.tensor([(*chain_of_nodes(num_real), *[PADDING] * (7 - num_real)), widths(2, 2)])
    real = parents != PADDING
    token_ids, other_fillers = random_tokens(2, 7, seed=8), random_tokens(2, 7, seed=9)

    def verify_and_commit(policy: type, tokens: Tensor) -> tuple[Tensor, Session]:
        session = Session(model, policy)
        session.prefill(prompt, mask)
        logits = session.extend(tokens, parents)
        session.commit(torch.tensor([num_real - 1, 6]))
        return logits[real], session

    logits, session = verify_and_commit(make_nodes, token_ids)
    text = prompt[0].tolist() + token_ids[0, :num_real].tolist()
    assert_stores_equal_plain_run(session.cache, 0, 0, text, model)
    for policy, tokens in ((make_nodes, torch.where(real, token_ids, other_fillers)), (nan_fillers, token_ids)):
        again, other = verify_and_commit(policy, tokens)
        assert torch.equal(again, logits)
        for row, pads in enumerate((0, 3)):
            stores = zip(*(committed_stores(s.cache, row, pads) for s in (session, other)), strict=True)
            assert all(torch.equal(a, b) for pair in stores for a, b in zip(*pair, strict=True))

    alone = Session(model, make_nodes)
    alone.prefill(prompt[:1], mask[:1])
    own = alone.extend(token_ids[:1, :num_real], parents[:1, :num_real])
    assert relative_error(logits[:num_real], own[0]) <= LOGITS_FLOAT32
    alone.commit(torch.tensor([num_real - 1]))
    stores = zip(committed_stores(session.cache, 0, 0), committed_stores(alone.cache, 0, 0), strict=True)
    assert all(relative_error(a, b) <= STORES_FLOAT32 for pair in stores for a, b in zip(*pair, strict=True))
