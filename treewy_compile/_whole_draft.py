"""A draft tree that grows on the device: what a draft model proposes in a round, and what it learns, two CUDA graphs.

The nodes of a draft model in a round are

    0 ... P - 1     tokens that were emitted and that it has not seen as nodes, as a chain; the last is the root
    P ... N - 1     its drafts, level by level, but for the last level, which nothing follows

To draft is to run the forward over all of them once a level, and to write the most probable children of each level
where the next one looks for them: nodes that are not chosen yet have no influence on those before them. To learn is to
commit the emitted part of what was drafted, and to note the rest as the next chain.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treewy._accept import emitted_node
from treewy._greedy import in_parts
from treewy._static_stores import HandedOut
from treewy.ops import PADDING

if TYPE_CHECKING:
    from treewy._compiled_forward import CompiledForward

Levels = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Of each level the parents of its nodes, -1 for the root, and their ranks among siblings."""


class WholeDraft:
    """Draft the most probable tree of one shape.

    Args:
        forward: Of the draft model, over at least as many nodes as there are.
        levels: Shape of the tree.
        vocab_size: Of the target; tokens that only one of the two models has are neither proposed nor seen.
        draft_vocab_size: Of the draft model.
    """

    @torch.inference_mode(False)  # or nothing could be written outside of it
    def __init__(self, forward: "CompiledForward", levels: Levels, vocab_size: int, draft_vocab_size: int) -> None:
        self._forward = forward
        self._vocab_sizes = vocab_size, draft_vocab_size
        parents = [parent for level, _ in levels for parent in level]
        self.most_pending = len(levels) + 1
        batch, num_nodes = forward.parents.shape
        kept = sum(len(level) for level, _ in levels[:-1])
        assert self.most_pending + kept <= num_nodes
        new = forward.parents.new_full
        self._drafts = new((batch, len(parents)), 0)
        self._invalid = new((batch,), 0, dtype=torch.bool)
        self._pending, self._pending_tokens = new((batch,), 1), new((batch, self.most_pending), 0)
        self._emitted, self._num_emitted = torch.zeros_like(self._pending_tokens), torch.zeros_like(self._pending)
        self._shape = new((num_nodes,), PADDING)  # where the root is -1, and drafts begin behind the chain
        index = torch.tensor(parents[:kept], dtype=torch.int64)
        self._shape[self.most_pending : self.most_pending + kept] = torch.where(
            index < 0, -1, index + self.most_pending
        )
        self._levels = list(_places(levels, self.most_pending, forward.parents.device))
        self._learn = forward.compiled(_learn, "compiling what drafts learn for")
        self.forget_graphs()

    @staticmethod
    def num_nodes(levels: Levels) -> int:
        """Return how many nodes a forward needs for trees of such a shape."""
        return len(levels) + 1 + sum(len(level) for level, _ in levels[:-1])

    def forget_graphs(self) -> None:
        """Capture again."""
        self._proposed: Callable[[], HandedOut] = self._forward.captured(self._propose, "drafts")
        self._settled = self._forward.captured(self._settle, "what drafts learn")

    def start(self, last_tokens: Tensor) -> None:
        """Begin behind what is committed, and one token [B] more."""
        self._pending.fill_(1)
        self._pending_tokens[:, 0] = known(last_tokens, self._vocab_sizes[1])

    def propose(self) -> tuple[Tensor, Tensor]:
        """Return the tokens of the tree [B, D], and in which rows [B] they come from logits that are NaN."""
        self._forward.handed_out = self._proposed()
        return self._drafts.clone(), self._invalid

    def settle(self, token_ids: Tensor, num_tokens: Tensor) -> None:
        """Commit what was emitted of the last drafts: at most ``most_pending`` tokens [B, M], how many count [B]."""
        self._emitted[:, : token_ids.shape[1]] = token_ids
        self._num_emitted.copy_(num_tokens)
        self._settled()

    def reorder(self, index: Tensor) -> None:
        """Let row ``i`` go on as row ``index[i]`` would."""
        self._pending.copy_(self._pending[index])
        self._pending_tokens.copy_(self._pending_tokens[index])

    @property
    def captured(self) -> tuple[Callable[[], Any], ...]:
        """What is captured."""
        return self._proposed, self._settled

    def _propose(self) -> HandedOut:
        forward, chain = self._forward, self.most_pending
        root = (self._pending - 1)[:, None]
        index = torch.arange(chain, device=root.device)
        forward.parents.copy_(torch.where(self._shape == -1, root, self._shape))
        forward.parents[:, :chain] = torch.where(index < self._pending[:, None], index - 1, PADDING)
        forward.token_ids[:, :chain] = self._pending_tokens
        self._invalid.zero_()
        for level in self._levels:
            logits, handed_out = forward.run_verify()
            logits = logits[..., : self._vocab_sizes[0]]
            if level.above is None:
                of_above = logits.gather(1, root[..., None].expand(-1, -1, logits.shape[2]))
            else:
                of_above = logits[:, level.above]
            best, greatest = _most_probable(of_above, level.width)
            self._invalid.logical_or_(greatest.isnan().flatten(1).any(dim=1))
            chosen = best.flatten(1)[:, level.source]
            self._drafts[:, level.place] = chosen
            if level is not self._levels[-1]:
                nodes = slice(chain + level.place.start, chain + level.place.stop)
                forward.token_ids[:, nodes] = chosen
        return handed_out

    def _settle(self) -> None:
        forward = self._forward
        nodes = forward.token_ids, forward.parents, self._pending, self._pending_tokens
        accepted, count, chain = self._learn(*nodes, self._emitted, self._num_emitted, self._vocab_sizes[1])
        forward.accepted_node.copy_(accepted)
        forward.run_commit()
        self._pending.copy_(count)
        self._pending_tokens.copy_(chain)


