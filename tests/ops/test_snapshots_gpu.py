"""The kernel of `tree_snapshots` on a CUDA device. Results are filled with NaN before each launch."""

import pytest
import torch
from torch import Tensor

from parents import chain, widths
from snapshots import SnapshotInputs, expected, snapshot_inputs
from tolerances import AMPLIFIED, BFLOAT16_PAIR, BFLOAT16_ROUNDING, FLOAT32, relative_error
from treewy import ops
from treewy.ops import PADDING
from treewy.testing import OpCase

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def nan_in_new_memory():
    """With deterministic algorithms PyTorch fills memory that nobody has written with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device="cuda").isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def random_tree(num_nodes: int, seed: int, reach: int = 5) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(int(torch.randint(max(-1, i - reach), i, (), generator=generator)) for i in range(num_nodes))


def launch(inputs: SnapshotInputs) -> tuple[Tensor, Tensor]:
    results = ops.tree_snapshots(*(x.cuda() if isinstance(x, Tensor) else x for x in inputs))
    return results[0].cpu(), results[1].cpu()


def assert_close_to_oracle(inputs: SnapshotInputs) -> None:
    output, states = launch(inputs)
    exact_output, exact_states = expected(inputs)
    rounding = 0.0 if inputs.value.dtype == torch.float32 else BFLOAT16_ROUNDING
    assert relative_error(output, exact_output) <= FLOAT32 + rounding
    assert relative_error(states, exact_states) <= FLOAT32


TREES = {
    "one node": ((-1,),),
    "chain of 4": (chain(4),),
    "chain of 16 and a random tree": (chain(16), random_tree(16, 0)),
    "widths 3, 3, 3": (widths(3, 3, 3),),
    "any node may be the parent": (random_tree(40, 1, 40), random_tree(40, 2, 40)),
    "chain of 128": (chain(128),),
    "tree of 128": (random_tree(128, 3),),
    "two chains side by side": ((-1, -1, *range(14)),),
    "padding at the end, as holes, and alone": (
        (*widths(2, 2), PADDING),
        (-1, PADDING, 0, 2, PADDING, 2, 0, PADDING),
        (PADDING,) * 8,
    ),
}
SIZES = [(7, 9), (64, 64), (64, 192), (96, 64), (128, 128), (128, 256), (192, 96), (256, 128), (256, 256)]


@pytest.mark.parametrize("num_earlier", [0, 1, 3])
@pytest.mark.parametrize("tree", TREES)
def test_equals_the_recurrence_on_trees(tree: str, num_earlier: int) -> None:
    case = OpCase(TREES[tree], key_dim=128, value_dim=128, key_heads=1, value_heads=2)
    assert_close_to_oracle(snapshot_inputs(case, torch.float32, num_earlier=num_earlier))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_the_recurrence_on_sizes(size: tuple[int, int], dtype: torch.dtype) -> None:
    case = OpCase((widths(2, 2, 1), random_tree(11, 4)), key_dim=size[0], value_dim=size[1], key_heads=2, value_heads=4)
    assert_close_to_oracle(snapshot_inputs(case, num_earlier=2).to(dtype, torch.float32))


@pytest.mark.parametrize("size", [(64, 64), (96, 192), (128, 128), (256, 256)], ids=str)
def test_rows_among_many_are_as_exact_as_alone(size: tuple[int, int]) -> None:
    """Wider tiles: not the bits of a row alone."""
    trees = (widths(2, 2, 1), random_tree(11, 6))
    case = OpCase(trees, key_dim=size[0], value_dim=size[1], key_heads=8, value_heads=16)
    few = snapshot_inputs(case, num_earlier=2).to(torch.bfloat16, torch.float32)
    many = SnapshotInputs(*(x.repeat(16, *[1] * (x.ndim - 1)) if isinstance(x, Tensor) else x for x in few))
    for alone, among in zip(launch(few), launch(many), strict=True):
        assert torch.equal(among, among[:2].repeat(16, *[1] * (among.ndim - 1)))
        rounding = BFLOAT16_PAIR if alone.dtype == torch.bfloat16 else 0.0
        assert relative_error(among[:2], alone) <= FLOAT32 + rounding


@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
def test_equals_the_recurrence_on_head_ratios(ratio: int) -> None:
    case = OpCase((widths(2, 2),), key_heads=3, value_heads=3 * ratio, key_dim=64, value_dim=64)
    assert_close_to_oracle(snapshot_inputs(case, torch.float32))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rounded_states_are_what_children_start_from(size: tuple[int, int]) -> None:
    case = OpCase((random_tree(13, 5),), key_dim=size[0], value_dim=size[1])
    inputs = snapshot_inputs(case).to(torch.bfloat16, torch.bfloat16)
    output, states = launch(inputs)
    for node, parent in enumerate(inputs.parents[0].tolist()):
        before = inputs.committed_state if parent < 0 else states[:, parent]
        step = inputs.nodes([node], torch.tensor([[-1]]), states[:, :0])._replace(committed_state=before)
        exact_output, exact_states = expected(step)
        assert relative_error(output[:, [node]], exact_output) <= BFLOAT16_ROUNDING + FLOAT32
        assert relative_error(states[:, [node]], exact_states) <= BFLOAT16_ROUNDING + FLOAT32


def test_write_strengths_of_two_amplify_rounding_no_more_than_the_recurrence() -> None:
    inputs = snapshot_inputs(OpCase((chain(64),), key_dim=128), torch.float32)
    inputs = inputs._replace(
        key=inputs.key[:, :1] + 1e-3 * inputs.key,
        beta=torch.full_like(inputs.beta, 2.0),
        log_decay=torch.full_like(inputs.log_decay, -1e-4),
    )
    exact, recurrence = expected(inputs), expected(inputs, torch.float32)
    for actual, true, own in zip(launch(inputs), exact, recurrence, strict=True):
        assert relative_error(actual, true) <= AMPLIFIED * relative_error(own, true) + FLOAT32


def test_padding_is_inert_whatever_it_holds() -> None:
    trees = TREES["padding at the end, as holes, and alone"]
    inputs = snapshot_inputs(OpCase(trees, key_dim=64, value_dim=64), torch.float32)
    absent = inputs.parents == PADDING
    poisoned = inputs._replace(**{name: getattr(inputs, name).clone() for name in inputs._fields[:6]})
    for x in poisoned[:5]:
        x[absent] = torch.nan
    poisoned.committed_state[absent.all(1)] = torch.nan
    for clean, result in zip(launch(inputs), launch(poisoned), strict=True):
        assert torch.equal(clean, result)
        assert (result[absent] == 0).all()


def test_a_row_has_the_same_bits_beside_others_and_again() -> None:
    """In a batch of the same size: tiles depend on how many states there are, and sums on tiles."""
    trees = (widths(2, 2, 2), chain(15), *(random_tree(15, seed) for seed in range(6, 20)))
    case = OpCase(trees, key_dim=128, value_dim=128, key_heads=16, value_heads=32)
    inputs = snapshot_inputs(case).to(torch.bfloat16, torch.float32)
    whole = launch(inputs)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(whole, launch(inputs), strict=True))
    for row in range(len(trees)):
        others = [other for other in range(len(trees)) if other != row]
        shuffled = inputs._replace(**{name: getattr(inputs, name).clone() for name in inputs._fields[:7]})
        for x in shuffled[:7]:
            x[others] = x[others].flip(0)
        assert all(torch.equal(a[row], b[row]) for a, b in zip(launch(shuffled), whole, strict=True))
        assert not torch.equal(launch(shuffled)[0], whole[0])


def test_a_tree_grown_in_parts_has_the_bits_of_the_tree_at_once() -> None:
    case = OpCase((widths(3, 2, 2), random_tree(22, 20)), key_dim=64, value_dim=64)
    inputs = snapshot_inputs(case, torch.float32).to(torch.bfloat16, torch.float32)
    output, states = launch(inputs)
    grown = states[:, :0]
    for first, last in ((0, 1), (1, 4), (4, 15), (15, 22)):
        nodes = list(range(first, last))
        part_output, part_states = launch(inputs.nodes(nodes, inputs.parents[:, nodes], grown))
        assert torch.equal(part_output, output[:, nodes])
        grown = torch.cat([grown, part_states], dim=1)
    assert torch.equal(grown, states)


def on_gpu(case: OpCase, num_earlier: int = 0) -> SnapshotInputs:
    return snapshot_inputs(case, num_earlier=num_earlier).to(torch.bfloat16, torch.float32, "cuda")


def test_float64_runs_the_reference() -> None:
    inputs = snapshot_inputs(OpCase((widths(2, 2),)))
    for actual, exact in zip(launch(inputs), ops.tree_snapshots(*inputs), strict=True):
        assert relative_error(actual, exact) <= FLOAT32


@pytest.mark.parametrize("num_earlier", [0, 2])
def test_opcheck(num_earlier: int) -> None:
    torch.use_deterministic_algorithms(False)  # under which tracing refuses memory that is not filled
    torch.library.opcheck(torch.ops.treewy.tree_snapshots.default, tuple(on_gpu(OpCase((widths(2, 2),)), num_earlier)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_it_gives_the_numbers_of_eager(dynamic: bool) -> None:
    """Not the bits: without knowing that strides are multiples of 16 a compiler sums norms in another order."""
    torch.use_deterministic_algorithms(False)
    compiled = torch.compile(ops.tree_snapshots, fullgraph=True, dynamic=dynamic)
    for trees in ((widths(2, 2), chain(7)), (widths(3, 3), chain(13), random_tree(13, 21))):
        inputs = on_gpu(OpCase(trees, key_dim=64, value_dim=64))
        (output, states), (eager_output, eager_states) = compiled(*inputs), ops.tree_snapshots(*inputs)
        assert relative_error(output, eager_output) <= BFLOAT16_PAIR
        assert relative_error(states, eager_states) <= FLOAT32


def test_a_captured_graph_replays_for_other_trees_and_numbers() -> None:
    torch.use_deterministic_algorithms(False)
    inputs = on_gpu(OpCase((widths(2, 2), chain(7)), key_dim=64, value_dim=64))
    other = on_gpu(OpCase((random_tree(7, 22), (*chain(5), PADDING, 0)), key_dim=64, value_dim=64, seed=1))
    ops.tree_snapshots(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = ops.tree_snapshots(*inputs)
    for ours, theirs in zip(inputs, other, strict=True):
        if isinstance(ours, Tensor):
            ours.copy_(theirs)
    for result in results:
        result.fill_(torch.nan)
    graph.replay()
    for a, b in zip(results, ops.tree_snapshots(*other), strict=True):
        assert torch.equal(a, b)


def test_offsets_beyond_two_to_the_31_are_addressed() -> None:
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free device memory")
    torch.use_deterministic_algorithms(False)
    batch, size = 72, 16  # 72 * 16 * 32 * 256 * 256 elements: 2^31.2, in bfloat16 4.8 GB
    value = torch.randn(1, size, 32, 256, device="cuda").bfloat16().expand(batch, -1, -1, -1)
    key = torch.randn(1, size, 4, 256, device="cuda").bfloat16().expand(batch, -1, -1, -1)
    gates = -torch.rand(1, size, 32, device="cuda").expand(batch, -1, -1)
    state = torch.randn(1, 32, 256, 256, device="cuda").bfloat16().expand(batch, -1, -1, -1)
    parents = torch.tensor([random_tree(size, 23)], device="cuda").expand(batch, -1)
    none = state[:, None][:, :0]
    output, states = ops.tree_snapshots(value, key, key, gates, gates.exp(), state, parents, none, 0.1, True)
    for result in (output, states):
        assert torch.equal(result[-1], result[0])
        assert result[0].isfinite().all()
