"""A drafter that knows the target's text and is right and wrong where its script says.

A perfect drafter hides a rollback that is missing, and a random one accepts what it likes. Here each row and round has
a `Proposal`: the shape of the tree, and which of its nodes the target is to accept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from models import VOCAB_SIZE
from treewy import Drafter, DraftTree
from treewy._draft_tree import parents_from_widths
from treewy._greedy import GreedyDecoding
from treewy._nodes import Nodes, WyNodes
from treewy._rounds import Rounds
from treewy._session import Session


@dataclass(frozen=True)
class Proposal:
    """One row's draft in one round, in the numbering of `DraftTree`: the root is not a node."""

    parents: tuple[int, ...]
    accepted: tuple[int, ...]  # the draft nodes to be accepted, first level first


NOTHING = Proposal((), ())


def chain(num_tokens: int, accept: int) -> Proposal:
    """A chain whose first `accept` tokens are right."""
    return Proposal(tuple(range(-1, num_tokens - 1)), tuple(range(accept)))


def tree(widths: Sequence[int], path: Sequence[int]) -> Proposal:
    """A tree whose right path is given as the report of a bug would: breadth first with the root as node 0."""
    assert path[0] == 0
    return Proposal(tuple(parents_from_widths(widths)), tuple(node - 1 for node in path[1:]))


def perfect(num_tokens: int) -> Proposal:
    return chain(num_tokens, num_tokens)


def always_wrong(num_tokens: int) -> Proposal:
    return chain(num_tokens, 0)


class ScriptedDrafter(Drafter):
    """Follow a script.

    Wrong nodes are of two kinds. Beside the right path a node has any token but the right one. Below a wrong node,
    every other node has the token that is right at its depth, which only its ancestors forbid.

    Args:
        continuations: The target's greedy text of each row, the token that prefill chooses first.
        scripts: A sequence of proposals a row, begun anew when it is used up.
    """

    def __init__(self, continuations: Sequence[Sequence[int]], scripts: Sequence[Sequence[Proposal]]) -> None:
        assert len(continuations) == len(scripts)
        self._continuations = [list(row) for row in continuations]
        self._scripts = list(scripts)
        self.reset()

    def reset(self) -> None:
        self._first: list[int] = []  # where each row's continuation begins in its text
        self.planned: list[list[int]] = []  # tokens to be emitted, by round and row
        self.emitted: list[list[int]] = []

    def reorder(self, index: Tensor) -> None:
        for values in (self._continuations, self._scripts, self._first):
            values[:] = [values[i] for i in index.tolist()]

    def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
        if not self._first:
            self._first = [length - 1 for length in lengths.tolist()]
        number = len(self.planned)
        proposals = [script[number % len(script)] for script in self._scripts]
        self.planned.append([len(proposal.accepted) + 1 for proposal in proposals])
        size = max(len(proposal.parents) for proposal in proposals)
        token_ids, parents = torch.zeros(len(proposals), size).long(), torch.full((len(proposals), size), -1)
        for row, proposal in enumerate(proposals):
            coming = self._continuations[row][int(lengths[row]) - self._first[row] :]
            for node, token in enumerate(_tokens_of(proposal, coming, seed=31 * number + row)):
                token_ids[row, node], parents[row, node] = token, proposal.parents[node]
        num_nodes = torch.tensor([len(proposal.parents) for proposal in proposals])
        return DraftTree(token_ids, parents, num_nodes=num_nodes)

    def update(self, token_ids: Tensor, num_tokens: Tensor) -> None:
        self.emitted.append(num_tokens.tolist())

    def assert_followed(self) -> None:
        """Every row emitted what the script planned, until the round in which it ended."""
        for row in range(len(self._scripts)):
            planned, emitted = ([counts[row] for counts in rounds] for rounds in (self.planned, self.emitted))
            last = max((number for number, count in enumerate(emitted) if count > 0), default=0)
            assert emitted[:last] == planned[:last], f"row {row} emitted {emitted}, planned were {planned}"
            assert emitted[last : last + 1] <= planned[last : last + 1]


def _tokens_of(proposal: Proposal, coming: Sequence[int], seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    depth: list[int] = []
    tokens: list[int] = []
    for node, parent in enumerate(proposal.parents):
        depth.append(0 if parent < 0 else depth[parent] + 1)
        any_token = int(torch.randint(VOCAB_SIZE, (), generator=generator))
        if depth[node] >= len(coming):  # behind the known text; a row ends before
            tokens.append(any_token)
            continue
        right = coming[depth[node]]
        wrong = (right + 1 + any_token % (VOCAB_SIZE - 1)) % VOCAB_SIZE
        if node in proposal.accepted:
            tokens.append(right)
        elif parent < 0 or parent in proposal.accepted:
            tokens.append(wrong)
        else:
            tokens.append(right if node % 2 else any_token)
    return tokens


def start_rounds(
    model: PreTrainedModel,
    prompt: Tensor,
    mask: Tensor,
    drafter: Drafter,
    *,
    max_new_tokens: int,
    eos: list[int] | None = None,
    make_nodes: Callable[[], Nodes] = WyNodes,
) -> Rounds:
    """Do what `generate` does before its first round."""
    batch, width = prompt.shape
    criteria = StoppingCriteriaList([MaxLengthCriteria(width + max_new_tokens)])
    if eos is not None:
        criteria.append(EosTokenCriteria(eos))
    session = Session(model, make_nodes)
    logits = session.prefill(prompt, mask)
    decoding = GreedyDecoding(LogitsProcessorList(), criteria, batch)
    drafter.reset()
    rounds = Rounds(session, drafter, decoding, prompt, mask, VOCAB_SIZE, emit=lambda row, token: None)
    rounds.start(logits)
    return rounds
