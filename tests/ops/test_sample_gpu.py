"""The kernel of `tree_sample` on a GPU: the choices of the reference, and the target's distribution from a graph."""

import pytest
import torch

from distributions import p_value, total_variation
from sampled_trees import drawn_trees
from tolerances import CHI_SQUARE_P_VALUE, TOTAL_VARIATION_OF_200_000_DRAWS
from treewy import ops
from treewy.ops._sample import SAMPLINGS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("vocab_size", [5, 4096, 50_257])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_chooses_as_the_reference(sampling: str, vocab_size: int) -> None:
    for seed in range(20):
        trees = drawn_trees(sampling, vocab_size, seed, batch=7)
        expected = ops.tree_sample(*trees)
        ours = ops.tree_sample(*(x.cuda() for x in trees[:-1]), sampling)
        for mine, right in zip(ours, expected, strict=True):
            assert torch.equal(mine.cpu(), right)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_200_000_draws_of_a_captured_graph_have_the_target_distribution(sampling: str) -> None:
    """Two siblings of a root in 2,000 rows, in a graph that is replayed with new numbers in its places."""
    rows, replays = 2000, 100
    generator = torch.Generator("cuda").manual_seed(5)
    p, q = torch.randn(2, 6, generator=generator, device="cuda").mul(1.5).softmax(dim=-1)
    probs = p.expand(rows, 3, -1).contiguous()
    drafts = q.expand(rows, 1, -1)[:, : 0 if sampling == "top" else 1].contiguous()
    tokens = torch.zeros(rows, 3, dtype=torch.int64, device="cuda")
    parents = torch.tensor([-1, 0, 0], device="cuda").expand(rows, -1).contiguous()
    index = torch.zeros_like(tokens)
    uniform, exponential = torch.zeros(rows, 3, device="cuda"), torch.ones(rows, 6, device="cuda")

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return ops.tree_sample(probs, tokens, parents, drafts, index, uniform, exponential, sampling)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        node, token = run()
    drawn = []
    for _ in range(replays):
        if sampling == "top":
            tokens[:, 1:] = q.topk(2).indices
        else:
            replaced = sampling == "with_replacement"
            tokens[:, 1:] = q.expand(rows, -1).multinomial(2, replacement=replaced, generator=generator)
        uniform.uniform_(generator=generator)
        exponential.exponential_(generator=generator)
        graph.replay()
        drawn.append(torch.where(node > 0, tokens.gather(1, node[:, None])[:, 0], token).cpu())
    emitted, expected = torch.cat(drawn), p.cpu()
    assert total_variation(emitted, expected) < TOTAL_VARIATION_OF_200_000_DRAWS
    by_token = {(token,): probability for token, probability in enumerate(expected.tolist())}
    assert p_value(((token,) for token in emitted.tolist()), by_token) > CHI_SQUARE_P_VALUE
