"""The kernel of `tree_snapshots`, interpreted, against the literal recurrence. Results are filled with NaN before."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="kernels need the triton package")

from interpreted import interpreted
from parents import chain, widths
from snapshots import SnapshotInputs, expected, snapshot_inputs
from tolerances import AMPLIFIED, FLOAT32, relative_error
from treewy.ops import PADDING
from treewy.ops._snapshot_kernel import tree_snapshots_kernel
from treewy.ops._snapshots import snapshot_config, snapshot_launch
from treewy.testing import OpCase, op_cases


def launch(inputs: SnapshotInputs, **config: int) -> tuple[Tensor, Tensor]:
    batch, _, value_heads, value_dim = inputs.value.shape
    config = snapshot_config(batch * value_heads, inputs.key.shape[3], value_dim) | config
    grid, arguments, options, results = snapshot_launch(*inputs, config)
    for result in results:
        result.fill_(torch.nan)
    interpreted(tree_snapshots_kernel)[grid](*arguments, **options)
    return results


def assert_close_to_oracle(inputs: SnapshotInputs, **config: int) -> None:
    for actual, exact in zip(launch(inputs, **config), expected(inputs), strict=True):
        assert relative_error(actual, exact) <= FLOAT32


def random_tree(num_nodes: int, seed: int, reach: int = 5) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(int(torch.randint(max(-1, i - reach), i, (), generator=generator)) for i in range(num_nodes))


@given(op_cases(max_batch=2), st.integers(0, 2))
@settings(max_examples=12, deadline=None)
def test_equals_the_recurrence(case: OpCase, num_earlier: int) -> None:
    assert_close_to_oracle(snapshot_inputs(case, torch.float32, num_earlier=num_earlier))


SMALL = {"key_heads": 1, "value_heads": 2}
CASES = {
    "one node": lambda: OpCase(((-1,),)),
    "chain of 128": lambda: OpCase((chain(128),), **SMALL),
    "tree of 128": lambda: OpCase((random_tree(128, 0),), **SMALL),
    "any node may be the parent": lambda: OpCase((random_tree(40, 1, 40),), **SMALL),
    "widths 3, 3, 3": lambda: OpCase((widths(3, 3, 3),), **SMALL),
    "two chains side by side": lambda: OpCase(((-1, -1, *range(14)),), **SMALL),
    "padding at the end, as holes, and alone": lambda: OpCase(
        ((*widths(2, 2), PADDING), (-1, PADDING, 0, 2, PADDING, 2, 0, PADDING), (PADDING,) * 8)
    ),
    "96 by 64": lambda: OpCase((widths(2, 2),), key_dim=96, value_dim=64, **SMALL),
    "64 by 192": lambda: OpCase((widths(2, 2),), key_dim=64, value_dim=192, **SMALL),
    "256 by 128": lambda: OpCase((widths(2, 2),), key_dim=256, value_dim=128, **SMALL),
    "128 by 256": lambda: OpCase((widths(2, 2),), key_dim=128, value_dim=256, **SMALL),
    "eight value heads a key head": lambda: OpCase((widths(2, 2),), key_heads=3, value_heads=24),
    "as many key heads as value heads": lambda: OpCase((widths(2, 2),), key_heads=3, value_heads=3),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_recurrence_on_chosen_trees_and_sizes(name: str) -> None:
    assert_close_to_oracle(snapshot_inputs(CASES[name](), torch.float32))


@pytest.mark.parametrize("columns", [4, 8, 32])
def test_tiles_of_other_widths_change_nothing(columns: int) -> None:
    case = OpCase((widths(2, 2), random_tree(7, 2)), value_dim=21, **SMALL)
    inputs = snapshot_inputs(case, torch.float32, num_earlier=2)
    for one, other in zip(launch(inputs), launch(inputs, COLUMNS=columns), strict=True):
        assert relative_error(one, other) <= FLOAT32


def test_write_strengths_of_two_amplify_rounding_no_more_than_the_recurrence() -> None:
    inputs = snapshot_inputs(OpCase((chain(64),), key_dim=128, **SMALL), torch.float32)
    inputs = inputs._replace(
        key=inputs.key[:, :1] + 1e-3 * inputs.key,
        beta=torch.full_like(inputs.beta, 2.0),
        log_decay=torch.full_like(inputs.log_decay, -1e-4),
    )
    exact, recurrence = expected(inputs), expected(inputs, torch.float32)
    for actual, true, own in zip(launch(inputs), exact, recurrence, strict=True):
        assert relative_error(actual, true) <= AMPLIFIED * relative_error(own, true) + FLOAT32


@pytest.mark.parametrize("qk_l2norm", [True, False])
def test_short_keys_and_extreme_gates(qk_l2norm: bool) -> None:
    inputs = snapshot_inputs(OpCase((chain(12), random_tree(12, 3))), torch.float32)
    gates = -torch.logspace(-6, 1.5, 12)[None, :, None].expand_as(inputs.log_decay)
    key = torch.nn.functional.normalize(inputs.key, dim=-1) * torch.tensor([1e-3, 0.0, 1.0]).repeat(4)[:, None, None]
    assert_close_to_oracle(inputs._replace(key=key, log_decay=gates, qk_l2norm=qk_l2norm))


def test_padding_is_inert_whatever_it_holds() -> None:
    parents = ((*widths(2, 2), PADDING), (-1, PADDING, 0, 2, PADDING, 2, 0, PADDING), (PADDING,) * 8)
    inputs = snapshot_inputs(OpCase(parents), torch.float32)
    absent = inputs.parents == PADDING
    poisoned = inputs._replace(**{name: getattr(inputs, name).clone() for name in inputs._fields[:6]})
    for x in poisoned[:5]:
        x[absent] = torch.nan
    poisoned.committed_state[absent.all(1)] = torch.nan
    for clean, result in zip(launch(inputs), launch(poisoned), strict=True):
        assert torch.equal(clean, result)
        assert (result[absent] == 0).all()


def test_a_row_has_the_same_bits_alone_and_again() -> None:
    case = OpCase((widths(2, 2), chain(7), random_tree(7, 4)), **SMALL)
    inputs = snapshot_inputs(case, torch.float32, num_earlier=2)
    whole = launch(inputs)
    assert all(torch.equal(a, b) for a, b in zip(whole, launch(inputs), strict=True))
    for row in range(3):
        rows = slice(row, row + 1)
        assert all(torch.equal(a, b[rows]) for a, b in zip(launch(inputs.rows(rows)), whole, strict=True))


def test_views_are_read_as_they_lie() -> None:
    inputs = snapshot_inputs(OpCase((widths(2, 2), chain(7)), **(SMALL | {"key_heads": 2})), torch.float32)

    def view(x: Tensor) -> Tensor:
        wider = torch.cat([x, torch.full_like(x, 7)], dim=-1)[..., : x.shape[-1]]
        return wider if x.ndim < 3 else wider.transpose(1, 2).contiguous().transpose(1, 2)

    views = SnapshotInputs(*(view(x) if isinstance(x, Tensor) else x for x in inputs))
    columns_first = inputs._replace(key=inputs.key.transpose(2, 3).contiguous().transpose(2, 3))
    for other in (views, columns_first, inputs._replace(parents=inputs.parents.int())):
        assert all(torch.equal(a, b) for a, b in zip(launch(inputs), launch(other), strict=True))


def test_bfloat16_nodes_are_computed_in_float32() -> None:
    inputs = snapshot_inputs(OpCase((widths(2, 2),)), num_earlier=2).to(torch.bfloat16, torch.float32)
    _, states = launch(inputs)
    assert relative_error(states, expected(inputs)[1]) <= FLOAT32
