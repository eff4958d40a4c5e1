"""The scripted drafter does what its script says, and tells when the engine did not."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import treewy
from models import FAMILIES, VOCAB_SIZE, fresh_model, greedy, left_padded, new_tokens, plain_model
from treewy import DraftTree
from treewy.testing import (
    NOTHING,
    Proposal,
    ScriptedDrafter,
    chain,
    draft_trees,
    proposals,
    scripts,
    topologies,
    tree,
)

TEXT = torch.tensor([[9, 9, 5], [9, 5, 0]])  # prompts of two tokens and one, then a row's first token
LENGTHS = torch.tensor([3, 2])
COMING = [[5, 6, 7, 8, 9], [5, 6, 5, 6, 5]]


def test_right_tokens_stand_where_the_script_says_and_wrong_ones_beside_them() -> None:
    script = [[tree((2, 2), (0, 2, 6))], [chain(3, 1)]]
    drafter = ScriptedDrafter(COMING, script)
    draft = drafter.propose(TEXT, LENGTHS)
    assert draft.num_nodes.tolist() == [6, 3]
    assert draft.parents[0].tolist() == [-1, -1, 0, 0, 1, 1]
    tokens = draft.token_ids.tolist()
    assert (tokens[0][1], tokens[0][5]) == (6, 7)
    assert tokens[0][0] != 6
    assert tokens[0][4] != 7
    assert tokens[1][0] == 6
    assert tokens[1][1] != 5


@given(st.data())
@settings(max_examples=50)
def test_the_target_would_accept_exactly_the_scripted_path(data: st.DataObject) -> None:
    rows = data.draw(scripts(2))
    drafter = ScriptedDrafter(COMING, rows)
    for number in range(5):
        draft = drafter.propose(TEXT, LENGTHS)
        for row, script in enumerate(rows):
            proposal = script[number % len(script)]
            parents = draft.parents[row].tolist()
            size = int(draft.num_nodes[row])
            assert parents[:size] == list(proposal.parents)
            accepted = []
            for node in range(size):
                path = oracle.path(parents, node)
                if draft.token_ids[row, path].tolist() == COMING[row][1 : 1 + len(path)]:
                    accepted.append(node)
            known = len(COMING[row]) - 1  # deeper nodes have any token
            assert [n for n in accepted if len(oracle.path(parents, n)) <= known] == list(proposal.accepted[:known])
        drafter.update(torch.zeros(2, 1).long(), torch.ones(2).long())


def test_all_tokens_are_of_the_continuations_or_0_or_1() -> None:
    drafter = ScriptedDrafter([[7, 7, 7, 7]], [[chain(3, 0), chain(3, 2), chain(6, 6)]])
    for _ in range(6):
        assert set(drafter.propose(TEXT[:1], LENGTHS[:1]).token_ids.flatten().tolist()) <= {0, 1, 7}


def test_a_script_begins_anew_and_reset_begins_it_at_once() -> None:
    drafter = ScriptedDrafter(COMING[:1], [[chain(2, 1), NOTHING]])
    sizes = [drafter.propose(TEXT[:1], LENGTHS[:1]).token_ids.shape[1] for _ in range(3)]
    drafter.reset()
    assert [*sizes, drafter.propose(TEXT[:1], LENGTHS[:1]).token_ids.shape[1]] == [2, 0, 2, 2]


def test_reordered_rows_take_their_script_and_text_with_them() -> None:
    drafter = ScriptedDrafter(COMING, [[chain(2, 2)], [chain(3, 3)]])
    drafter.reorder(torch.tensor([1, 0]))
    draft = drafter.propose(TEXT.flip(0), LENGTHS.flip(0))
    assert draft.num_nodes.tolist() == [3, 2]
    assert draft.token_ids[0].tolist() == [6, 5, 6]
    drafter.reorder(torch.tensor([1, 1]))
    assert drafter.propose(TEXT[[0, 0]], LENGTHS[[0, 0]]).token_ids.tolist() == [[6, 7], [6, 7]]


@pytest.mark.parametrize(
    ("emitted", "message"), [([1, 4], "row 0, round 1: emitted 1"), ([3, 5], "round 2: emitted 5")]
)
def test_a_row_off_its_script_is_told(emitted: list[int], message: str) -> None:
    drafter = ScriptedDrafter(COMING[:1], [[chain(2, 2), chain(3, 3)]])
    for count in emitted:
        drafter.propose(TEXT[:1], LENGTHS[:1])
        drafter.update(torch.zeros(1, count).long(), torch.tensor([count]))
    with pytest.raises(AssertionError, match=message):
        drafter.assert_followed()


def test_the_round_that_ends_a_row_may_emit_fewer_tokens() -> None:
    drafter = ScriptedDrafter(COMING[:1], [[chain(2, 2)]])
    for count in (3, 1, 0, 0):
        drafter.propose(TEXT[:1], LENGTHS[:1])
        drafter.update(torch.zeros(1, count).long(), torch.tensor([count]))
    drafter.assert_followed()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Proposal((-1, 1), ()), "the parent of node 1 is 1"),
        (lambda: Proposal((-2,), ()), "the parent of node 0 is -2"),
        (lambda: Proposal((-1, 0), (1,)), "accepted .1,. is not a path from the root: node 1 of 2 is no child of -1"),
        (lambda: Proposal((-1, -1), (0, 1)), "node 1 of 2 is no child of 0"),
        (lambda: Proposal((-1,), (1,)), "node 1 of 1"),
        (lambda: chain(2, 3), "node 2 of 2"),
        (lambda: tree((2,), (1,)), "must start with 0"),
        (lambda: tree((2,), ()), "must start with 0"),
        (lambda: ScriptedDrafter([[1]], []), "1 continuations but 0 scripts"),
        (lambda: ScriptedDrafter([[1]], [[]]), "a script without proposals"),
    ],
)
def test_a_script_that_makes_no_sense_is_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# --- Strategies


@given(proposals(), topologies(6, padding=False), draft_trees(50, batch=3, max_nodes=5))
def test_what_is_drawn_is_well_formed(proposal: Proposal, parents: tuple[int, ...], draft: DraftTree) -> None:
    Proposal(proposal.parents, proposal.accepted)  # raises otherwise
    assert all(-1 <= parent < node for node, parent in enumerate(parents))
    assert draft.token_ids.shape[0] == 3
    assert draft.token_ids.shape[1] <= 5
    assert ((draft.token_ids >= 0) & (draft.token_ids < 50)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_of_any_tokens_changes_no_token(family: str) -> None:
    model = treewy.compile(fresh_model(family))
    prompt, mask = left_padded([3, 7], seed=6)
    expected = greedy(plain_model(family), prompt, mask, 6)

    class Drawing(treewy.Drafter):
        def __init__(self, drafts: list[DraftTree]) -> None:
            self.drafts = drafts

        def propose(self, input_ids: torch.Tensor, lengths: torch.Tensor) -> DraftTree:
            self.drafts = [*self.drafts[1:], self.drafts[0]]
            return self.drafts[0]

    @settings(max_examples=15)
    @given(st.lists(draft_trees(VOCAB_SIZE, batch=2), min_size=1, max_size=3))
    def check(drafts: list[DraftTree]) -> None:
        text = model.generate(prompt, attention_mask=mask, max_new_tokens=6, do_sample=False, drafter=Drawing(drafts))
        assert torch.equal(text, expected)

    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_any_script_is_followed(family: str) -> None:
    model = treewy.compile(fresh_model(family))
    prompt, mask = left_padded([3, 7], seed=6)
    continuations = new_tokens(plain_model(family), prompt, mask, 10)

    @settings(max_examples=15)
    @given(scripts(2))
    def check(rows: list[list[Proposal]]) -> None:
        drafter = ScriptedDrafter(continuations, rows)
        text = model.generate(prompt, attention_mask=mask, max_new_tokens=10, do_sample=False, drafter=drafter)
        assert text[:, prompt.shape[1] :].tolist() == continuations
        drafter.assert_followed()

    check()


def run_without_hypothesis(statement: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.modules['hypothesis'] = None\n{statement}"
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)


def test_without_hypothesis_the_strategies_say_what_to_install() -> None:
    run = run_without_hypothesis("import treewy.testing; treewy.testing.topologies")
    assert run.returncode != 0
    assert "ImportError: the strategies of treewy.testing need Hypothesis; pip install hypothesis" in run.stderr


def test_without_hypothesis_all_else_imports() -> None:
    strategies = {"draft_trees", "op_cases", "proposals", "scripts", "topologies"}
    run = run_without_hypothesis(
        f"import treewy.testing as t\nfor name in set(t.__all__) - {strategies}: getattr(t, name)"
    )
    assert run.returncode == 0, run.stderr


def test_every_name_that_testing_exports_resolves_and_is_listed() -> None:
    for name in treewy.testing.__all__:
        assert getattr(treewy.testing, name) is not None
        assert name in dir(treewy.testing)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        treewy.testing.nonsense  # noqa: B018


def test_a_script_is_not_followed_if_nothing_was_reported() -> None:
    drafter = ScriptedDrafter([[3, 4, 5]], [[chain(2, 2)]])
    drafter.propose(torch.tensor([[1, 3]]), torch.tensor([2]))
    with pytest.raises(AssertionError, match="1 drafts were made, but 0 rounds reported"):
        drafter.assert_followed()
