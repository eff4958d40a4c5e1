"""Texts that grow: what a round adds is a few operations for all rows, however many there are."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_LEAST_COLUMNS = 64


class Texts(Sequence[Tensor]):
    """Each row's text as plain generation shows it to processors and criteria: the prompt with its pads, and the rest.

    Real tokens lie on the model's device. A row is put together when somebody asks for it; how long it is stands ready.

    Args:
        prompt: Token ids as given, pads included [B, T].
        mask: Nonzero for real tokens [B, T].
        device: Of the model.
    """

    def __init__(self, prompt: Tensor, mask: Tensor, device: torch.device) -> None:
        self._prompt = prompt.clone()  # the caller's own may change meanwhile
        real = [row[of_row.bool()] for row, of_row in zip(prompt.to(device), mask.to(device), strict=True)]
        self._num_real = [len(row) for row in real]  # in the prompt
        self.lengths = [prompt.shape[1]] * len(real)
        """Tokens of each row, pads included."""
        self._counts = torch.tensor(self._num_real, device=device)  # real tokens
        self._tokens = torch.nn.utils.rnn.pad_sequence(real, batch_first=True)
        self._index = torch.arange(self._tokens.shape[1], device=device)

    def __len__(self) -> int:
        """Count rows."""
        return len(self.lengths)

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the text of each row."""
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, row: int) -> Tensor:  # type: ignore[override]  # slices are not needed
        """Return the text of a row, where the prompt was given."""
        start, count = self._num_real[row], self.lengths[row] - self._prompt.shape[1]
        return torch.cat([self._prompt[row], self._tokens[row, start : start + count].to(self._prompt.device)])

    def real_tokens(self) -> tuple[Tensor, Tensor]:
        """Return the real tokens of all rows padded to the right [B, L], and how many each row has [B]."""
        return self._tokens[:, : self._longest].clone(), self._counts.clone()  # who gets them may keep or change them

    def last_tokens(self) -> Tensor:
        """Return the last token of each row [B, 1], on the model's device."""
        return self._tokens.gather(1, self._counts[:, None] - 1)

    def append(self, token_ids: Tensor, num_tokens: Tensor, counts: Sequence[int]) -> None:
        """Add tokens behind each row.

        Args:
            token_ids: Padded to the right [B, M].
            num_tokens: How many of them count [B].
            counts: The same, for the host.
        """
        self._reserve(token_ids.shape[1])
        index = self._index[: token_ids.shape[1]]
        new = torch.where(index < num_tokens[:, None], token_ids, 0)  # what does not count is written over later
        self._tokens.scatter_(1, self._counts[:, None] + index, new)
        self._counts = self._counts + num_tokens
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    @property
    def _longest(self) -> int:
        width = self._prompt.shape[1]
        return max(real + length - width for real, length in zip(self._num_real, self.lengths, strict=True))

    def _reserve(self, columns: int) -> None:
        """Make room for so many columns behind the longest row."""
        missing = self._longest + columns - self._tokens.shape[1]
        if missing > 0:
            self._tokens = torch.nn.functional.pad(self._tokens, (0, max(missing, self._longest, _LEAST_COLUMNS)))
            self._index = torch.arange(self._tokens.shape[1], device=self._tokens.device)
