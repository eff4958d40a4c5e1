"""After every round the three stores of every layer are those of a token-by-token run of the plain model.

GDN state, convolution window and attention keys and values follow different rules, and most public faults are one of
the three forgotten. The text may still look right for a while, so the stores themselves are compared here.
"""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import oracle
from models import (
    ATTENTION_ONLY,
    FAMILIES,
    POLICIES,
    PREDICTABLE,
    VARIANTS,
    assert_stores_equal_plain_run,
    committed_state,
    draft_with_embeddings_of,
    left_padded,
    noisy_copy,
    plain_model,
)
from replay import MakeNodes, few
from scripted import start_rounds
from scripted_stores import MIXED, Script, StoresFollow, play_script, scripts
from tolerances import STATE_AFTER_ROUNDS, relative_error
from treewy import AssistantDrafter
from treewy._nodes import Nodes
from treewy._rounds import Rounds

"""Rows that accept everything, nothing and parts in the same round."""


@pytest.mark.parametrize("make_nodes", POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_stores_equal_a_token_by_token_run_after_every_round(family: str, make_nodes: MakeNodes) -> None:
    @few
    @given(scripts(), st.integers(0, 2), st.integers(0, 2), st.sampled_from(["sdpa", "eager"]))
    def check(script: Script, num_pads: int, num_eos: int, attention: str) -> None:
        model = plain_model(family, attention=attention)
        after_round = StoresFollow(model, script.lengths, num_pads)
        play_script(model, script, after_round, make_nodes=make_nodes, num_pads=num_pads, num_eos=num_eos)

    check()


@pytest.mark.parametrize("make_nodes", POLICIES)
@pytest.mark.parametrize("family", FAMILIES + VARIANTS + ATTENTION_ONLY)
def test_stores_follow_for_forty_tokens_of_rows_that_accept_differently(family: str, make_nodes: MakeNodes) -> None:
    model = plain_model(family)
    after_round = StoresFollow(model, MIXED.lengths, num_pads=2)
    drafter = play_script(model, MIXED, after_round, make_nodes=make_nodes, num_pads=2, max_new_tokens=40)
    accepted = {(row, count - 1) for counts in drafter.emitted for row, count in enumerate(counts) if count}
    assert accepted >= {(0, 0), (0, 1), (0, 3), (1, 0), (1, 1), (1, 2), (2, 0), (2, 6)}


class Float64States:
    """Make nodes that also take every committed token one by one in float64, from the same inputs of the rule."""

    def __init__(self, make_nodes: MakeNodes) -> None:
        self.make_nodes = make_nodes
        self.states: dict[int, Tensor] = {}  # by address of the committed state

    def __call__(self) -> Nodes:
        return _Float64Nodes(self.make_nodes(), self.states)


@dataclass
class _Float64Nodes(Nodes):
    nodes: Nodes
    states: dict[int, Tensor]
    inputs: list[tuple[Tensor, ...]] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return self.nodes.num_bytes

    def add_columns(self, window: Tensor, columns: Tensor, parents: Tensor) -> Tensor:
        return self.nodes.add_columns(window, columns, parents)

    def solve(self, state: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Tensor:
        log_decay, beta, _, qk_l2norm = rest
        assert qk_l2norm
        self.inputs.append((value, query, key, log_decay, beta))
        return self.nodes.solve(state, query, key, value, *rest)

    def commit_(self, state: Tensor, window: Tensor, parents: Tensor, accepted_node: Tensor) -> None:
        exact = self.states.setdefault(state.data_ptr(), state.double())
        inputs = [torch.cat(parts, dim=1) for parts in zip(*self.inputs, strict=True)]
        for row, node in enumerate(accepted_node.tolist()):
            path = oracle.path(parents[row].tolist(), node)
            if path:
                exact[row] = _recurrence([part[row : row + 1, path] for part in inputs], exact[row : row + 1])
        self.nodes.commit_(state, window, parents, accepted_node)
        self.inputs.clear()

    def materialize_(self, state: Tensor) -> None:
        self.nodes.materialize_(state)


def _recurrence(inputs: list[Tensor], state: Tensor) -> Tensor:
    value, _, key, log_decay, _ = inputs
    parents = torch.arange(-1, value.shape[1] - 1)[None]
    no_prefix = (value[:, :0], key[:, :0], log_decay[:, :0], torch.zeros(1, value.shape[1], 0, dtype=torch.bool))
    states = oracle.solve(*inputs, state, parents, *no_prefix, 1.0, True)[-1]
    return states[0][value.shape[1] - 1]


@pytest.mark.parametrize("make_nodes", POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_states_equal_a_float64_recurrence_over_what_was_accepted(family: str, make_nodes: MakeNodes) -> None:
    exact = Float64States(make_nodes)

    def compare(rounds: Rounds) -> None:
        for layer in rounds.session.cache.state_layers:
            expected = exact.states.get(layer.state.data_ptr(), layer.state)
            for row, state in enumerate(committed_state(layer)):
                assert relative_error(state, expected[row]) <= STATE_AFTER_ROUNDS

    play_script(plain_model(family), MIXED, compare, make_nodes=exact, max_new_tokens=40)
    assert len(exact.states) == 2


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2), (3, 1, 1)])
@pytest.mark.parametrize("kind", ["GDN", "attention only"])
def test_stores_of_the_draft_model_follow_what_was_emitted(kind: str, shape: tuple[int, ...]) -> None:
    mixing = 1.0 if kind == "GDN" else PREDICTABLE
    target = plain_model("qwen3_next", mixing=mixing)
    draft = noisy_copy(target, 0.05) if kind == "GDN" else draft_with_embeddings_of(target, mixing=mixing)
    drafter = AssistantDrafter(draft, shape)
    lengths = [4, 1, 9]
    prompt, mask = left_padded(lengths, seed=3)
    rounds = start_rounds(target, prompt, mask, drafter, max_new_tokens=24)
    emitted: list[int] = []
    while not rounds.all_ended:
        before = rounds.texts.lengths
        rounds.step()
        emitted += [after - length for after, length in zip(rounds.texts.lengths, before, strict=True)]
        assert drafter._session is not None
        seen = drafter._seen.tolist()
        for row, length in enumerate(lengths):
            tokens = rounds.texts[row][max(lengths) - length :].tolist()
            pads = max(lengths) - length  # both have one emitted token before the first proposal
            assert_stores_equal_plain_run(drafter._session.cache, row, pads, tokens[: seen[row]], draft)
    assert {1, 2} < set(emitted)  # nothing, a part and more were accepted
