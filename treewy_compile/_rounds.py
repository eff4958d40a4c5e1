"""The round: draft, verify, accept, commit."""

from collections.abc import Callable

import torch
from torch import Tensor

from treewy._decoding import Decoding, Emission
from treewy._draft_tree import DraftTree
from treewy._drafters import Drafter
from treewy._session import Session, pad_parents
from treewy._stats import StatsCounter
from treewy.ops import PADDING, depths


class Rounds:
    """Generate by rounds over one batch; each call of ``step`` is a round.

    Args:
        session: The target after prefill.
        drafter: Who proposes.
        decoding: What the target chooses, and where rows end.
        prompt: Token ids as given, pads included [B, T].
        prompt_mask: Nonzero for real tokens [B, T].
        vocab_size: Token ids are below this.
        emit: Called with each row and token id, in order, once.
    """

    def __init__(
        self,
        session: Session,
        drafter: Drafter,
        decoding: Decoding,
        prompt: Tensor,
        prompt_mask: Tensor,
        vocab_size: int,
        emit: Callable[[int, int], None],
    ) -> None:
        self.session = session
        self.stats = StatsCounter()
        self.texts = list(prompt)  # with pads, as plain generation shows them to processors and criteria
        self.ended = torch.zeros(len(prompt), dtype=torch.bool, device=session.model.device)
        self._ended = [False] * len(prompt)
        self._drafter = drafter
        self._decoding = decoding
        rows = zip(prompt.to(self.ended.device), prompt_mask.to(self.ended.device), strict=True)
        self._real = [row[mask.bool()] for row, mask in rows]
        self._root = torch.stack([text[-1:] for text in self.texts]).to(self.ended.device)  # last tokens [B, 1]
        self._vocab_size = vocab_size
        self._emit = emit

    def start(self, logits: Tensor) -> None:
        """Emit the token that prefill's last logits [B, V] choose."""
        root = self._root
        emission = self._decoding.emit(logits[:, None], root, torch.full_like(root, -1), self.texts, None)
        self.stats.add_first_tokens(sum(len(row.token_ids) for row in emission.on_host))
        self._append(emission)

    def step(self) -> None:
        """Run one round for all rows that have not ended."""
        draft = self._drafter.propose(*self._context())
        token_ids, parents = self._with_root(draft)
        deepest = depths(parents).max(dim=1).values  # as long as a GPU is busy with drafts, this costs nothing
        emission, state_bytes = self.session.round(token_ids, parents, self._decoding, self.texts, draft)
        live = [row for row, ended in enumerate(self._ended) if not ended]
        rows, depth = emission.on_host, deepest.tolist()
        self.stats.add_round(
            [len(rows[row].token_ids) for row in live],
            [rows[row].num_accepted for row in live],
            [depth[row] for row in live],
            parents.shape[1],
            state_bytes,
            self.session.cache.num_snapshot_bytes * parents.shape[1],
        )
        self._append(emission)
        self._drafter.update(emission.token_ids, emission.num_tokens)

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
        if draft.known_levels:
            deepest = int(self._decoding.room(self.texts).max()) - 1
            size = (0, *draft.known_levels)[min(deepest, len(draft.known_levels))]
            return self._planted(draft.token_ids[:, :size], draft.parents[:, :size], draft.num_nodes.clamp(max=size))
        real = torch.arange(draft.token_ids.shape[1], device=device) < draft.num_nodes[:, None]
        wrong = real & ((draft.token_ids < 0) | (draft.token_ids >= self._vocab_size))
        if bool(wrong.any()):
            row, node = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"draft token id {int(draft.token_ids[row, node])} (row {row}, node {node}) is outside the target's "
                f"vocabulary of {self._vocab_size}; the drafter must use the target's tokenizer"
            )
        self._decoding.check(draft, self._vocab_size)
        token_ids, parents = self._planted(torch.where(real, draft.token_ids, 0), draft.parents, draft.num_nodes)
        size = 1 + int((parents != PADDING).any(dim=0).nonzero().max())
        return token_ids[:, :size], parents[:, :size]

    def _planted(self, token_ids: Tensor, parents: Tensor, num_nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Put the root before the nodes of a draft; nothing waits for them."""
        parents = torch.cat([torch.full_like(self._root, -1), parents + 1], dim=1)
        parents = pad_parents(parents, torch.where(self.ended, 0, num_nodes + 1))
        # no node so deep that the text would be full before it is emitted
        room = self._decoding.room(self.texts).to(parents.device, non_blocking=True)
        parents = torch.where(depths(parents) < room[:, None], parents, PADDING)
        return torch.cat([self._root, token_ids], dim=1), parents

    def _append(self, emission: Emission) -> None:
        self.ended = self.ended | emission.ended
        last = emission.token_ids.gather(1, (emission.num_tokens - 1).clamp(min=0)[:, None])
        self._root = torch.where(emission.num_tokens[:, None] > 0, last, self._root)
        for row, (tokens, _, ended) in enumerate(emission.on_host):
            self._ended[row] |= ended
            if tokens:
                new = emission.token_ids[row, : len(tokens)]
                self.texts[row] = torch.cat([self.texts[row], new.to(self.texts[row].device)])
                self._real[row] = torch.cat([self._real[row], new])
            for token in tokens:
                self._emit(row, token)

    @property
    def all_ended(self) -> bool:
        """Whether nothing is left to do."""
        return all(self._ended)
