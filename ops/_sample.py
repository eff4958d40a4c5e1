"""Sample a path of a verified tree without changing the target's distribution.

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

Where nothing is left, p and q_w are equal up to rounding, and the child is accepted: so what is left is always a
distribution, and a token can be drawn from it.

The walk needs one pass over the nodes. Parents precede children and siblings stand in the order of drafting, so a node
whose parent is where the walk has come to is the next sibling to try there, and an accepted one is where it goes on.
Whether a node is accepted depends on one uniform number of its own. The draw at the end is an exponential race: of
p(x) / e(x), with independent exponential e, the greatest is a draw from p. Only one race is run in a row, so that a row
has one set of e.

Source: Leviathan et al. (2023), appendix A.1, for one child; SpecInfer (Miao et al., 2024), section 4.3, with
replacement; recursive rejection sampling (Jeon et al., 2024), section 3, without.
"""

import importlib.util

import torch
from torch import Tensor

from treewy.ops._registration import tree_op
from treewy.ops._tree import PADDING
from treewy.ops._validation import check_index, check_nodes, check_rank, check_shape

if importlib.util.find_spec("triton") is not None:
    from torch.library import wrap_triton

    from treewy.ops._sample_kernel import tree_sample_kernel

SAMPLINGS = ("top", "with_replacement", "without_replacement")
_BLOCK = 4096  # tokens that a program looks at in one go


def try_sibling(probs: Tensor, draft_probs: Tensor, token: Tensor, sampling: str) -> tuple[Tensor, Tensor, Tensor]:
    """Carry out one step of the rule.

    Args:
        probs: `[R, V]`: the target's distribution after the parent, given that earlier siblings were rejected.
        draft_probs: `[R, V]`: what the sibling was drawn from, not necessarily normalised; not read for "top".
        token: `[R]`: the sibling's.
        sampling: How siblings were chosen.

    Returns:
        The probability of accepting the sibling `[R]`; given that it is rejected, the target's distribution `[R, V]`
        and what the next sibling was drawn from.
    """
    place = token[:, None].long()
    if sampling == "top":
        drawn_from = torch.zeros_like(probs).scatter(1, place, 1.0)
    else:
        drawn_from = draft_probs / draft_probs.sum(dim=1, keepdim=True)
    ratio = probs.gather(1, place) / drawn_from.gather(1, place)
    residual = (probs - drawn_from).clamp(min=0.0)
    mass = residual.sum(dim=1, keepdim=True)
    is_left = mass > 0
    accept = torch.where(is_left, ratio.clamp(max=1.0), 1.0)[:, 0]
    if sampling == "without_replacement":
        draft_probs = draft_probs.scatter(1, place, 0.0)
    return accept, torch.where(is_left, residual / mass, probs), draft_probs


def _reference(
    probs: Tensor,
    token_ids: Tensor,
    parents: Tensor,
    draft_probs: Tensor,
    draft_index: Tensor,
    uniform: Tensor,
    exponential: Tensor,
    sampling: str,
) -> tuple[Tensor, Tensor]:
    def drawn_from(node: int) -> Tensor:
        if sampling == "top":
            return probs[:, 0, :0]
        index = draft_index[:, node].long()[:, None, None]
        return draft_probs.gather(1, index.expand(-1, 1, draft_probs.shape[2]))[:, 0]

    node = torch.where(parents[:, 0] == PADDING, -1, 0)
    left, draft = probs[:, 0], drawn_from(0)
    for child in range(1, probs.shape[1]):
        accept, residual, draft_left = try_sibling(left, draft, token_ids[:, child], sampling)
        is_child = parents[:, child] == node
        accepted = is_child & (uniform[:, child] < accept)
        rejected = (is_child & ~accepted)[:, None]
        node = torch.where(accepted, child, node)
        left = torch.where(accepted[:, None], probs[:, child], torch.where(rejected, residual, left))
        draft = torch.where(accepted[:, None], drawn_from(child), torch.where(rejected, draft_left, draft))
    token = torch.where(left > 0, left / exponential, -1.0).argmax(dim=1)
    return node, torch.where(node < 0, 0, token)


@tree_op("tree_sample")
def _tree_sample(
    probs: Tensor,
    token_ids: Tensor,
    parents: Tensor,
    draft_probs: Tensor,
    draft_index: Tensor,
    uniform: Tensor,
    exponential: Tensor,
    sampling: str,
) -> tuple[Tensor, Tensor]:
    if probs.device.type != "cuda" or probs.dtype != torch.float32:
        return _reference(probs, token_ids, parents, draft_probs, draft_index, uniform, exponential, sampling)
    batch, num_nodes, vocab_size = probs.shape
    node = parents.new_empty(batch, dtype=torch.int64)
    token = parents.new_empty(batch, dtype=torch.int64)
    wrap_triton(tree_sample_kernel)[(batch,)](
        probs.contiguous(),
        token_ids.contiguous(),
        parents.contiguous(),
        draft_probs.contiguous(),
        draft_index.contiguous(),
        uniform.contiguous(),
        exponential.contiguous(),
        probs.new_empty(batch, vocab_size),
        node,
        token,
        num_nodes,
        draft_probs.shape[1],
        vocab_size,
        TOP=sampling == "top",
        REPLACED=sampling == "with_replacement",
        BLOCK=_BLOCK,
        num_warps=16,
    )
    return node, token


