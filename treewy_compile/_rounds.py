"""The round: draft, verify, accept, commit."""

from collections.abc import Callable

import torch
from torch import Tensor

from treewy._decoding import Decoding, Emission
from treewy._drafters import Drafter
from treewy._planting import Planting
from treewy._session import Session
from treewy._stats import StatsCounter
from treewy._texts import Texts


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
        self.texts = Texts(prompt, prompt_mask, session.model.device)
        self.ended = [False] * len(prompt)
        self._drafter = drafter
        self._decoding = decoding
        self._planting = Planting(decoding, vocab_size, session.model.device)
        self._emit = emit

    def start(self, logits: Tensor) -> None:
        """Emit the token that prefill's last logits [B, V] choose."""
        root = torch.zeros(len(logits), 1, dtype=torch.int64, device=logits.device)  # nobody looks at its token
        emission = self._decoding.emit(logits[:, None], root, torch.full_like(root, -1), self.texts, None)
        self.stats.add_first_tokens(sum(len(row.token_ids) for row in emission.on_host))
        self._append(emission)

    def step(self) -> None:
        """Run one round for all rows that have not ended."""
        draft = self._drafter.propose(*self.texts.real_tokens())
        tree = self._planting.plant(draft, self.texts, self.ended)
        emission, state_bytes = self.session.round(tree.token_ids, tree.parents, self._decoding, self.texts, draft)
        rows, live = emission.on_host, [row for row, ended in enumerate(self.ended) if not ended]
        num_nodes = tree.parents.shape[1]
        self.stats.add_round(
            [len(rows[row].token_ids) for row in live],
            [rows[row].num_accepted for row in live],
            [tree.depths[row] for row in live],
            num_nodes,
            state_bytes,
            self.session.cache.num_snapshot_bytes * num_nodes,
        )
        self._append(emission)
        self._drafter.update(emission.token_ids, emission.num_tokens)

    def _append(self, emission: Emission) -> None:
        rows = emission.on_host
        self.texts.append(emission.token_ids, emission.num_tokens, [len(row.token_ids) for row in rows])
        for row, (tokens, _, ended) in enumerate(rows):
            self.ended[row] |= ended
            for token in tokens:
                self._emit(row, token)

    @property
    def all_ended(self) -> bool:
        """Whether nothing is left to do."""
        return all(self.ended)
