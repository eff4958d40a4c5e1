"""Rounds behind a ring on a GPU, from poisoned memory: a path is appended or folded, then a tree is solved."""

import dataclasses

import pytest
import torch
from torch import Tensor

import rounds
from gpu_solves import DIMS, DTYPES, SIZES, bound, clone, rounding, same_bits
from rounds import Errors, Rounds, by_recurrence, by_reference, play
from tolerances import (
    STATE_AFTER_COMMITS,
)
from treewy import ops

pytestmark = pytest.mark.gpu


ROUNDS = {
    "batch 1": Rounds(batch=1, nodes=16, number=12),
    "batch 5, 40 nodes": Rounds(batch=5, nodes=40, number=12, seed=1, without_slot=True),
    "batch 40": Rounds(batch=40, nodes=16, number=12, seed=2, without_slot=True),
    "batch 70": Rounds(batch=70, nodes=16, number=8, seed=12, without_slot=True),
    "ring of 5": Rounds(batch=4, nodes=20, ring=5, number=12, seed=3),
    "ring of 3, 33 rows": Rounds(batch=33, nodes=12, ring=3, number=8, seed=4),
    "no ring": Rounds(batch=3, ring=0, nodes=18, number=8, seed=5),
    "chains of 70": Rounds(batch=3, nodes=70, chains=True, number=6, seed=6),
    "any trees of 128": Rounds(batch=3, nodes=128, number=6, seed=7),
    "whole chains of 11, ring of 3": Rounds(batch=18, nodes=11, ring=3, chains=True, accept_last=True, seed=8),
    "ratio of 8": Rounds(batch=2, key_heads=1, value_heads=8, nodes=20, number=8, seed=9),
    "raw keys": Rounds(batch=9, nodes=20, qk_l2norm=False, number=8, seed=10),
}


def assert_within(errors: Errors, dtype: torch.dtype) -> None:
    assert errors.output <= bound(dtype) + rounding(dtype)
    assert errors.pseudo_value <= bound(dtype)
    assert errors.state <= bound(dtype)


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("shape", ROUNDS)
def test_rounds_equal_the_reference_in_float64(shape: str, dims: tuple[int, int], dtype: torch.dtype) -> None:
    case = dataclasses.replace(ROUNDS[shape], device="cuda", dtype=dtype, key_dim=dims[0], value_dim=dims[1])
    assert_within(play(case, by_reference), dtype)


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounds_equal_the_recurrence(dtype: torch.dtype) -> None:
    case = Rounds(nodes=20, number=8, seed=11, device="cuda", dtype=dtype, key_dim=96, value_dim=64, without_slot=True)

    def on_cpu(case: Rounds, state: Tensor, tree: rounds.Round) -> rounds.Exact:
        exact = by_recurrence(case, state.cpu(), rounds.Round(*(x.cpu() for x in tree)))
        return rounds.Exact(*(x.cuda() for x in exact))

    assert_within(play(case, on_cpu), dtype)


@pytest.mark.parametrize("batch", [2, 20])
@pytest.mark.parametrize("ring", [0, 7, 16])
def test_the_state_after_2500_commits_of_bfloat16_inputs_has_the_error_of_the_first(ring: int, batch: int) -> None:
    case = Rounds(
        **(SIZES | {"key_dim": 128, "value_dim": 128}),
        **{"batch": batch, "nodes": 4, "ring": ring, "number": 2500, "accept_last": True, "chains": True, "gate": 2e-3},
    )
    errors = play(case, by_reference)
    assert errors.state <= STATE_AFTER_COMMITS
    assert_within(errors, torch.bfloat16)


@pytest.mark.parametrize("nodes", [9, 20, 100])
@pytest.mark.parametrize("batch", [3, 20])
def test_a_round_has_the_bits_that_a_row_has_alone_and_again(batch: int, nodes: int) -> None:
    """Some rows fold, others append. Alone means: in a batch for which the same launches are chosen."""
    engine, tree = rounds.engine_after(Rounds(**SIZES, batch=batch, nodes=nodes, ring=5, number=4, seed=12))
    values = engine.arguments(tree)
    whole = clone(values)
    results = ops.tree_wy_verify_(*whole)
    written = (0, 2, 3, 4, 6)
    for _ in range(3):
        again = clone(values)
        assert all(same_bits(a, b) for a, b in zip(ops.tree_wy_verify_(*again), results, strict=True))
        assert all(same_bits(again[i], whole[i]) for i in written)
    for row in range(0, batch, 4):
        others = clone(values)
        keep = torch.arange(batch, device="cuda") == row
        for i, x in enumerate(others):
            # What is floating and has a row each: all but this row become other numbers.
            if i in {2, 3, 4, 6, 7, 8, 9, 10, 11, 13, 14}:
                x[~keep] = x[~keep].nan_to_num(nan=0.0) * 0.5
        others[16][~keep] = 0  # nothing accepted elsewhere
        output, known = ops.tree_wy_verify_(*others)
        assert same_bits(output[row], results[0][row])
        assert known[row] == results[1][row]
        slot = values[1][row]
        assert slot < 0 or same_bits(others[0][slot], whole[0][slot])
        assert all(same_bits(others[i][row], whole[i][row]) for i in written[1:])
