"""One text's drafts, each tree a launch: what the host knows of it."""

from collections.abc import Callable
from itertools import accumulate
from typing import NoReturn

import torch
from torch import Tensor

from treewy._compiled_session import CompiledSession
from treewy._draft_tree import DraftTree
from treewy._whole_draft import Levels, WholeDraft


class DraftingOnDevice:
    """Draft the most probable trees of one shape behind what a session has committed.

    Args:
        session: Of the draft model, after its prefill of all tokens but the last.
        levels: Shape of the trees; of each level the parents of its nodes and their ranks among siblings.
        vocab_size: Of the target.
        draft_vocab_size: Of the draft model.
        seen: Real tokens that are committed [B].
        last_tokens: Those behind them [B].
        device: Where the target wants its drafts.
    """

    def __init__(
        self,
        session: CompiledSession,
        levels: Levels,
        vocab_size: int,
        draft_vocab_size: int,
        seen: Tensor,
        last_tokens: Tensor,
        device: torch.device,
    ) -> None:
        self._session = session
        self._pads = session.cache.lengths - seen
        self._most_pads = int(self._pads.max())
        self._columns = session.cache.columns_used  # at least as many as any row has
        parents = [parent for level, _ in levels for parent in level]
        self._num_nodes = WholeDraft.num_nodes(levels)
        forward = session.reserve(self._columns, self._num_nodes)
        self._whole = forward.whole_draft(levels, vocab_size, draft_vocab_size)
        self._whole.start(last_tokens)
        shape = torch.tensor(parents, device=device)
        self._tree = DraftTree(shape.new_zeros(len(seen), len(parents)), shape)
        self._level_ends = tuple(accumulate(len(level) for level, _ in levels))
        self._invalid = torch.zeros_like(seen, dtype=torch.bool)
        self._lengths = [number + 1 for number in seen.tolist()]  # of the texts
        self._has_proposed = False  # what is not answered yet

    def follows(self, lengths: Tensor) -> bool:
        """Tell whether these are the lengths [B] of the texts that it knows of, and whether its drafts were answered.

        Somebody who asks several drafters may leave rounds to another one, or their outcome untold.
        """
        return not self._has_proposed and lengths.tolist() == self._lengths

    def propose(self, longest: int) -> DraftTree:
        """Return the trees behind texts, the longest of which has so many tokens."""
        self._has_proposed = True
        self._columns = min(self._columns, longest + self._most_pads)
        self._session.reserve(self._columns, self._num_nodes)
        token_ids, self._invalid = self._whole.propose()
        return self._tree.with_token_ids(token_ids.to(self._tree.parents.device), self._level_ends)

    def update(self, token_ids: Tensor, num_tokens: Tensor, refuse_nan: Callable[[], NoReturn]) -> bool:
        """Learn what was emitted; return False, having learned nothing, if it answers no draft of here.

        Args:
            token_ids: Padded to the right [B, M].
            num_tokens: How many of them count [B].
            refuse_nan: Called to raise if the last drafts came from logits that are NaN.
        """
        invalid, counts = torch.stack([self._invalid.long(), num_tokens]).tolist()  # the device is idle: nothing waits
        if any(invalid):
            refuse_nan()
        if not self._has_proposed or token_ids.shape[1] > self._whole.most_pending:
            return False
        self._has_proposed = False
        self._lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        self._whole.settle(token_ids, num_tokens)
        self._columns += token_ids.shape[1]
        return True

    def leave(self) -> Tensor:
        """Let others go on with the session; return how many real tokens it has committed [B]."""
        self._session.follow()
        return self._session.cache.lengths - self._pads

    def reorder(self, index: Tensor) -> None:
        """Let row ``i`` continue what row ``index[i]`` was; between rounds."""
        self._session.follow()
        self._session.reorder(index)
        self._whole.reorder(index)
        self._pads, self._lengths = self._pads[index], [self._lengths[row] for row in index.tolist()]