@_tree_sample.register_fake
def _(
    probs: Tensor,
    token_ids: Tensor,
    parents: Tensor,
    draft_probs: Tensor,
    draft_index: Tensor,
    uniform: Tensor,
    exponential: Tensor,
    sampling: str,
) -> tuple[Tensor, Tensor]:
    batch = probs.shape[0]
    return parents.new_empty(batch, dtype=torch.int64), parents.new_empty(batch, dtype=torch.int64)


def tree_sample(
    probs: Tensor,
    token_ids: Tensor,
    parents: Tensor,
    draft_probs: Tensor,
    draft_index: Tensor,
    uniform: Tensor,
    exponential: Tensor,
    sampling: str,
) -> tuple[Tensor, Tensor]:
    """Follow drafted tokens from the root as far as they are accepted, and draw the token behind them.

    The tokens of the path and the one that is drawn have the distribution of the target. On CUDA a kernel runs if all
    probabilities are in float32: one program a row, which waits for nothing on the host.

    Args:
        probs: `[B, N, V]`, floating: the target's distribution after each node.
        token_ids: `[B, N]`, integer, below V: of the nodes, the root, which is not drafted, first. Siblings stand in
            the order in which they were drawn.
        parents: `[B, N]`, integer; -1 for the root, `PADDING` for no node.
        draft_probs: `[B, P, V]`, in the dtype of `probs`: distributions that siblings were drawn from; `[B, 0, V]` for
            "top".
        draft_index: `[B, N]`, integer, from 0 to P - 1: which of them the children of each node were drawn from;
            anything for a node without children and for "top".
        uniform: `[B, N]`, floating, from 0 to below 1: a random number a node.
        exponential: `[B, V]`, floating, above 0: a random number a token, distributed exponentially.
        sampling: How siblings were chosen: "top" (however), "with_replacement" or "without_replacement".

    Returns:
        The last node of the path `[B]`, int64, 0 for the root, and the token behind it `[B]`, int64; -1 and 0 for a row
        whose root is padding. If there is a NaN in the distribution after a node on the path, both mean nothing but are
        within bounds.

    Raises:
        ValueError: A shape, a dtype or the way of sampling does not fit.

    Example:
        A root and a child with token 2, which is accepted with probability 0.5. Rejected, it is taken out, and the race
        runs between the others.

        >>> probs = torch.tensor([[[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]])
        >>> tree = torch.tensor([[0, 2]]), torch.tensor([[-1, 0]])
        >>> nothing, index, exponential = torch.zeros(1, 0, 3), torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 3)
        >>> tree_sample(probs, *tree, nothing, index, torch.tensor([[0.0, 0.4]]), exponential, "top")
        (tensor([1]), tensor([0]))
        >>> tree_sample(probs, *tree, nothing, index, torch.tensor([[0.0, 0.6]]), exponential, "top")
        (tensor([0]), tensor([1]))

    Source:
        Recursive rejection sampling; the module's docstring has the rule, its proof and its sources.
    """
    check_rank("probs", probs, "B, N, V")
    batch, num_nodes, vocab_size = probs.shape
    check_nodes("probs", num_nodes)
    for name, tensor in (("token_ids", token_ids), ("parents", parents), ("draft_index", draft_index)):
        check_shape(name, tensor, "B, N", batch, num_nodes)
        check_index(name, tensor)
    check_shape("uniform", uniform, "B, N", batch, num_nodes)
    check_shape("exponential", exponential, "B, V", batch, vocab_size)
    if sampling not in SAMPLINGS:
        raise ValueError(f"sampling is {sampling!r}, expected one of {', '.join(SAMPLINGS)}")
    check_rank("draft_probs", draft_probs, "B, P, V")
    check_shape("draft_probs", draft_probs, "B, P, V", batch, draft_probs.shape[1], vocab_size)
    if sampling != "top" and draft_probs.shape[1] < 1:
        raise ValueError(f"draft_probs has none, but sampling {sampling!r} needs them; pass them, or use 'top'")
    for name, tensor in (("draft_probs", draft_probs), ("uniform", uniform), ("exponential", exponential)):
        if tensor.dtype != probs.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected that of probs, {probs.dtype}")
    result: tuple[Tensor, Tensor] = _tree_sample(
        probs, token_ids, parents, draft_probs, draft_index, uniform, exponential, sampling
    )
    return result
