"""Histories of trees and accepted nodes, played step by step on a session without a drafter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

import oracle
from models import (
    FAMILIES,
    Stores,
    committed_stores,
    left_padded,
    plain_model,
    random_tokens,
)
from tolerances import STORES_FLOAT32, relative_error
from treewy._nodes import Nodes, WyNodes
from treewy._session import Session
from treewy.ops import PADDING
from treewy.testing import topologies as trees

MakeNodes = Callable[[], Nodes]


# The same examples in every run: these tests are too slow for many, and one of a million may be a near tie.
few = settings(max_examples=15, deadline=None, derandomize=True)


def assert_same_bits(actual: Stores, expected: Stores) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


@dataclass(frozen=True)
class TreeRound:
    parents: tuple[tuple[int, ...], ...]  # of each row
    accepted: tuple[int, ...]


@dataclass(frozen=True)
class History:
    """What to verify and commit, round by round; tokens come from the seed."""

    lengths: tuple[int, ...]
    rounds: tuple[TreeRound, ...]
    family: str = "qwen3_5"
    attention: str = "sdpa"
    seed: int = 0

    @property
    def model(self) -> PreTrainedModel:
        return plain_model(self.family, attention=self.attention)

    @property
    def num_pads(self) -> list[int]:
        return [max(self.lengths) - length for length in self.lengths]

    def token_ids(self, number: int) -> Tensor:
        return random_tokens(len(self.lengths), len(self.rounds[number].parents[0]), seed=self.seed + number + 1)


@st.composite
def histories(
    draw: st.DrawFn,
    *,
    families: Sequence[str] = FAMILIES,
    max_rounds: int = 3,
    padding: bool = True,
    min_batch: int = 1,
) -> History:
    batch = draw(st.integers(min_batch, 3))
    rounds = []
    for _ in range(draw(st.integers(1, max_rounds))):
        size = draw(st.integers(1, 8))
        parents = tuple(draw(trees(size, padding=padding)) for _ in range(batch))
        real = [[-1] + [node for node in range(size) if row[node] != PADDING] for row in parents]
        rounds.append(TreeRound(parents, tuple(draw(st.sampled_from(nodes)) for nodes in real)))
    return History(
        lengths=tuple(draw(st.integers(1, 6)) for _ in range(batch)),
        rounds=tuple(rounds),
        family=draw(st.sampled_from(families)),
        attention=draw(st.sampled_from(["sdpa", "eager"])),
        seed=draw(st.integers(0, 2**30)),
    )


class Replay:
    """Play a history on a session, step by step."""

    def __init__(self, history: History, make_nodes: MakeNodes = WyNodes, row: int | None = None) -> None:
        self.history = history
        self.rows = list(range(len(history.lengths))) if row is None else [row]
        prompt, mask = left_padded(history.lengths, history.seed)
        self.texts = [prompt[r, history.num_pads[r] :].tolist() for r in self.rows]
        self.pads = history.num_pads if row is None else [0]
        first = 0 if row is None else history.num_pads[row]
        self.session = Session(history.model, make_nodes)
        self.session.prefill(prompt[self.rows, first:], mask[self.rows, first:])

    def tree(self, number: int) -> tuple[Tensor, Tensor]:
        """Token ids and parents of a round."""
        parents = torch.tensor(self.history.rounds[number].parents)
        return self.history.token_ids(number)[self.rows], parents[self.rows]

    def commit(self, number: int) -> None:
        token_ids, parents = self.tree(number)
        accepted = [self.history.rounds[number].accepted[row] for row in self.rows]
        before = self.stores()
        self.session.commit(torch.tensor(accepted))
        for row, node in enumerate(accepted):
            self.texts[row] += token_ids[row, oracle.path(parents[row].tolist(), node)].tolist()
            if node < 0:
                assert_same_bits(self.stores()[row], before[row])

    def stores(self) -> list[Stores]:
        return [committed_stores(self.session.cache, row, pads) for row, pads in enumerate(self.pads)]

    def play(self) -> list[Tensor]:
        """Play all rounds and return the logits of the real nodes of each."""
        logits = []
        for number in range(len(self.history.rounds)):
            token_ids, parents = self.tree(number)
            logits.append(self.session.extend(token_ids, parents)[parents != PADDING])
            self.commit(number)
        return logits


def assert_close_stores(actual: list[Stores], expected: list[Stores]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        for pair in zip(ours, theirs, strict=True):
            for a, b in zip(*pair, strict=True):
                assert a.shape == b.shape
                assert relative_error(a, b) <= STORES_FLOAT32


def assert_same_history(replay: Replay, other: Replay) -> None:
    for logits, others in zip(replay.play(), other.play(), strict=True):
        assert torch.equal(logits, others)
    for stores, others in zip(replay.stores(), other.stores(), strict=True):
        assert_same_bits(stores, others)
