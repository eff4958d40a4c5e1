"""Hugging Face's logits processors on the logits of nodes, each with the text of its own path."""

import copy
from collections.abc import Callable, Hashable
from functools import cached_property

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

# These look at the scores alone, so that all nodes can be processed at once.
_TEXTLESS = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopHLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
)
# It sets scores where a mask is true, which a CUDA graph may not hold.
_UNTRACEABLE = (logits_process.TopHLogitsWarper,)
# These look at each row's scores and text by themselves and keep nothing between calls.
_ROWWISE = (
    *_TEXTLESS,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.ExponentialDecayLengthPenalty,
)


class Scores:
    """Turn logits into scores.

    Args:
        processors: Hugging Face's logits processors, warpers among them.
        batch: Rows.

    Attributes:
        textless: Whether no processor looks at text.
        traceable: Whether all of them can be part of a compiled round that is captured.
        change_logits: Whether there are processors at all.

    Raises:
        ValueError: If a processor cannot be applied row by row and there are several rows.
    """

    def __init__(self, processors: LogitsProcessorList, batch: int) -> None:
        # by type, not isinstance: a class of the user's own may decide otherwise
        if batch > 1:
            for processor in processors:
                if type(processor) not in _ROWWISE:
                    raise ValueError(
                        f"logits processor {type(processor).__name__} may mix rows or count calls, so it cannot be "
                        f"used with a drafter and {batch} rows; generate row by row"
                    )
        self._processors = processors
        self.textless = all(type(processor) in _TEXTLESS for processor in processors)
        self.traceable = self.textless and not any(type(processor) in _UNTRACEABLE for processor in processors)
        self.change_logits = len(processors) > 0
        self._batch = batch

    @cached_property
    def settings(self) -> Hashable:
        """Types and settings of the processors, if they are traceable: with the same ones, scores are the same."""
        return tuple(
            (type(processor), *((name, _hashable(value)) for name, value in sorted(vars(processor).items())))
            for processor in self._processors
        )

    def copied_to(self, device: torch.device) -> "Scores":
        """Return a copy whose processors are nobody else's and have their tensors on a device."""
        processors = copy.deepcopy(self._processors)
        for processor in processors:
            for name, value in vars(processor).items():
                if isinstance(value, Tensor):
                    setattr(processor, name, value.to(device))
        return Scores(processors, self._batch)

    def for_drafts(self) -> "Scores":
        """Return these scores without processors that might remember what they are shown.

        A draft may be rejected, so no processor with a memory must see it.
        """
        return Scores(LogitsProcessorList(p for p in self._processors if type(p) in _ROWWISE), self._batch)

    def of_row(self, row: int, text: Tensor, logits: Tensor) -> Tensor:
        """Return the scores [V] of one row.

        Args:
            row: Its place in the batch.
            text: Its text so far, pads included.
            logits: Its logits [V].
        """
        places = 1
        if any(isinstance(p, logits_process.RepetitionPenaltyLogitsProcessor) for p in self._processors):
            places = self._batch  # it may know the rows' pads by their place, so every place gets this row
        scores: Tensor = self._processors(text.expand(places, -1), logits.to(torch.float32).repeat(places, 1))
        return scores[row % places]

    def of_nodes(self, logits: Tensor, text: Callable[[int, int], Tensor]) -> Tensor:
        """Return the scores of many nodes a row.

        Args:
            logits: Their logits [B, N, V].
            text: Gives the text of a row and node; asked only if a processor looks at text.
        """
        logits = logits.to(torch.float32, copy=True)  # some processors write in place
        if self.textless:
            scores = logits.flatten(0, 1)
            no_text = scores.new_zeros(len(scores), 1, dtype=torch.int64)
            for processor in self._processors:  # the list itself looks at signatures, which is not traced
                scores = processor(no_text, scores)
            return scores.view(logits.shape)
        rows = [
            torch.stack([self.of_row(row, text(row, node), logits[row, node]) for node in range(logits.shape[1])])
            for row in range(logits.shape[0])
        ]
        return torch.stack(rows)


def no_text(row: int, node: int) -> Tensor:
    """Stand in for the text of a node where no processor looks at it."""
    raise AssertionError("a processor that looks at no text has asked for it")


def _hashable(setting: object) -> Hashable:
    if isinstance(setting, Tensor):
        return tuple(setting.flatten().tolist())
    assert isinstance(setting, Hashable)
    return setting
