"""Where an accepted path has to end."""

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation import stopping_criteria as hf


class Stopping:
    """Cut what was accepted at the first token after which plain generation would stop.

    Maximum length and end-of-sequence tokens are checked for all tokens at once, every other criterion token by token,
    each on the text that plain generation would have shown it.

    Args:
        criteria: Hugging Face's criteria, the maximum length among them.
        batch: Rows.

    Raises:
        ValueError: If a criterion cannot be applied row by row and there are several rows.
    """

    def __init__(self, criteria: StoppingCriteriaList, batch: int) -> None:
        self.max_length = criteria.max_length
        self._eos = [c.eos_token_id for c in criteria if isinstance(c, hf.EosTokenCriteria)]
        self._others = StoppingCriteriaList(
            c for c in criteria if not isinstance(c, hf.MaxLengthCriteria | hf.EosTokenCriteria)
        )
        for criterion in self._others:
            if batch > 1 and not (isinstance(criterion, hf.MaxTimeCriteria | hf.StopStringCriteria) and self._eos):
                raise ValueError(
                    f"stopping criterion {type(criterion).__name__} cannot be used with a drafter and {batch} rows: "
                    "how a row goes on behind it depends on the other rows; generate row by row"
                )

    def cut(self, token_ids: Tensor, num_tokens: Tensor, texts: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Shorten what was accepted.

        Args:
            token_ids: Accepted tokens [B, M], padded to the right.
            num_tokens: How many a row [B].
            texts: Each row's text before them.

        Returns:
            Tokens to emit a row [B], and whether the row ends with them [B].
        """
        lengths = torch.tensor([len(text) for text in texts], device=num_tokens.device)
        budget = self.max_length - lengths
        kept = torch.minimum(num_tokens, budget)
        ended = kept == budget
        for eos in self._eos:
            found = torch.isin(token_ids, eos.to(token_ids.device))
            found &= torch.arange(token_ids.shape[1], device=token_ids.device) < kept[:, None]
            kept = torch.where(found.any(dim=1), found.int().argmax(dim=1) + 1, kept)
            ended = ended | found.any(dim=1)
        if self._others:
            for row, text in enumerate(texts):
                for count in range(1, int(kept[row]) + 1):
                    so_far = torch.cat([text, token_ids[row, :count]])
                    if bool(self._others(so_far[None], None).any()):
                        kept[row], ended[row] = count, True
                        break
        return kept, ended
