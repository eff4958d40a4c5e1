"""Greedy decoding follows the choices of the target from the root, for all rows at once and row by row."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from treewy._greedy import GreedyDecoding, greedy_paths
from treewy._texts import Texts
from treewy.ops import PADDING

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


def draw_trees(rng: random.Random) -> Verified:
    size = rng.randint(1, 9)
    rows = []
    for _ in range(rng.choice([1, 1, 3])):
        parents = [-1]
        for _ in range(size - 1):
            real = [node for node, parent in enumerate(parents) if parent != PADDING]
            parents.append(rng.choice([*real, *real, PADDING]))
        if rng.random() < 0.1:  # a row that has ended
            parents = [PADDING] * size
        tokens = [rng.randrange(VOCAB_SIZE) for _ in range(size)]
        by_path: dict[tuple[int, ...], int] = {}
        chosen = [
            by_path.setdefault(tuple(tokens[step] for step in path_to(parents, node)), rng.randrange(VOCAB_SIZE))
            for node in range(size)
        ]
        rows.append((tuple(tokens), tuple(parents), tuple(chosen)))
    eos = tuple(token for token in range(VOCAB_SIZE) if rng.random() < 0.15)
    return Verified(*zip(*rows, strict=True), rng.randint(1, 6), eos)


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


def test_rows_emit_and_commit_what_a_walk_from_the_root_does() -> None:
    rng = random.Random(0)
    through_second_sibling = 0
    for _ in range(2000):
        case = draw_trees(rng)
        rows = list(zip(case.token_ids, case.parents, case.chosen, strict=True))
        expected = [walk(*row, case.room, case.eos) for row in rows]
        through_second_sibling += len(rows) == 1 and any(goes_through_a_second_sibling(*rows[0], expected[0][3]))
        for emission in emissions(case):
            assert [texts[:3] for texts in emission] == [texts[:3] for texts in expected]
            # of nodes with the same text either may be committed
            for (tokens, parents, _), *nodes in zip(
                rows, *([row[3] for row in x] for x in (emission, expected)), strict=True
            ):
                assert len({tuple(tokens[step] for step in path_to(parents, node)) for node in nodes}) == 1
    assert through_second_sibling > 10, through_second_sibling


def emissions(case: Verified) -> Iterator[list[tuple[list[int], int, bool, int]]]:
    """What the engine does with all rows at once, and with a row by itself if it is alone."""
    criteria = StoppingCriteriaList([MaxLengthCriteria(TEXT_LENGTH + case.room)])
    if case.eos:
        criteria.append(EosTokenCriteria(list(case.eos)))
    logits = torch.nn.functional.one_hot(torch.tensor(case.chosen), VOCAB_SIZE).float()
    text = torch.zeros(len(case.parents), TEXT_LENGTH, dtype=torch.int64)
    texts = Texts(text, torch.ones_like(text), text.device)
    for processors in ([], [unchanged]) if len(case.parents) == 1 else ([],):
        decoding = GreedyDecoding(LogitsProcessorList(processors), criteria, len(case.parents))
        emission = decoding.emit(logits, torch.tensor(case.token_ids), torch.tensor(case.parents), texts, None)
        counts = emission.num_tokens.tolist()
        tokens = [row[:count] for row, count in zip(emission.token_ids.tolist(), counts, strict=True)]
        others = (emission.num_accepted.tolist(), emission.ended.tolist(), emission.node.tolist())
        yield list(zip(tokens, *others, strict=True))


def goes_through_a_second_sibling(
    tokens: Sequence[int], parents: Sequence[int], chosen: Sequence[int], node: int
) -> Iterator[bool]:
    """For each step to a node, whether the parent has an earlier child with the same token."""
    for step in path_to(parents, node) if node >= 0 else []:
        yield any(parents[n] == parents[step] and tokens[n] == tokens[step] for n in range(step))


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 640])
def test_the_first_of_the_greatest_scores_is_taken(vocab_size: int) -> None:
    """Also where a vocabulary is looked through in parts, and where most scores are equal."""
    generator = torch.Generator().manual_seed(vocab_size)
    scores = torch.randint(0, 3, (40, 1, vocab_size), generator=generator).float()
    scores[1] = float("-inf")
    token_ids, parents = torch.zeros(40, 1, dtype=torch.int64), torch.full((40, 1), -1)
    node, token = greedy_paths(scores, token_ids, parents)
    assert torch.equal(node, torch.zeros(40, dtype=torch.int64))
    assert torch.equal(token, scores[:, 0].argmax(dim=-1))
