"""Hypothesis strategies: they draw the structure and a seed; numbers come from the seed."""

from collections.abc import Sequence

import torch

from treewy._draft_tree import DraftTree
from treewy.ops import PADDING
from treewy.testing._op_cases import OpCase
from treewy.testing._proposals import Proposal, chain, ending_at

try:
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    raise ImportError("the strategies of treewy.testing need Hypothesis; pip install hypothesis") from error


@st.composite
def topologies(draw: st.DrawFn, num_nodes: int, *, padding: bool = True) -> tuple[int, ...]:
    """Draw the parents of one row: a chain, or any forest.

    Args:
        draw: Hypothesis's own.
        num_nodes: Nodes, padding included.
        padding: Whether some rows are to have padding nodes, at the end and as holes.

    Returns:
        Parents as :mod:`treewy.ops` takes them: -1 for a child of the committed state, ``PADDING`` for no node.

    Example:
        >>> from hypothesis import given
        >>> @given(topologies(5))
        ... def check(parents):
        ...     assert all(parent < node for node, parent in enumerate(parents))
        >>> check()

    Source:
        The properties of docs/correctness.md.
    """
    is_chain = draw(st.booleans())
    num_real = draw(st.integers(0, num_nodes)) if padding and draw(st.booleans()) else num_nodes
    holes = draw(st.sets(st.integers(0, num_nodes - 1), max_size=2)) if padding else set()
    parents: list[int] = []
    candidates = [-1]
    for node in range(num_nodes):
        if node >= num_real or node in holes:
            parents.append(PADDING)
            continue
        parents.append(candidates[-1] if is_chain else draw(st.sampled_from(candidates)))
        candidates.append(node)
    return tuple(parents)


@st.composite
def op_cases(
    draw: st.DrawFn, *, max_nodes: int = 14, max_prefix: int = 5, padding: bool = True, max_batch: int = 3
) -> OpCase:
    """Draw inputs of the operators, of sizes that differ from one another wherever they can.

    Args:
        draw: Hypothesis's own.
        max_nodes: Most nodes a row.
        max_prefix: Most known nodes before the tree.
        padding: Whether some rows are to have padding nodes.
        max_batch: Most rows.

    Returns:
        The case, whose methods make the tensors.

    Example:
        >>> from hypothesis import given
        >>> from treewy.ops import tree_conv
        >>> @given(op_cases())
        ... def check(case):
        ...     inputs = case.conv_inputs()
        ...     assert tree_conv(*inputs).shape == inputs.x.shape
        >>> check()

    Source:
        The properties of docs/correctness.md.
    """
    batch = draw(st.integers(1, max_batch))
    key_heads = draw(st.sampled_from([n for n in (1, 2, 3) if n != batch]))
    value_heads = key_heads * draw(st.integers(1, 4))
    used = {batch, key_heads, value_heads}
    num_nodes = draw(st.sampled_from([n for n in range(1, max_nodes + 1) if n not in used]))
    key_dim = draw(st.sampled_from([n for n in range(4, 18) if n not in used | {num_nodes}]))
    value_dim = draw(st.sampled_from([n for n in range(4, 18) if n not in used | {num_nodes, key_dim}]))
    known = draw(st.integers(0, max_prefix))
    return OpCase(
        parents=tuple(draw(topologies(num_nodes, padding=padding)) for _ in range(batch)),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        prefix_parents=tuple(draw(st.integers(-1, row - 1)) for row in range(known)),
        attach=tuple(tuple(draw(st.integers(-1, known - 1)) for _ in range(num_nodes)) for _ in range(batch)),
        seed=draw(st.integers(0, 2**31 - 1)),
    )


@st.composite
def draft_trees(draw: st.DrawFn, vocab_size: int, *, batch: int = 1, max_nodes: int = 8) -> DraftTree:
    """Draw a draft of any tokens, with another topology and number of nodes in each row.

    Args:
        draw: Hypothesis's own.
        vocab_size: Tokens are below this.
        batch: Rows.
        max_nodes: Most nodes a row.

    Returns:
        The trees, on the CPU.

    Example:
        >>> from hypothesis import given
        >>> @given(draft_trees(50, batch=2))
        ... def check(tree):
        ...     assert tree.token_ids.shape == tree.parents.shape
        >>> check()

    Source:
        :class:`treewy.DraftTree`.
    """
    size = draw(st.integers(0, max_nodes))
    rows = [draw(topologies(size, padding=False)) if size > 0 else () for _ in range(batch)]
    num_nodes = [draw(st.integers(0, size)) for _ in range(batch)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    return DraftTree(
        torch.randint(vocab_size, (batch, size), generator=generator),
        torch.tensor(rows, dtype=torch.int64),
        num_nodes=torch.tensor(num_nodes),
    )


@st.composite
def proposals(draw: st.DrawFn, *, max_nodes: int = 8) -> Proposal:
    """Draw a proposal: nothing, a chain or any tree, with any path of it to be accepted, or none.

    Args:
        draw: Hypothesis's own.
        max_nodes: Most nodes.

    Returns:
        The proposal.

    Example:
        >>> from hypothesis import given
        >>> @given(proposals())
        ... def check(proposal):
        ...     assert len(proposal.accepted) <= len(proposal.parents) <= 8
        >>> check()

    Source:
        :class:`ScriptedDrafter`.
    """
    size = draw(st.integers(0, max_nodes))
    if draw(st.booleans()):
        return chain(size, draw(st.integers(0, size)))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    return ending_at(parents, draw(st.integers(-1, size - 1)))


def scripts(batch: int, *, max_rounds: int = 4, max_nodes: int = 8) -> st.SearchStrategy[Sequence[Sequence[Proposal]]]:
    """Draw the scripts of a batch for a :class:`ScriptedDrafter`, one a row.

    Args:
        batch: Rows.
        max_rounds: Most proposals before a script begins anew.
        max_nodes: Most nodes of a proposal.

    Returns:
        The strategy.

    Example:
        >>> from hypothesis import given
        >>> @given(scripts(2))
        ... def check(rows):
        ...     ScriptedDrafter([[5, 6, 7], [8, 9]], rows)
        >>> from treewy.testing import ScriptedDrafter
        >>> check()

    Source:
        :class:`ScriptedDrafter`.
    """
    row = st.lists(proposals(max_nodes=max_nodes), min_size=1, max_size=max_rounds)
    return st.lists(row, min_size=batch, max_size=batch)
