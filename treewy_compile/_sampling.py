"""Sampled decoding of a verified tree, without changing the target's distribution.

One rule serves every way of drafting. Let p be the target's distribution after a node, and x_1, x_2, ... the tokens of
its children, in the order in which they were drafted. The children are tried in turn. Child w was drawn from some
distribution q_w, given the children before it:

    accept x_w with probability min(1, p(x_w) / q_w(x_w)),    otherwise    p <- max(p - q_w, 0), normalised.

When all are rejected, the token is drawn from the p that is left. One such step leaves the distribution of the emitted
token as it was: a token y is drafted and accepted with probability min(q(y), p(y)); the rejections have probability
1 - sum min(p, q) = sum max(p - q, 0), by which the residual was divided, so y comes out of them with max(p(y) - q(y),
0); the two add up to p(y). By induction over the children, backwards, the same holds for all of them, as long as q_w
is what x_w was drawn from, given x_1 ... x_{w-1}:

    with replacement       q_w = q, the draft's distribution
    without replacement    q_w = q without x_1 ... x_{w-1}, normalised
    top                    q_w = all mass on x_w, however it was chosen: accept with p(x_w), and a rejection takes x_w
                           out of p

Draws are by an exponential race: of q(x) / e(x), with independent exponential e, the greatest is a draw from q, and the
w greatest, in order, are w draws without replacement.

Source: Leviathan et al. (2023), appendix A.1, for one child; SpecInfer (Miao et al., 2024), section 4.3, with
replacement; recursive rejection sampling (Jeon et al., 2024), section 3, without.
"""

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from treewy._decoding import Decoding, RowOfTree
from treewy._draft_tree import DraftTree, Sampling
from treewy.ops import PADDING


def sibling_acceptance(
    target_probs: Tensor, draft_probs: Tensor | None, token_ids: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """Return how siblings are accepted, and what is left when none is.

    Args:
        target_probs: The target's distribution after their parent [R, V].
        draft_probs: The distribution that the first of them was drawn from [R, V]; None for "top".
        token_ids: Their tokens, in the order of drafting [R, W]; behind them -1, where others have more siblings.
        sampling: How they were chosen.

    Returns:
        The probability of accepting each, given that those before it were rejected [R, W], and the target's
        distribution given that all were [R, V].
    """
    p, q = target_probs, draft_probs
    accept = []
    for token in token_ids.unbind(dim=1):
        absent = token[:, None] < 0
        token = token[:, None].clamp(min=0)
        if sampling == "top":
            drawn_from = torch.zeros_like(p).scatter(1, token, 1.0)
        else:
            assert q is not None
            drawn_from = q / q.sum(dim=1, keepdim=True)
        ratio = p.gather(1, token) / drawn_from.gather(1, token)
        accept.append(torch.where(absent, 0.0, ratio.clamp(max=1.0)))
        residual = (p - drawn_from).clamp(min=0.0)
        mass = residual.sum(dim=1, keepdim=True)
        # without mass a sibling that is there is always accepted
        p = torch.where(absent | ~(mass > 0), p, residual / mass)
        if sampling == "without_replacement":
            assert q is not None
            q = q.scatter(1, token, 0.0)
    accepted = torch.cat(accept, dim=1) if accept else target_probs[:, :0]
    return accepted, p


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

    def choose_paths(
        self, scores: Tensor, token_ids: Tensor, parents: Tensor, draft: DraftTree | None
    ) -> tuple[Tensor, Tensor]:
        """Accept children and then draw one more token; see ``Decoding.choose_paths``."""
        rows = torch.arange(len(scores), device=scores.device)
        going = parents[:, 0] != PADDING
        node = torch.where(going, 0, -1)
        bonus = torch.zeros_like(node)
        while bool(going.any()):
            here = rows[going]
            probs = scores[here, node[here]].softmax(dim=-1)
            token, child = self._step(probs, node[here], token_ids[here], parents[here], draft, here)
            bonus[here] = token
            node[here] = torch.where(child < 0, node[here], child)
            going[here] = child >= 0
        return node, bonus

    def choose(self, scores: Tensor, reached: Tensor, tree: RowOfTree) -> tuple[Tensor, Tensor]:
        """Accept a child or draw another token; see ``Decoding.choose``."""
        row = torch.tensor([tree.row], device=scores.device)
        probs = scores.softmax(dim=-1)[None]
        token, child = self._step(probs, reached, tree.token_ids[None], tree.parents[None], tree.draft, row)
        return token, child[child >= 0]

    def _step(
        self,
        probs: Tensor,
        node: Tensor,
        token_ids: Tensor,
        parents: Tensor,
        draft: DraftTree | None,
        rows: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Draw the tokens [R] that follow one node [R] each, and tell which children [R] they are, -1 for none."""
        if not bool(probs.isfinite().all()):
            row = int(rows[probs.isfinite().all(dim=-1).logical_not()][0])
            raise ValueError(
                f"the scores of row {row} are NaN, infinite, or -inf for every token, so nothing can be sampled; look "
                "for an overflow in the model's logits (half precision?) and for logits processors that leave no token"
            )
        is_child = parents == node[:, None]
        width = int(is_child.sum(dim=1).max())
        children = is_child.int().argsort(dim=1, descending=True, stable=True)[:, :width]
        tokens = torch.where(is_child.gather(1, children), token_ids.gather(1, children), -1)
        draft_probs: Tensor | None = None
        sampling: Sampling = "top"
        if width > 0:
            assert draft is not None
            sampling = draft.sampling
            if sampling != "top":
                home = draft.parents.device
                draft_probs = draft.probs_after(rows.to(home), node.to(home) - 1).to(probs)
        accept, residual = sibling_acceptance(probs, draft_probs, tokens, sampling)
        device = probs.device if self._generator is None else self._generator.device
        uniform = torch.rand(accept.shape, dtype=accept.dtype, device=device, generator=self._generator)
        accepted = torch.nn.functional.pad(uniform.to(accept.device) < accept, (0, 1), value=True)  # in the end, none
        first = accepted.int().argmax(dim=1, keepdim=True)
        others = draw(residual, self._generator)[:, None]
        token = torch.cat([tokens, others], dim=1).gather(1, first)[:, 0]
        child = torch.nn.functional.pad(children, (0, 1), value=-1).gather(1, first)[:, 0]
        return token, child
