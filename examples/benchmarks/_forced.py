"""Acceptance to order: a drafter that knows the text and is right as often, depth by depth, as it is told."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from treewy import Drafter, DraftingContext, DraftTree
from treewy._draft_tree import parents_from_widths

_LOUDNESS = 8.0  # standard deviation of embeddings; layers of random weights add about 5 to it, all together


@torch.no_grad()
def make_it_count(model: PreTrainedModel) -> PreTrainedModel:
    """Let token t + 1 follow token t, and 0 the last one, far ahead of all others.

    In bfloat16 the text of random weights is another for every order of summation: its best logits are ties. Here
    embeddings are louder than what the layers add, and the output weights of t + 1 are the embedding of t. Nothing
    takes another time for that, but equal tokens no longer say that the layers are right.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embedding.normal_(std=_LOUDNESS)
    head.copy_(embedding.roll(1, dims=0))
    return model


def acceptance_by_depth(
    ranks: Sequence[Sequence[int]], widths: Sequence[int], new_tokens: int
) -> tuple[tuple[float, ...], float]:
    """Replay greedy speculation, and return what ``SpeculationStats`` calls acceptance by depth and accepted length.

    Args:
        ranks: For each token of each continuation, how many tokens the draft model rates higher.
        widths: Children a node at each level.
        new_tokens: Most tokens of a continuation, behind which nothing is drafted.
    """
    reached, emitted = [0] * len(widths), [0] * len(widths)
    rounds = tokens = 0
    for row in ranks:
        position = 1  # the first token comes from the prefill
        while position < len(row):
            depth = min(len(widths), new_tokens - position - 1)
            coming = row[position : position + depth]
            taken = next((level for level, rank in enumerate(coming) if rank >= widths[level]), len(coming))
            for level in range(depth):
                reached[level] += 1
                emitted[level] += level < taken
            rounds += 1
            tokens += min(taken + 1, len(row) - position)
            position += taken + 1
    return tuple(e / max(1, r) for e, r in zip(emitted, reached, strict=True)), tokens / rounds


class ForcedDrafter(Drafter):
    """Propose trees whose first path is right as deep as is drawn; all other nodes are wrong.

    A draft model may be run for what it costs: it drafts, its tree is dropped, and it is told what was emitted. If it
    counts as the target does (:func:`make_it_count`), its own first path is right, so that it carries along as many of
    its nodes as a draft model would that was accepted as deep.

    Args:
        texts: What the target will say behind the prompt [B, M].
        widths: Children a node at each level; none, and nothing is proposed.
        rates: By depth, how often a node is to be accepted that deep; depths behind the last one never are.
        vocab_size: Of the target.
        charged: The drafter that is run for what it costs; it must draft trees of these widths.
    """

    def __init__(
        self,
        texts: Tensor,
        widths: Sequence[int],
        rates: Sequence[float],
        vocab_size: int,
        charged: Drafter | None = None,
    ) -> None:
        parents = parents_from_widths(widths) if widths else []
        device = texts.device
        depths: list[int] = []
        first: list[bool] = []  # on the path of first children
        for node, parent in enumerate(parents):
            depths.append(0 if parent < 0 else depths[parent] + 1)
            first.append(parent not in parents[:node] and (parent < 0 or first[parent]))
        ranks = [parents[:node].count(parent) for node, parent in enumerate(parents)]
        self._parents, self._depths, self._ranks = (
            torch.tensor(x, dtype=torch.int64, device=device) for x in (parents, depths, ranks)
        )
        self._first = torch.tensor(first, dtype=torch.bool, device=device)
        self._texts, self._rates = texts, torch.tensor(rates, device=device)
        self._vocab_size, self._charged = vocab_size, charged
        self.reset()

    def prepare(self, context: DraftingContext) -> None:
        """Pass on what the drafts are for."""
        if self._charged is not None:
            self._charged.prepare(context)  # type: ignore[attr-defined]

    def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
        """Draw how deep each row is right, and propose."""
        if self._charged is not None:
            self._charged.propose(input_ids, lengths)
        if self._prompt_lengths is None:
            self._prompt_lengths = lengths - 1  # the prefill's token is in the text already
        drawn = torch.rand(len(lengths), 1, generator=self._generator).to(lengths.device)
        right_levels = (drawn < self._rates).sum(dim=1, keepdim=True)
        position = (lengths - self._prompt_lengths)[:, None] + self._depths
        right = self._texts.gather(1, position.clamp(max=self._texts.shape[1] - 1))
        is_right = self._first & (self._depths < right_levels)
        wrong = (right + 1 + self._ranks) % self._vocab_size
        return DraftTree(torch.where(is_right, right, wrong), self._parents)

    def update(self, token_ids: Tensor, num_tokens: Tensor) -> None:
        """Tell the draft model what was emitted."""
        if self._charged is not None:
            self._charged.update(token_ids, num_tokens)

    def reset(self) -> None:
        """Begin a text, with the same draws."""
        self._prompt_lengths: Tensor | None = None
        self._generator = torch.Generator().manual_seed(0)
        if self._charged is not None:
            self._charged.reset()
