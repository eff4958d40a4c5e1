"""Greedy choice of the next token, with Hugging Face's logits processors."""

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from treewy._accept import greedy_accept
from treewy.ops import PADDING

# Processors that look at each row by itself and keep nothing between calls.
_ROWWISE = (
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.ExponentialDecayLengthPenalty,
)


class GreedyChoice:
    """Choose tokens as plain greedy generation does.

    A processor sees each accepted token's own path, in order, and never a rejected one: with processors the tree is
    walked from the root, and only the node that was reached is processed.

    Args:
        processors: Hugging Face's processors.
        batch: Rows.

    Raises:
        ValueError: If a processor cannot be applied row by row and there are several rows.
    """

    def __init__(self, processors: LogitsProcessorList, batch: int) -> None:
        for processor in processors:
            if batch > 1 and not isinstance(processor, _ROWWISE):
                raise ValueError(
                    f"logits processor {type(processor).__name__} may mix rows or count calls, so it cannot be used "
                    f"with a drafter and {batch} rows; generate row by row"
                )
        self._processors = processors

    def first(self, logits: Tensor, texts: list[Tensor]) -> Tensor:
        """Choose the token [B] after the prompt, given its logits [B, V] and each row's text so far."""
        return torch.stack([self._choose(row, text) for row, text in zip(logits, texts, strict=True)])

    def accept(self, logits: Tensor, token_ids: Tensor, parents: Tensor, texts: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Find the accepted node and the bonus token behind it.

        Args:
            logits: The target's logits [B, N, V] after each node.
            token_ids: Tokens of the nodes, the root (last emitted token) first [B, N].
            parents: Their parents [B, N].
            texts: Each row's prompt and emitted tokens, the root included.

        Returns:
            Accepted node [B] (0 the root, -1 for a row of padding) and bonus token [B].
        """
        if not self._processors:
            chosen = logits.float().argmax(dim=-1)
            node = greedy_accept(token_ids, parents, chosen)
            return node, chosen.gather(1, node.clamp(min=0)[:, None])[:, 0]
        walked = [self._walk(*row) for row in zip(logits, token_ids, parents, texts, strict=True)]
        nodes, tokens = zip(*walked, strict=True)
        return torch.tensor(nodes, device=logits.device), torch.tensor(tokens, device=logits.device)

    def _walk(self, logits: Tensor, token_ids: Tensor, parents: Tensor, text: Tensor) -> tuple[int, int]:
        if int(parents[0]) == PADDING:
            return -1, 0
        node = 0
        while True:
            token = self._choose(logits[node], text)
            child = ((parents == node) & (token_ids == token)).nonzero()
            if len(child) == 0:
                return node, int(token)
            node = int(child[0])
            text = torch.cat([text, token[None]])

    def _choose(self, logits: Tensor, text: Tensor) -> Tensor:
        scores: Tensor = self._processors(text[None], logits[None].float().clone())
        return scores.argmax(dim=-1)[0]
