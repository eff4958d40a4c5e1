"""A drafter that knows the target's text and is right and wrong where its script says."""

from collections.abc import Sequence

import torch
from torch import Tensor

from treewy._draft_tree import DraftTree
from treewy._drafters import Drafter
from treewy.testing._proposals import Proposal


class ScriptedDrafter(Drafter):
    """Propose what a script says, so that a test sets the acceptance of every row in every round.

    A perfect drafter hides a rollback that is missing, and a random one accepts what it likes. A script has rounds that
    accept all, a part and nothing, and rounds without a draft between them.

    Wrong nodes are of two kinds. Beside the right path a node has any token but the right one. Below a wrong node,
    every other node has the token that is right at its depth, which only its ancestors forbid. All tokens come from the
    continuations, with 0 and 1 beside them.

    Args:
        continuations: The target's greedy text of each row, the token that prefill chooses first.
        scripts: Proposals of each row, round by round, begun anew when they are used up.

    Raises:
        ValueError: If the rows of both differ in number, or a script is empty.

    Example:
        >>> drafter = ScriptedDrafter([[7, 8, 9, 7]], [[Proposal((-1, 0), (0, 1))]])
        >>> text = torch.tensor([[3, 5, 7]])  # a prompt and the token that prefill chose
        >>> drafter.propose(text, torch.tensor([3])).token_ids.tolist()
        [[8, 9]]

    Source:
        The ``Drafter`` protocol of :class:`treewy.Drafter`.
    """

    def __init__(self, continuations: Sequence[Sequence[int]], scripts: Sequence[Sequence[Proposal]]) -> None:
        if len(continuations) != len(scripts):
            raise ValueError(f"{len(continuations)} continuations but {len(scripts)} scripts; pass one of each a row")
        if any(len(script) == 0 for script in scripts):
            raise ValueError("a script without proposals cannot be begun anew; use [NOTHING] for rounds without drafts")
        self._continuations = [list(row) for row in continuations]
        self._scripts = list(scripts)
        self._alphabet = sorted({0, 1}.union(*self._continuations))
        self.reset()

    def reset(self) -> None:
        """Begin all scripts anew."""
        self._first: list[int] = []  # where each row's continuation begins in its text
        self.planned: list[list[int]] = []  # tokens to be emitted, by round and row
        self.emitted: list[list[int]] = []

    def reorder(self, index: Tensor) -> None:
        """Let row ``i`` continue what row ``index[i]`` was."""
        order: list[int] = index.tolist()
        self._continuations = [self._continuations[row] for row in order]
        self._scripts = [self._scripts[row] for row in order]
        self._first = [self._first[row] for row in order] if self._first else []

    def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
        """Propose each row's next entry of its script."""
        counts: list[int] = lengths.tolist()
        if not self._first:
            self._first = [count - 1 for count in counts]
        number = len(self.planned)
        proposals = [script[number % len(script)] for script in self._scripts]
        self.planned.append([proposal.num_tokens for proposal in proposals])
        size = max(len(proposal.parents) for proposal in proposals)
        token_ids, parents = torch.zeros(len(proposals), size).long(), torch.full((len(proposals), size), -1)
        for row, proposal in enumerate(proposals):
            coming = self._continuations[row][counts[row] - self._first[row] :]
            for node, token in enumerate(self._tokens_of(proposal, coming, seed=31 * number + row)):
                token_ids[row, node], parents[row, node] = token, proposal.parents[node]
        num_nodes = torch.tensor([len(proposal.parents) for proposal in proposals])
        device = input_ids.device
        return DraftTree(token_ids.to(device), parents.to(device), num_nodes=num_nodes.to(device))

    def update(self, token_ids: Tensor, num_tokens: Tensor) -> None:
        """Note how many tokens each row emitted."""
        self.emitted.append(num_tokens.tolist())

    def deviation(self, row: int) -> str | None:
        """Describe the first round in which a row emitted another number of tokens than planned; None if there is none.

        The round in which the row ended may emit fewer.
        """
        emitted = [counts[row] for counts in self.emitted]
        last = max((number for number, count in enumerate(emitted) if count > 0), default=-1)
        for number, count in enumerate(emitted[: last + 1]):
            planned = self.planned[number][row]
            if count > planned or (count < planned and number < last):
                return f"round {number + 1}: emitted {count} tokens, the script has {planned}"
        return None

    def assert_followed(self) -> None:
        """Raise an ``AssertionError`` unless every row emitted what its script planned."""
        if len(self.emitted) != len(self.planned):
            raise AssertionError(f"{len(self.planned)} drafts were made, but {len(self.emitted)} rounds reported")
        for row in range(len(self._scripts)):
            if (deviation := self.deviation(row)) is not None:
                raise AssertionError(f"row {row}, {deviation}")

    def _tokens_of(self, proposal: Proposal, coming: Sequence[int], seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        depth: list[int] = []
        tokens: list[int] = []
        for node, parent in enumerate(proposal.parents):
            depth.append(0 if parent < 0 else depth[parent] + 1)
            drawn = int(torch.randint(len(self._alphabet), (), generator=generator))
            any_token = self._alphabet[drawn]
            if depth[node] >= len(coming):  # behind the known text; a row ends before
                tokens.append(any_token)
                continue
            right = coming[depth[node]]
            if node in proposal.accepted:
                tokens.append(right)
            elif parent < 0 or parent in proposal.accepted:
                others = [token for token in self._alphabet if token != right]
                tokens.append(others[drawn % len(others)])
            else:
                tokens.append(right if node % 2 else any_token)
        return tokens