@dataclass(frozen=True)
class _Level:
    """Where a level comes from and goes to.

    Args:
        above: The nodes of the level before; None for the root.
        width: How many children of each are looked for.
        source: Which of all those are drafts [n].
        place: Where these lie among all drafts.
    """

    above: slice | None
    width: int
    source: Tensor
    place: slice


def _places(levels: Levels, chain: int, device: torch.device) -> Iterator[_Level]:
    """Find where the drafts of each level come from and go to, behind a chain of so many nodes."""
    first, start = 0, -1  # of the level, and of the one above
    for parents, ranks in levels:
        width = max(ranks) + 1
        source = [(parent - start) * width + rank for parent, rank in zip(parents, ranks, strict=True)]
        above = None if start < 0 else slice(chain + start, chain + first)
        place = slice(first, first + len(parents))
        yield _Level(above, width, torch.tensor(source, device=device), place)
        start, first = first, place.stop


def _most_probable(logits: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the indices [..., number] of the greatest logits [..., V] and these; NaN counts as the greatest."""
    parts = in_parts(logits, number)
    of_parts = parts.topk(number, dim=-1)
    start = torch.arange(0, logits.shape[-1], parts.shape[-1], device=logits.device)[:, None]
    best = of_parts.values.flatten(-2).topk(number, dim=-1)
    return (of_parts.indices + start).flatten(-2).gather(-1, best.indices), best.values


def known(token_ids: Tensor, vocab_size: int) -> Tensor:
    """Replace tokens that only the target's larger, padded vocabulary has."""
    return torch.where(token_ids < vocab_size, token_ids, 0)


def _learn(
    token_ids: Tensor,
    parents: Tensor,
    pending: Tensor,
    chain: Tensor,
    emitted: Tensor,
    num_emitted: Tensor,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find what to commit, and what is pending then.

    Args:
        token_ids: Of the nodes [B, N].
        parents: Of the nodes [B, N].
        pending: How many of the first nodes, a chain, were emitted before they were drafted from [B].
        chain: Their tokens [B, P].
        emitted: Tokens that were emitted since [B, P].
        num_emitted: How many of them count [B]; with none the root stays pending.
        vocab_size: Of the draft model.

    Returns:
        The node to commit [B], how many tokens are pending then [B], and these [B, P].
    """
    emitted = known(emitted, vocab_size)
    accepted, after_root = emitted_node(token_ids, parents, pending, emitted, num_emitted)
    seen = torch.where(accepted < 0, 0, after_root + 1).clamp(min=0)
    index = torch.arange(emitted.shape[1], device=emitted.device)
    following = emitted.gather(1, (seen[:, None] + index).clamp(max=emitted.shape[1] - 1))
    root = chain.gather(1, (pending - 1)[:, None])
    stays = num_emitted == 0
    return accepted, torch.where(stays, 1, num_emitted - seen), torch.where(stays[:, None], root, following)
