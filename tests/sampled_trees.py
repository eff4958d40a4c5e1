"""Arguments of `tree_sample`, and a literal walk through one row of them."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from treewy.ops import PADDING


class SampledTrees(NamedTuple):
    probs: Tensor
    token_ids: Tensor
    parents: Tensor
    draft_probs: Tensor
    draft_index: Tensor
    uniform: Tensor
    exponential: Tensor
    sampling: str

    def rows(self) -> "Iterator[SampledTrees]":
        """The same row by row."""
        for row in range(len(self.probs)):
            yield SampledTrees(*(x[row] for x in self[:-1]), self.sampling)


def drawn_trees(sampling: str, vocab_size: int, seed: int, batch: int = 4, num_nodes: int = 8) -> SampledTrees:
    """Random trees; some tokens have no probability in some of the distributions, and the last row is padding."""
    generator = torch.Generator().manual_seed(seed)

    def probs(*shape: int) -> Tensor:
        logits = torch.randn(*shape, vocab_size, generator=generator).mul(1.5)
        unlikely = torch.rand(logits.shape, generator=generator) < 0.3
        unlikely[..., 0] = False
        return logits.masked_fill(unlikely, float("-inf")).softmax(dim=-1)

    parents = torch.full((batch, num_nodes), PADDING)
    for row in parents[:-1]:
        row[0] = -1
        for node in range(1, num_nodes):
            real = [other for other in range(node) if row[other] != PADDING]
            if torch.rand((), generator=generator) < 0.9:
                row[node] = real[int(torch.randint(len(real), (), generator=generator))]
    number = 0 if sampling == "top" else num_nodes
    index = torch.stack([torch.randperm(num_nodes, generator=generator) for _ in range(batch)])
    draft_probs = probs(batch, num_nodes)
    token_ids = torch.zeros(batch, num_nodes, dtype=torch.int64)
    for row in range(batch):
        for node in range(num_nodes):
            q = draft_probs[row, index[row, node]].clone()
            for child in (parents[row] == node).nonzero()[:, 0].tolist():
                if not bool((q > 0).any()):
                    parents[row, child] = PADDING  # as a drafter would, that has no more tokens to offer
                    continue
                token_ids[row, child] = q.multinomial(1, generator=generator)
                if sampling == "without_replacement":
                    q[token_ids[row, child]] = 0.0
    for node in range(num_nodes):  # what hangs on padding is padding
        above = parents.gather(1, parents[:, node : node + 1].clamp(min=0))[:, 0]
        parents[:, node] = torch.where((parents[:, node] >= 0) & (above == PADDING), PADDING, parents[:, node])
    uniform = torch.rand(batch, num_nodes, generator=generator)
    exponential = torch.empty(batch, vocab_size).exponential_(generator=generator)
    drafts = draft_probs[:, :number], index
    return SampledTrees(probs(batch, num_nodes), token_ids, parents, *drafts, uniform, exponential, sampling)


def walk(row: SampledTrees) -> tuple[int, int]:
    """Node and token of one row, in float64, as the rule reads."""
    parents, tokens = row.parents.tolist(), row.token_ids.tolist()
    if parents[0] == PADDING:
        return -1, 0
    node = 0
    while True:
        p = row.probs[node].double()
        q = None if row.sampling == "top" else row.draft_probs[row.draft_index[node]].double()
        accepted = None
        for child in (child for child, parent in enumerate(parents) if parent == node):
            token = tokens[child]
            drawn_from = torch.nn.functional.one_hot(torch.tensor(token), len(p)).double() if q is None else q / q.sum()
            if row.uniform[child] < p[token] / drawn_from[token]:
                accepted = child
                break
            p = (p - drawn_from).clamp(min=0)
            p = p / p.sum()
            if row.sampling == "without_replacement":
                assert q is not None
                q = q.clone()
                q[token] = 0.0
        if accepted is None:
            return node, int((p / row.exponential.double()).argmax())
        node = accepted
