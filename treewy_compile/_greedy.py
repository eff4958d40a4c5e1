"""Greedy decoding of a verified tree: what is emitted, and which node is committed.

Plain generation calls Hugging Face's processors and criteria once a token, on the text before it and after it. So does
the walk in here: it follows the target's choices from the root and stops where the tree or the text ends, so that a
rejected token is never seen. Without processors, and with no criteria but length and end-of-sequence tokens, all nodes
are decided at once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation import stopping_criteria as stopping

from treewy._accept import greedy_accept
from treewy.ops import PADDING, path_to_node

# Processors that look at each row by itself and keep nothing between calls.
_ROWWISE = (
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.LogitNormalization,
)


@dataclass(frozen=True)
class Emission:
    """What one round emits.

    Args:
        token_ids: Emitted tokens [B, M], padded to the right.
        num_tokens: How many a row [B]; 0 for a row of padding.
        num_accepted: How many of them were drafted [B]; the rest, at most one, is the bonus token.
        ended: Whether the row ends with them [B].
        node: The node to commit [B]: all that was emitted but the last token, which is the next root; -1 for padding.
    """

    token_ids: Tensor
    num_tokens: Tensor
    num_accepted: Tensor
    ended: Tensor
    node: Tensor


class GreedyDecoding:
    """Decide as plain greedy generation does.

    Args:
        processors: Hugging Face's logits processors.
        criteria: Hugging Face's stopping criteria, the maximum length among them.
        batch: Rows.

    Raises:
        ValueError: If a processor or criterion cannot be applied row by row and there are several rows.
    """

    def __init__(self, processors: LogitsProcessorList, criteria: StoppingCriteriaList, batch: int) -> None:
        self._batch = batch
        self._processors = processors
        self._criteria = criteria
        # by type, not isinstance: a class of the user's own may decide otherwise
        self._max_length = min(c.max_length for c in criteria if type(c) is stopping.MaxLengthCriteria)
        self._eos = [c.eos_token_id for c in criteria if type(c) is stopping.EosTokenCriteria]
        others = [c for c in criteria if type(c) not in (stopping.MaxLengthCriteria, stopping.EosTokenCriteria)]
        self._one_by_one = len(processors) > 0 or len(others) > 0
        if batch > 1:
            for processor in processors:
                if type(processor) not in _ROWWISE:
                    raise ValueError(
                        f"logits processor {type(processor).__name__} may mix rows or count calls, so it cannot be "
                        f"used with a drafter and {batch} rows; generate row by row"
                    )
            for criterion in others:
                if not (type(criterion) in (stopping.MaxTimeCriteria, stopping.StopStringCriteria) and self._eos):
                    raise ValueError(
                        f"stopping criterion {type(criterion).__name__} cannot be used with a drafter and {batch} "
                        "rows: how a row goes on behind it depends on the other rows; generate row by row"
                    )

    def room(self, texts: list[Tensor]) -> Tensor:
        """Return how many tokens each row may still emit [B].

        At least one, like plain generation, which looks at the length after it has emitted.
        """
        return torch.tensor([max(1, self._max_length - len(text)) for text in texts])

    def emit(self, logits: Tensor, token_ids: Tensor, parents: Tensor, texts: list[Tensor]) -> Emission:
        """Follow the target's choices through the tree.

        Args:
            logits: The target's logits [B, N, V] after each node.
            token_ids: Tokens of the nodes, the root (last token of the text) first [B, N].
            parents: Their parents [B, N]; a row whose root is padding emits nothing.
            texts: Each row's text so far, pads included, the root included.
        """
        if self._one_by_one:
            return self._walk(logits, token_ids, parents, texts)
        chosen = logits.float().argmax(dim=-1)
        node = greedy_accept(token_ids, parents, chosen)
        path, length = path_to_node(parents, node)
        bonus = chosen.gather(1, node.clamp(min=0)[:, None])
        on_path = token_ids.gather(1, path.clamp(min=0))
        emitted = on_path.roll(-1, dims=1).scatter(1, (length - 1).clamp(min=0)[:, None], bonus)

        room = self.room(texts).to(length.device)
        count = torch.minimum(length, room)
        ended = count == room
        for eos in self._eos:
            found = torch.isin(emitted, eos.to(emitted.device))
            found &= torch.arange(emitted.shape[1], device=emitted.device) < count[:, None]
            count = torch.where(found.any(dim=1), found.int().argmax(dim=1) + 1, count)
            ended = ended | found.any(dim=1)
        last = path.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
        accepted = torch.minimum(count, length - 1).clamp(min=0)
        longest = max(1, int(count.max()))
        return Emission(emitted[:, :longest], count, accepted, ended, torch.where(count > 0, last, -1))

    def _walk(self, logits: Tensor, token_ids: Tensor, parents: Tensor, texts: list[Tensor]) -> Emission:
        device, host = token_ids.device, texts[0].device  # processors live where the prompt was given
        rows = zip(range(len(texts)), logits.to(host), token_ids.to(host), parents.to(host), texts, strict=True)
        walked = [self._walk_row(*row) for row in rows]
        tokens, accepted, ended, nodes = zip(*walked, strict=True)
        return Emission(
            torch.nn.utils.rnn.pad_sequence(list(tokens), batch_first=True).to(device),
            torch.tensor([len(row) for row in tokens], device=device),
            torch.tensor(accepted, device=device),
            torch.tensor(ended, device=device),
            torch.tensor(nodes, device=device),
        )

    def _walk_row(
        self, row: int, logits: Tensor, token_ids: Tensor, parents: Tensor, text: Tensor
    ) -> tuple[Tensor, int, bool, int]:
        """Return the emitted tokens, how many of them were drafted, whether the row ends, and the node to commit."""
        if int(parents[0]) == PADDING:
            return text[:0], 0, False, -1
        start = len(text)
        reached = torch.zeros_like(parents[:1])  # nodes with this text: several where siblings have the same token
        while True:
            token = self._process(row, text, logits[reached[0]]).argmax(dim=-1, keepdim=True)
            text = torch.cat([text, token])
            ended = bool(self._criteria(text[None], None).all())
            children = (torch.isin(parents, reached) & (token_ids == token)).nonzero()[:, 0]
            if ended or len(children) == 0:
                return text[start:], len(text) - start - (len(children) == 0), ended, int(reached[0])
            reached = children

    def _process(self, row: int, text: Tensor, logits: Tensor) -> Tensor:
        """Return the scores [V] of one row."""
        places = 1
        if any(isinstance(p, logits_process.RepetitionPenaltyLogitsProcessor) for p in self._processors):
            places = self._batch  # it may know the rows' pads by their place, so every place gets this row
        scores: Tensor = self._processors(text.expand(places, -1), logits.to(torch.float32).repeat(places, 1))
        return scores[row % places]
