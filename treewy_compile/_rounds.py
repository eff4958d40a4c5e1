"""The round: draft, verify, accept, commit."""

from collections.abc import Callable

import torch
from torch import Tensor

from treewy._draft_tree import DraftTree
from treewy._drafters import Drafter
from treewy._greedy import GreedyChoice
from treewy._session import Session, pad_parents
from treewy._stats import StatsCounter
from treewy._stopping import Stopping
from treewy.ops import depths, path_to_node


class Rounds:
    """Generate by rounds over one batch; each call of ``step`` is a round.

    Args:
        session: The target after prefill.
        drafter: Who proposes.
        choice: How the target chooses tokens.
        stopping: Where rows end.
        prompt: Token ids as given, pads included [B, T].
        prompt_mask: Nonzero for real tokens [B, T].
        vocab_size: Token ids are below this.
        emit: Called with each row and token id, in order, once.
    """

    def __init__(
        self,
        session: Session,
        drafter: Drafter,
        choice: GreedyChoice,
        stopping: Stopping,
        prompt: Tensor,
        prompt_mask: Tensor,
        vocab_size: int,
        emit: Callable[[int, int], None],
    ) -> None:
        self.session = session
        self.stats = StatsCounter()
        self.texts = list(prompt)  # with pads, as plain generation shows them to processors and criteria
        self.ended = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
        self._drafter = drafter
        self._choice = choice
        self._stopping = stopping
        self._real = [row[mask.bool()] for row, mask in zip(prompt, prompt_mask, strict=True)]
        self._vocab_size = vocab_size
        self._emit = emit

    def start(self, logits: Tensor) -> None:
        """Emit the token that prefill's last logits [B, V] choose."""
        first = self._choice.first(logits, self.texts)[:, None]
        counts, self.ended = self._stopping.cut(first, torch.ones_like(first[:, 0]), self.texts)
        self._append(first, counts)
        self.stats.add_first_tokens(int(counts.sum()))

    def step(self) -> None:
        """Run one round for all rows that have not ended."""
        draft = self._drafter.propose(*self._context())
        token_ids, parents = self._with_root(draft)

        logits = self.session.extend(token_ids, parents)
        cache = self.session.cache
        state_bytes, snapshot_bytes = cache.num_node_bytes, cache.num_snapshot_bytes * parents.shape[1]

        node, bonus = self._choice.accept(logits, token_ids, parents, self.texts)
        path, length = path_to_node(parents, node)
        accepted = token_ids.gather(1, path.clamp(min=0))
        tokens = torch.cat([accepted[:, 1:], accepted[:, :1]], dim=1)  # the root is emitted already
        tokens = tokens.scatter(1, (length - 1).clamp(min=0)[:, None], bonus[:, None])
        counts, ended = self._stopping.cut(tokens, length, self.texts)

        # what was emitted is committed, but for its last token: that is the next root
        last = path.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
        self.session.commit(torch.where(counts > 0, last, -1))

        live = ~self.ended
        self.stats.add_round(
            counts[live].tolist(),
            depths(parents).max(dim=1).values[live].tolist(),
            parents.shape[1],
            state_bytes,
            snapshot_bytes,
        )
        tokens = tokens[:, : max(1, int(counts.max()))]
        self._append(tokens, counts)
        self.ended = self.ended | ended
        self._drafter.update(tokens, counts)

    def _context(self) -> tuple[Tensor, Tensor]:
        """Return the real tokens of all rows padded to the right, and their lengths."""
        lengths = torch.tensor([len(row) for row in self._real], device=self.ended.device)
        return torch.nn.utils.rnn.pad_sequence(self._real, batch_first=True), lengths

    def _with_root(self, draft: DraftTree) -> tuple[Tensor, Tensor]:
        """Check a draft and put each row's last token before it; rows that have ended become padding."""
        batch, device = len(self.texts), self.ended.device
        if not isinstance(draft, DraftTree):
            raise ValueError(f"the drafter proposed a {type(draft).__name__}; propose() must return a treewy.DraftTree")
        if draft.token_ids.shape[0] != batch:
            raise ValueError(
                f"the drafter proposed for {draft.token_ids.shape[0]} rows but the batch has {batch}; propose() must "
                "return one tree a row, with num_nodes 0 for rows without a proposal"
            )
        if draft.token_ids.device != device:
            raise ValueError(
                f"the draft tree is on {draft.token_ids.device} but the batch is on {device}; "
                f"move its tensors with .to({str(device)!r})"
            )
        real = torch.arange(draft.token_ids.shape[1], device=device) < draft.num_nodes[:, None]
        wrong = real & ((draft.token_ids < 0) | (draft.token_ids >= self._vocab_size))
        if bool(wrong.any()):
            row, node = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"draft token id {int(draft.token_ids[row, node])} (row {row}, node {node}) is outside the target's "
                f"vocabulary of {self._vocab_size}; the drafter must use the target's tokenizer"
            )
        root = torch.stack([text[-1] for text in self.texts])[:, None]
        token_ids = torch.cat([root, torch.where(real, draft.token_ids, 0)], dim=1)
        parents = torch.cat([torch.full_like(root, -1), draft.parents + 1], dim=1)
        return token_ids, pad_parents(parents, torch.where(self.ended, 0, draft.num_nodes + 1))

    def _append(self, tokens: Tensor, counts: Tensor) -> None:
        for row, count in enumerate(counts.tolist()):
            new = tokens[row, :count]
            self.texts[row] = torch.cat([self.texts[row], new])
            self._real[row] = torch.cat([self._real[row], new])
            for token in new.tolist():
                self._emit(row, token)
