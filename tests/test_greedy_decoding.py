"""Greedy decoding follows the choices of the target from the root, for all rows at once and row by row."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from treewy._greedy import GreedyDecoding
from treewy.ops import PADDING
from treewy.testing import topologies

VOCAB_SIZE = 3  # so few that siblings often have the same token, and a wrong parent's child the right one
TEXT_LENGTH = 3


@dataclass(frozen=True)
class Verified:
    """Trees that were verified: of each row the tokens, parents and choices of the nodes, the root first."""

    token_ids: tuple[tuple[int, ...], ...]
    parents: tuple[tuple[int, ...], ...]
    chosen: tuple[tuple[int, ...], ...]  # a function of the path, as the target's are
    room: int
    eos: tuple[int, ...]


@st.composite
def verified_trees(draw: st.DrawFn) -> Verified:
    size = draw(st.integers(1, 9))
    rows = []
    for _ in range(draw(st.sampled_from([1, 1, 3]))):
        behind_root = draw(topologies(size - 1)) if size > 1 else ()
        parents = (-1, *(parent if parent == PADDING else parent + 1 for parent in behind_root))
        if draw(st.integers(0, 4)) == 0:  # a row that has ended
            parents = (PADDING,) * size
        tokens = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=size, max_size=size))
        by_path: dict[tuple[int, ...], int] = {}
        chosen = []
        for node in range(size):
            path = tuple(tokens[step] for step in path_to(parents, node))
            if path not in by_path:
                by_path[path] = draw(st.integers(0, VOCAB_SIZE - 1))
            chosen.append(by_path[path])
        rows.append((tuple(tokens), parents, tuple(chosen)))
    token_ids, all_parents, all_chosen = zip(*rows, strict=True)
    eos = draw(st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=1))
    return Verified(token_ids, all_parents, all_chosen, draw(st.integers(1, 6)), tuple(eos))


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def walk(
    tokens: Sequence[int], parents: Sequence[int], chosen: Sequence[int], room: int, eos: Sequence[int]
) -> tuple[list[int], int, bool, int]:
    """One row, token by token: what is emitted, how much of it was drafted, whether the row ends, what is committed."""
    if parents[0] == PADDING:
        return [], 0, False, -1
    reached = [0]
    emitted: list[int] = []
    while True:
        token = chosen[reached[0]]
        emitted.append(token)
        children = [n for n, parent in enumerate(parents) if parent in reached and tokens[n] == token]
        ended = len(emitted) == room or token in eos
        if ended or not children:
            return emitted, len(emitted) - (not children), ended, reached[0]
        reached = children


def unchanged(input_ids: Tensor, scores: Tensor) -> Tensor:
    """A processor that makes the engine go row by row."""
    return scores


@given(verified_trees())
@settings(max_examples=500)
def test_rows_emit_and_commit_what_a_walk_from_the_root_does(case: Verified) -> None:
    criteria = StoppingCriteriaList([MaxLengthCriteria(TEXT_LENGTH + case.room)])
    if case.eos:
        criteria.append(EosTokenCriteria(list(case.eos)))
    token_ids, parents = torch.tensor(case.token_ids), torch.tensor(case.parents)
    logits = torch.nn.functional.one_hot(torch.tensor(case.chosen), VOCAB_SIZE).float()
    texts = [torch.zeros(TEXT_LENGTH, dtype=torch.int64)] * len(token_ids)
    expected = [walk(*row, case.room, case.eos) for row in zip(case.token_ids, case.parents, case.chosen, strict=True)]
    for processors in ([], [unchanged]) if len(token_ids) == 1 else ([],):
        decoding = GreedyDecoding(LogitsProcessorList(processors), criteria, len(token_ids))
        emission = decoding.emit(logits, token_ids, parents, texts, None)
        actual = zip(
            (row[:count] for row, count in zip(emission.token_ids.tolist(), emission.num_tokens.tolist(), strict=True)),
            emission.num_accepted.tolist(),
            emission.ended.tolist(),
            emission.node.tolist(),
            strict=True,
        )
        assert list(actual) == expected
