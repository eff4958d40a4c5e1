"""Parents to masks, depths and paths."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from parents import chain, widths
from treewy import ops
from treewy.testing import topologies


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_ancestors_depths_and_paths_equal_walking_up(data: st.DataObject) -> None:
    num_nodes = data.draw(st.integers(1, 40))
    rows = [data.draw(topologies(num_nodes)) for _ in range(data.draw(st.integers(1, 3)))]
    parents = torch.tensor(rows)
    mask, depth = ops.ancestor_mask(parents), ops.depths(parents)
    assert (mask.dtype, depth.dtype) == (torch.bool, torch.int64)
    for node in range(num_nodes):
        accepted = torch.full((len(rows),), node)
        nodes, length = ops.path_to_node(parents, accepted)
        for row, row_parents in enumerate(rows):
            expected = oracle.path(list(row_parents), node)
            assert mask[row, node].nonzero().flatten().tolist() == expected
            assert depth[row, node] == len(expected) - 1
            assert nodes[row].tolist() == expected + [-1] * (num_nodes - len(expected))
            assert length[row] == len(expected)


def test_a_chain_of_every_length_is_all_ancestors() -> None:
    for num_nodes in (1, 2, 3, 4, 5, 8, 9, 16, 17, 64, 65):
        parents = torch.tensor([chain(num_nodes)])
        assert torch.equal(ops.ancestor_mask(parents)[0], torch.ones(num_nodes, num_nodes).tril().bool())


def test_padding_rows_and_columns_are_empty() -> None:
    parents = torch.tensor([[-1, ops.PADDING, 0, 2, ops.PADDING], [ops.PADDING] * 5])
    mask = ops.ancestor_mask(parents)
    absent = parents == ops.PADDING
    assert not mask[absent].any()
    assert not mask.transpose(1, 2)[absent].any()
    assert ops.depths(parents).tolist() == [[0, -1, 1, 2, -1], [-1] * 5]


def test_accepting_nothing_or_padding_gives_the_empty_path() -> None:
    parents = torch.tensor([widths(2, 1), (-1, 0, ops.PADDING, 1, 3)])
    nodes, length = ops.path_to_node(parents, torch.tensor([-1, 2]))
    assert length.tolist() == [0, 0]
    assert (nodes == -1).all()


def test_int32_parents_give_the_same_tree() -> None:
    parents = torch.tensor([widths(3, 2)])
    assert torch.equal(ops.ancestor_mask(parents), ops.ancestor_mask(parents.int()))


def test_helpers_compile_to_one_graph_and_follow_new_parents() -> None:
    def helpers(parents: torch.Tensor, node: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ops.ancestor_mask(parents), ops.depths(parents), *ops.path_to_node(parents, node)

    compiled = torch.compile(helpers, fullgraph=True, backend="aot_eager")
    for row in (chain(7), widths(2, 2)):
        parents, node = torch.tensor([row]), torch.tensor([6])
        assert all(map(torch.equal, compiled(parents, node), helpers(parents, node)))
