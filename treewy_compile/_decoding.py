"""What a verified tree emits, and which node is committed, whatever the way of choosing tokens.

Plain generation calls Hugging Face's processors and criteria once a token, on the text before it and after it. So does
the walk in here: it follows the target's choices from the root and stops where the tree or the text ends, so that a
rejected token is never seen. Without processors that look at text, and with no criteria but length and end-of-sequence
tokens, the path is chosen for all rows at once and cut where the text ends.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import stopping_criteria as stopping

from treewy._device_choice import DeviceChoice
from treewy._draft_tree import DraftTree
from treewy._scores import Scores
from treewy._texts import Texts
from treewy.ops import PADDING, path_to_node


class RowOnHost(NamedTuple):
    """What one row emits: its tokens, how many of them were drafted, and whether it ends with them."""

    token_ids: list[int]
    num_accepted: int
    ended: bool


@dataclass(frozen=True)
class Emission:
    """What one round emits.

    Args:
        token_ids: Emitted tokens [B, M], padded to the right.
        num_tokens: How many a row [B]; 0 for a row of padding.
        num_accepted: How many of them were drafted [B]; the rest, at most one, is the bonus token.
        ended: Whether the row ends with them [B].
        node: The node to commit [B]: all that was emitted but the last token, which is the next root; -1 for padding.
    """

    token_ids: Tensor
    num_tokens: Tensor
    num_accepted: Tensor
    ended: Tensor
    node: Tensor

    @cached_property
    def on_host(self) -> list[RowOnHost]:
        """What the host has to know, read at once and only once: each row."""
        return self.unpacked(self.packed(None))[0].on_host

    def trimmed(self) -> "Emission":
        """Return the same with no more columns than the longest row has tokens."""
        longest = max(1, *(len(row.token_ids) for row in self.on_host))
        trimmed = replace(self, token_ids=self.token_ids[:, :longest])
        vars(trimmed)["on_host"] = self.on_host
        return trimmed

    def packed(self, sound: Tensor | None) -> Tensor:
        """Return all of it, and whether each row could be chosen for [B], as one tensor [B, M + 5] for the host."""
        sound = torch.ones_like(self.ended) if sound is None else sound
        flags = self.num_tokens, self.num_accepted, self.ended.long(), self.node, sound.long()
        return torch.cat([torch.stack(flags, dim=1), self.token_ids], dim=1)

    @classmethod
    def unpacked(cls, packed: Tensor) -> tuple["Emission", list[bool]]:
        """Return what was packed, trimmed and read by the host, as views, and which rows could be chosen for."""
        rows = packed.tolist()
        num_tokens, num_accepted, ended, node, _ = packed[:, :5].unbind(1)
        emission = cls(packed[:, 5:], num_tokens, num_accepted, ended.bool(), node)
        vars(emission)["on_host"] = [
            RowOnHost(tokens[:count], accepted, bool(end)) for count, accepted, end, _, _, *tokens in rows
        ]
        return emission.trimmed(), [bool(row[4]) for row in rows]


@dataclass(frozen=True)
class RowOfTree:
    """One row of a verified tree.

    Args:
        token_ids: Tokens of the nodes, the root first [N].
        parents: Their parents [N].
        draft: The draft that the nodes came from; None if the root is alone.
        row: Its place in the batch.
    """

    token_ids: Tensor
    parents: Tensor
    draft: DraftTree | None
    row: int


class Decoding(ABC):
    """Decide as plain generation does.

    Args:
        processors: Hugging Face's logits processors.
        criteria: Hugging Face's stopping criteria, the maximum length among them.
        batch: Rows.

    Raises:
        ValueError: If a processor or criterion cannot be applied row by row and there are several rows.
    """

    def __init__(self, processors: LogitsProcessorList, criteria: StoppingCriteriaList, batch: int) -> None:
        self.scores = Scores(processors, batch)
        self._criteria = criteria
        # by type, not isinstance: a class of the user's own may decide otherwise
        self._max_length = min(c.max_length for c in criteria if type(c) is stopping.MaxLengthCriteria)
        eos = [c.eos_token_id.cpu() for c in criteria if type(c) is stopping.EosTokenCriteria]
        self._eos = torch.cat([torch.empty(0, dtype=torch.int64), *eos])
        others = [c for c in criteria if type(c) not in (stopping.MaxLengthCriteria, stopping.EosTokenCriteria)]
        self._by_text = not self.scores.textless or len(others) > 0
        if batch > 1:
            for criterion in others:
                if not (type(criterion) in (stopping.MaxTimeCriteria, stopping.StopStringCriteria) and eos):
                    raise ValueError(
                        f"stopping criterion {type(criterion).__name__} cannot be used with a drafter and {batch} "
                        "rows: how a row goes on behind it depends on the other rows; generate row by row"
                    )

    @abstractmethod
    def check(self, draft: DraftTree, vocab_size: int) -> None:
        """Raise a ``ValueError`` if this way of decoding cannot use the draft."""

    def room(self, texts: Texts) -> list[int]:
        """Return how many tokens each row may still emit.

        At least one, like plain generation, which looks at the length after it has emitted.
        """
        return [max(1, self._max_length - length) for length in texts.lengths]

    def emit(
        self, logits: Tensor, token_ids: Tensor, parents: Tensor, texts: Texts, draft: DraftTree | None
    ) -> Emission:
        """Follow the target's choices through the tree.

        Args:
            logits: The target's logits [B, N, V] after each node.
            token_ids: Tokens of the nodes, the root (last token of the text) first [B, N].
            parents: Their parents [B, N]; a row whose root is padding emits nothing.
            texts: Each row's text so far, pads included, the root included.
            draft: What the nodes behind the root came from; None if there are none.
        """
        limits = self.limits(texts)
        if limits is not None:
            scores = self.scores.of_nodes(logits, lambda row, node: texts[row])
            paths = self.choose_paths(scores, token_ids, parents, draft)
            return cut(token_ids, parents, *paths, *(limit.to(token_ids.device) for limit in limits)).trimmed()
        rows = list(texts)
        device, host = token_ids.device, rows[0].device  # processors live where the prompt was given
        trees = zip(token_ids.to(host), parents.to(host), strict=True)
        walked = [
            self._walk(RowOfTree(*tree, draft, row), logits[row].to(host), rows[row]) for row, tree in enumerate(trees)
        ]
        tokens, accepted, ended, nodes = zip(*walked, strict=True)
        return Emission(
            torch.nn.utils.rnn.pad_sequence(list(tokens), batch_first=True).to(device),
            torch.tensor([len(row) for row in tokens], device=device),
            torch.tensor(accepted, device=device),
            torch.tensor(ended, device=device),
            torch.tensor(nodes, device=device),
        )

    def limits(self, texts: Texts) -> tuple[Tensor, Tensor] | None:
        """Return how many tokens each row may emit [B] and which tokens end one [E], or None where text decides."""
        return None if self._by_text else (torch.tensor(self.room(texts)), self._eos)

    @abstractmethod
    def device_choice(self, draft: DraftTree | None) -> DeviceChoice:
        """Return what chooses paths on the device, as ``choose_paths`` does; of traceable scores."""

    @abstractmethod
    def choose_paths(
        self, scores: Tensor, token_ids: Tensor, parents: Tensor, draft: DraftTree | None
    ) -> tuple[Tensor, Tensor]:
        """Choose a path a row.

        Args:
            scores: Processed logits [B, N, V] after each node.
            token_ids: Tokens of the nodes, the root first [B, N].
            parents: Their parents [B, N].
            draft: What the nodes behind the root came from; None if there are none.

        Returns:
            The last node of each path [B], -1 for a row of padding, and the token that follows it [B].
        """

    @abstractmethod
    def choose(self, scores: Tensor, reached: Tensor, tree: RowOfTree) -> tuple[Tensor, Tensor]:
        """Choose the next token from the scores [V] after some nodes of equal text.

        Args:
            scores: Processed logits [V].
            reached: The nodes [n].
            tree: The tree that they are in.

        Returns:
            The token [1], and those of the nodes' children that have it [m].
        """

    def _walk(self, tree: RowOfTree, logits: Tensor, text: Tensor) -> tuple[Tensor, int, bool, int]:
        """Return the emitted tokens, how many of them were drafted, whether the row ends, and the node to commit."""
        if int(tree.parents[0]) == PADDING:
            return text[:0], 0, False, -1
        start = len(text)
        reached = torch.zeros_like(tree.parents[:1])  # several where siblings have the same token
        while True:
            token, children = self.choose(self.scores.of_row(tree.row, text, logits[reached[0]]), reached, tree)
            text = torch.cat([text, token])
            ended = bool(self._criteria(text[None], None).all())
            if ended or len(children) == 0:
                return text[start:], len(text) - start - (len(children) == 0), ended, int(reached[0])
            reached = children


def cut(token_ids: Tensor, parents: Tensor, node: Tensor, bonus: Tensor, room: Tensor, eos: Tensor) -> Emission:
    """Emit the paths to some nodes, and the tokens that follow them, up to where each text ends.

    Args:
        token_ids: Tokens of the nodes, the root first [B, N].
        parents: Their parents [B, N].
        node: The last node of each path [B], -1 for a row of padding.
        bonus: The token that follows it [B].
        room: How many tokens each row may emit [B].
        eos: Tokens that end a row [E].
    """
    path, length = path_to_node(parents, node)
    on_path = token_ids.gather(1, path.clamp(min=0))
    emitted = on_path.roll(-1, dims=1).scatter(1, (length - 1).clamp(min=0)[:, None], bonus[:, None])
    count = torch.minimum(length, room)
    ended = count == room
    index = torch.arange(emitted.shape[1], device=emitted.device)
    found = (emitted[:, :, None] == eos).any(dim=2) & (index < count[:, None])
    count = torch.where(found.any(dim=1), found.int().argmax(dim=1) + 1, count)
    ended = ended | found.any(dim=1)
    last = path.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
    accepted = torch.minimum(count, length - 1).clamp(min=0)
    return Emission(emitted, count, accepted, ended, torch.where(count > 0, last, -1))
