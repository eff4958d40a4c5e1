"""Write some slots of a pool in place, with a slot a row, when some rows must write nothing.

The pool is passed whole, with a slot a row: a view of one slot would be cloned and copied back under `torch.compile`.
Rows with nothing to commit must not write. The references cannot drop them by a boolean index, since their number would
have to be read on the host, and sending them to slot 0 would race with the row that owns it. So each of them repeats
the write of the first row that does commit: the same bits, to the same place, in any order. When no row commits, all
repeat the write of row 0, which then puts back what is there. A kernel needs none of this: its programs return early.
"""

import torch
from torch import Tensor


def writing_rows(commits: Tensor) -> Tensor:
    """Give each row the row whose write it makes: itself if it commits, else the first that does, else row 0.

    Args:
        commits: `[B]`, bool.

    Returns:
        `[B]`, int64.

    Example:
        >>> writing_rows(torch.tensor([False, True, False, True]))
        tensor([1, 1, 1, 3])
    """
    row = torch.arange(commits.shape[0], device=commits.device)
    return torch.where(commits, row, commits.long().argmax(0))
