"""Sampled decoding of a verified tree, without changing the target's distribution: `tree_sample` has the rule.

Draws are by an exponential race: of q(x) / e(x), with independent exponential e, the greatest is a draw from q, and the
w greatest, in order, are w draws without replacement.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from treewy._decoding import Decoding, RowOfTree
from treewy._device_choice import Chosen, DeviceChoice
from treewy._draft_tree import DraftTree, Sampling
from treewy._scores import Scores, no_text
from treewy.ops import path_to_node, tree_sample


def draw(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw one index from each distribution [..., V]; weights need not be normalised."""
    return _race(probs, generator).argmax(dim=-1)


def draw_without_replacement(probs: Tensor, number: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Draw several indices [..., number] from each distribution [..., V], one after the other.

    Returns:
        The indices, and which of them count: those of a distribution with fewer than ``number`` possible outcomes run
        out.
    """
    arrival = _race(probs, generator).topk(number, dim=-1)
    return arrival.indices, arrival.values >= 0


def _race(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    device = probs.device if generator is None else generator.device
    exponential = torch.empty(probs.shape, dtype=probs.dtype, device=device).exponential_(generator=generator)
    return torch.where(probs > 0, probs / exponential.to(probs.device), -1.0)


class SampledDecoding(Decoding):
    """Draw tokens from the softmax of the scores.

    Args:
        processors: Hugging Face's logits processors, warpers among them.
        criteria: Hugging Face's stopping criteria, the maximum length among them.
        batch: Rows.
        generator: Source of randomness; None for PyTorch's own.

    Raises:
        ValueError: If a processor or criterion cannot be applied row by row and there are several rows.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        batch: int,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__(processors, criteria, batch)
        self._generator = generator

    def check(self, draft: DraftTree, vocab_size: int) -> None:
        """Raise a ``ValueError`` if the draft's distributions are not what its tokens can have been drawn from."""
        draft.check_draft_probs(vocab_size)

    def device_choice(self, draft: DraftTree | None) -> DeviceChoice:
        """Return what accepts children and draws one more token; see ``Decoding.device_choice``."""
        return SampledChoice(self.scores, draft, self._generator)

    def choose_paths(
        self, scores: Tensor, token_ids: Tensor, parents: Tensor, draft: DraftTree | None
    ) -> tuple[Tensor, Tensor]:
        """Accept children and then draw one more token; see ``Decoding.choose_paths``."""
        choice = SampledChoice(self.scores, draft, self._generator)
        places = choice.places(scores.shape, scores.device)
        choice.fill(*places)
        node, token, sound = sampled_paths(scores, token_ids, parents, places, choice.sampling)
        refuse_unsound(sound.tolist())
        return node, token

    def choose(self, scores: Tensor, reached: Tensor, tree: RowOfTree) -> tuple[Tensor, Tensor]:
        """Accept a child or draw another token; see ``Decoding.choose``."""
        children = (tree.parents == reached).nonzero()[:, 0]
        star = torch.cat([reached, children])  # what is drawn behind a child is not looked at: its scores are others
        token_ids, scores = tree.token_ids[None, star], scores.expand(1, len(star), -1)
        parents = torch.zeros_like(token_ids).index_fill(1, star.new_zeros(1), -1)
        sampling = _sampling_of(tree.draft)
        places = _new_places(scores.shape, int(sampling != "top"), scores.device)
        _fill_with_noise(places, self._generator)
        if tree.draft is not None and sampling != "top":
            home = tree.draft.parents.device
            row, node = torch.tensor([tree.row], device=home), reached.to(home) - 1
            places.draft_probs.copy_(tree.draft.probs_after(row, node)[:, None])
        node, token, sound = sampled_paths(scores, token_ids, parents, places, sampling)
        refuse_unsound(sound.tolist(), tree.row)
        accepted = star[node][node > 0]
        return torch.where(node > 0, token_ids[0, node], token), accepted


class Places(NamedTuple):
    """What sampling needs beside scores and tree.

    Args:
        uniform: A random number a node [B, N].
        exponential: One a token [B, V].
        draft_probs: The draft's distributions [B, P, V]; P is 0 for "top".
        draft_index: Which of them the children of each node were drawn from [B, N].
    """

    uniform: Tensor
    exponential: Tensor
    draft_probs: Tensor
    draft_index: Tensor


class SampledChoice(DeviceChoice):
    """Accept children and draw one more token, on the device.

    Args:
        scores: Of processors that can be traced.
        draft: What a round verifies; None if there is nothing drafted.
        generator: Source of randomness; None for PyTorch's own.
    """

    def __init__(self, scores: Scores, draft: DraftTree | None, generator: torch.Generator | None) -> None:
        super().__init__(scores)
        self.sampling = _sampling_of(draft)
        self._draft, self._generator = draft, generator

    @property
    def key(self) -> Hashable:
        """The processors, and how siblings were chosen; see ``DeviceChoice.key``."""
        return super().key, self.sampling

    def to_compile(self, device: torch.device) -> DeviceChoice:
        """Return one with processors of its own and no draft; see ``DeviceChoice.to_compile``."""
        choice = SampledChoice(self.scores.copied_to(device), None, None)
        choice.sampling = self.sampling
        return choice

    def places(self, shape: Sequence[int], device: torch.device) -> Places:
        """Return what ``fill`` fills; see ``DeviceChoice.places``."""
        return _new_places(shape, 0 if self.sampling == "top" else shape[1], device)

    def fill(self, *places: Tensor) -> None:
        """Draw random numbers and copy the draft's distributions; see ``DeviceChoice.fill``."""
        filled = Places(*places)
        _fill_with_noise(filled, self._generator)
        if self._draft is None or self.sampling == "top":
            return
        probs, index = self._draft.draft_probs, self._draft.probs_index
        assert probs is not None
        # no node of index n has a distribution behind number n, so that those of nodes cut off are not missed
        number = min(probs.shape[1], filled.draft_probs.shape[1])
        size = min(index.shape[1], filled.draft_index.shape[1])
        filled.draft_probs[:, :number].copy_(probs[:, :number])
        filled.draft_index[:, :size].copy_(index[:, :size].clamp(0, number - 1))

    def paths(self, logits: Tensor, token_ids: Tensor, parents: Tensor, *places: Tensor) -> Chosen:
        """Choose a path a row; see ``DeviceChoice.paths``."""
        scores = self.scores.of_nodes(logits, no_text)
        return sampled_paths(scores, token_ids, parents, Places(*places), self.sampling)


def sampled_paths(
    scores: Tensor, token_ids: Tensor, parents: Tensor, places: Places, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the last node of each row's path [B], the token behind it [B], and whether it could be sampled [B].

    Args:
        scores: [B, N, V] after each node, in float32.
        token_ids: Tokens of the nodes, the root first [B, N].
        parents: Their parents [B, N].
        places: Random numbers, and the draft's distributions.
        sampling: How siblings were chosen.
    """
    uniform, exponential, draft_probs, draft_index = places
    draft_probs = draft_probs / draft_probs.sum(dim=2, keepdim=True)  # they may have been rounded to 16 bits
    probs = scores.softmax(dim=-1)
    node, token = tree_sample(probs, token_ids, parents, draft_probs, draft_index, uniform, exponential, sampling)
    path, _ = path_to_node(parents, node)
    # NaN if there is one, infinite if one is or all are -inf: what has no softmax
    greatest = scores.amax(dim=-1).gather(1, path.clamp(min=0))
    return node, token, (greatest.isfinite() | (path < 0)).all(dim=1)


def refuse_unsound(sound: list[bool], first_row: int = 0) -> None:
    """Raise a ``ValueError`` that names the first row that could not be sampled."""
    if not all(sound):
        row = first_row + sound.index(False)
        raise ValueError(
            f"the scores of row {row} are NaN, infinite, or -inf for every token, so nothing can be sampled; look "
            "for an overflow in the model's logits (half precision?) and for logits processors that leave no token"
        )


def _sampling_of(draft: DraftTree | None) -> Sampling:
    """Return how siblings were chosen; "top", which needs no distributions, where there are none."""
    if draft is None or draft.draft_probs is None or draft.draft_probs.shape[1] == 0:
        return "top"
    return draft.sampling


def _new_places(shape: Sequence[int], num_distributions: int, device: torch.device) -> Places:
    batch, num_nodes, vocab_size = shape
    return Places(
        torch.zeros(batch, num_nodes, device=device),
        torch.ones(batch, vocab_size, device=device),
        torch.zeros(batch, num_distributions, vocab_size, device=device),
        torch.zeros(batch, num_nodes, dtype=torch.int64, device=device),
    )


def _fill_with_noise(places: Places, generator: torch.Generator | None) -> None:
    for place, draw_into in ((places.uniform, Tensor.uniform_), (places.exponential, Tensor.exponential_)):
        if generator is None or generator.device == place.device:
            draw_into(place, generator=generator)
        else:
            place.copy_(draw_into(torch.empty(place.shape, device=generator.device), generator=generator))
