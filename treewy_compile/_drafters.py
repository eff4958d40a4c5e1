"""Who proposes: the protocol, and the drafter that looks the continuation up in the text itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from treewy._draft_tree import DraftTree
from treewy._scores import Scores
from treewy._session import Session


@dataclass(frozen=True)
class DraftingContext:
    """What a drafter may want to know of the generation that it drafts for.

    Args:
        scores: The target's logits processors without those that have a memory: ``scores.of_nodes(logits, text)`` turns
            a draft model's logits into what drafts should be drawn from.
        do_sample: Whether the target samples.
        generator: Source of randomness; None for PyTorch's own.
        pads: What stands before each row's text in the prompt; processors see it.
        max_length: Of a text, in tokens; what cannot be emitted before it need not be drafted.
        vocab_size: Of the target.
        open_session: Makes the stores of a draft model, which runs as the target does: called with the model and the
            most nodes that it will be given in a round. They are closed when the generation ends.

    Source:
        The draft phase of docs/design.md.
    """

    scores: Scores
    do_sample: bool
    generator: torch.Generator | None
    pads: list[Tensor]
    max_length: int
    vocab_size: int
    open_session: Callable[[PreTrainedModel, int], Session]


@runtime_checkable
class Drafter(Protocol):
    """Propose tokens for the target to verify: ``generate(..., drafter=MyDrafter())``.

    A class that derives from this one need only write ``propose``.

    ``generate`` calls ``reset`` once, then ``propose`` and ``update`` in turn, once a round. A drafter must propose for
    every row, also for rows that have ended; a row that has nothing to propose gets ``num_nodes`` 0. Rows are shown
    without their pads. ``reorder`` is for callers that move rows between rounds; ``generate`` does not.

    A drafter may also have a method ``prepare(context: DraftingContext)``, which is called after ``reset``: one that
    draws at random needs the generator and the target's processors from there. A drafter that wraps another one must
    pass it on.

    Example:
        One that draws two tokens a round, whatever the text:

        >>> class Uniform(Drafter):
        ...     def prepare(self, context: DraftingContext) -> None:
        ...         self.context = context
        ...
        ...     def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
        ...         q = torch.full((len(lengths), 1, self.context.vocab_size), 1 / self.context.vocab_size)
        ...         tokens = q[:, 0].multinomial(2, generator=self.context.generator)  # without replacement
        ...         return DraftTree(tokens, torch.tensor([-1, -1]), draft_probs=q, sampling="without_replacement")

    Source:
        The draft, verify, accept and commit phases of docs/design.md.
    """

    def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
        """Propose a tree a row.

        Args:
            input_ids: Prompt and emitted tokens [B, T], padded to the right.
            lengths: Real tokens a row [B].

        Returns:
            The trees, on the device of ``input_ids``.
        """

    def update(self, token_ids: Tensor, num_tokens: Tensor) -> None:
        """Learn what was emitted in this round.

        Args:
            token_ids: Emitted tokens [B, M], the bonus token last, padded to the right.
            num_tokens: How many a row [B]; 0 for a row that has ended.
        """

    def reset(self) -> None:
        """Forget the previous text."""

    def reorder(self, index: Tensor) -> None:
        """Let row ``i`` continue what row ``index[i]`` was; ``index`` [B]."""


class PromptLookupDrafter:
    """Propose what followed the last few tokens when they occurred before.

    The longest suffix of at most ``max_ngram_size`` tokens that occurs earlier in the row is looked up, and the tokens
    behind its most recent earlier occurrence are proposed as a chain.

    Args:
        num_tokens: Tokens to propose.
        max_ngram_size: Longest suffix to look up, in tokens.

    Raises:
        ValueError: If a number is not positive.

    Example:
        >>> drafter = PromptLookupDrafter(2)
        >>> drafter.propose(torch.tensor([[1, 2, 3, 4, 1, 2]]), torch.tensor([6])).token_ids.tolist()
        [[3, 4]]

    Source:
        Prompt lookup decoding (Saxena, 2023).
    """

    def __init__(self, num_tokens: int, max_ngram_size: int = 2) -> None:
        for name, value in (("num_tokens", num_tokens), ("max_ngram_size", max_ngram_size)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1, an integer")
        self._num_tokens = num_tokens
        self._max_ngram_size = max_ngram_size

    def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
        """Propose a chain a row, empty where no suffix occurs earlier."""
        chains = [self._look_up(row[:length]) for row, length in zip(input_ids.tolist(), lengths.tolist(), strict=True)]
        size = max(len(chain) for chain in chains)
        padded = [chain + [0] * (size - len(chain)) for chain in chains]
        device = input_ids.device
        return DraftTree(
            torch.tensor(padded, dtype=torch.int64, device=device),
            torch.arange(-1, size - 1, device=device),
            num_nodes=torch.tensor([len(chain) for chain in chains], device=device),
        )

    def update(self, token_ids: Tensor, num_tokens: Tensor) -> None:
        """Do nothing: the text itself is the memory."""

    def reset(self) -> None:
        """Do nothing: the text itself is the memory."""

    def reorder(self, index: Tensor) -> None:
        """Do nothing: the text itself is the memory."""

    def _look_up(self, tokens: list[int]) -> list[int]:
        for size in range(min(self._max_ngram_size, len(tokens) - 1), 0, -1):
            suffix = tokens[-size:]
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == suffix:
                    return tokens[start + size : start + size + self._num_tokens]
        return []
