"""Rounds behind a ring of accepted tokens: the reference, and the kernels in the interpreter."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import rounds
from rounds import Errors, Rounds, by_recurrence, by_reference, play
from tolerances import (
    BFLOAT16_ROUNDING,
    FLOAT64,
    FLOAT64_PAIR,
    KERNEL_HALVES,
    STATE_AFTER_COMMITS,
    STATE_AFTER_ROUNDS,
    relative_error,
)
from treewy import ops
from treewy.ops import _launch

ROUNDING = {torch.float64: 0.0, torch.float32: 0.0, torch.float16: BFLOAT16_ROUNDING, torch.bfloat16: BFLOAT16_ROUNDING}
SHAPES = {
    "ring of 16": Rounds(number=8, seed=9),
    "ring of 5": Rounds(ring=5, seed=1, without_slot=True),
    "no ring": Rounds(ring=0, seed=2),
    "chains": Rounds(chains=True, seed=3),
    "chains longer than the ring": Rounds(ring=3, nodes=11, chains=True, accept_last=True, number=4, seed=4),
    "chains longer than 32": Rounds(ring=16, nodes=33, chains=True, accept_last=True, number=2, batch=1, seed=8),
    "chains that just fit": Rounds(ring=4, nodes=2, chains=True, accept_last=True, number=5, batch=2),
    "17 rows": Rounds(batch=17, ring=4, nodes=5, number=4, seed=5, without_slot=True, key_dim=6, value_dim=7),
    "17 rows, three tiles": Rounds(batch=17, ring=4, nodes=5, number=4, seed=7, key_dim=6, value_dim=140),
    "ratio of 3, raw keys": Rounds(key_heads=1, value_heads=3, qk_l2norm=False, seed=6),
}


@st.composite
def any_rounds(draw: st.DrawFn) -> Rounds:
    key_heads = draw(st.sampled_from([1, 2, 3]))
    return Rounds(
        batch=draw(st.integers(1, 4)),
        ring=draw(st.sampled_from([0, 1, 5, 16, 20])),
        nodes=draw(st.integers(1, 9)),
        key_heads=key_heads,
        value_heads=key_heads * draw(st.integers(1, 3)),
        key_dim=draw(st.sampled_from([7, 12])),
        value_dim=draw(st.sampled_from([8, 11])),
        number=draw(st.integers(1, 6)),
        chains=draw(st.booleans()),
        accept_last=draw(st.booleans()),
        without_slot=draw(st.booleans()),
        qk_l2norm=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31 - 1)),
    )


def interpreter() -> Any:
    pytest.importorskip("triton", reason="kernels need the triton package")
    from interpreted import run_interpreted

    return run_interpreted


def assert_within(errors: Errors, bound: float, rounding: float = 0.0) -> None:
    assert errors.output <= bound + rounding
    assert errors.pseudo_value <= bound
    assert errors.state <= bound


@given(any_rounds())
@settings(max_examples=40, deadline=None)
def test_rounds_equal_the_recurrence(case: Rounds) -> None:
    assert_within(play(dataclasses.replace(case, dtype=torch.float64), by_recurrence), FLOAT64)
    assert_within(play(case, by_recurrence), STATE_AFTER_ROUNDS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_rounds_of_any_shape_equal_the_recurrence(shape: str, dtype: torch.dtype) -> None:
    bound = FLOAT64 if dtype == torch.float64 else STATE_AFTER_ROUNDS
    assert_within(play(dataclasses.replace(SHAPES[shape], dtype=dtype), by_recurrence), bound, ROUNDING[dtype])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernels_equal_the_recurrence(shape: str) -> None:
    assert_within(play(SHAPES[shape], by_recurrence, interpreter()), STATE_AFTER_ROUNDS)


def test_the_kernels_equal_the_recurrence_with_no_more_programs_than_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with many rows, which would take the interpreter long: a program appends and folds several tiles."""
    monkeypatch.setattr(_launch, "_FEW_TABLES", 0)
    assert_within(play(SHAPES["17 rows, three tiles"], by_recurrence, interpreter()), STATE_AFTER_ROUNDS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", ["ring of 5", "chains longer than the ring"])
def test_the_kernels_lose_no_more_than_halves_of_low_precision_inputs(shape: str, dtype: torch.dtype) -> None:
    case = dataclasses.replace(SHAPES[shape], dtype=dtype, number=4)
    assert_within(play(case, by_recurrence, interpreter()), KERNEL_HALVES, ROUNDING[dtype])


@given(any_rounds())
@settings(max_examples=25, deadline=None)
def test_deferred_commits_equal_commits_at_once(case: Rounds) -> None:
    case = dataclasses.replace(case, dtype=torch.float64, without_slot=False)
    engine, pool, slots = rounds.Engine(case, rounds.call), case.pool(), case.slots
    for tree in rounds.drawn(case):
        state = pool[slots]
        none = tree.value[:, :0], tree.key[:, :0], tree.log_decay[:, :0]
        mask = torch.zeros(*tree.parents.shape, 0, dtype=torch.bool)
        output, pseudo_value, key, _ = ops.tree_wy_solve(
            *tree[:5], state, tree.parents, *none, mask, case.key_dim**-0.5, case.qk_l2norm
        )
        ops.tree_wy_commit_(pool, slots, pseudo_value, key, tree.log_decay, tree.parents, tree.accepted)
        assert relative_error(engine.verify(tree), output) <= FLOAT64_PAIR
        engine.accept(tree)
    engine.fold()
    assert relative_error(engine.pool[slots], pool[slots]) <= FLOAT64_PAIR


def test_the_state_after_2500_commits_of_bfloat16_inputs_has_the_error_of_the_first() -> None:
    case = Rounds(
        **{"batch": 2, "nodes": 3, "ring": 7, "key_heads": 1, "value_heads": 2, "key_dim": 16, "value_dim": 8},
        **{"number": 2500, "accept_last": True, "chains": True, "gate": 2e-3, "dtype": torch.bfloat16},
    )
    assert_within(play(case, by_reference), STATE_AFTER_COMMITS, BFLOAT16_ROUNDING)


def clone(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.clone() if isinstance(x, Tensor) else x for x in values)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=9e9), b.nan_to_num(nan=9e9))


@pytest.mark.parametrize("nodes", [9, 20])
def test_a_row_has_the_bits_that_it_has_alone_and_again(nodes: int) -> None:
    """Some rows fold, others append; the kernels, in one launch and in two."""
    run = interpreter()
    engine, tree = rounds.engine_after(Rounds(ring=5, nodes=nodes, number=4, accept_last=True, seed=8))
    values = engine.arguments(tree)
    whole = clone(values)
    results = run(ops.tree_wy_verify_, *whole)
    again = clone(values)
    for a, b in zip(run(ops.tree_wy_verify_, *again), results, strict=True):
        assert same(a, b)
    for row in range(3):
        alone = clone(tuple(x[row : row + 1] if isinstance(x, Tensor) and i > 0 else x for i, x in enumerate(values)))
        for a, b in zip(run(ops.tree_wy_verify_, *alone), results, strict=True):
            assert same(a, b[row : row + 1])
        slot = int(values[1][row])
        assert same(alone[0][slot], whole[0][slot])
        for written in (2, 3, 4, 6):
            assert same(alone[written], whole[written][row : row + 1])
            assert same(again[written], whole[written])


@pytest.mark.parametrize("batch", [3, 17])
def test_a_known_key_whose_norm_overflows_counts_as_none(batch: int) -> None:
    """Beside keys whose own norms do not, in one launch and in two."""
    case = Rounds(batch=batch, ring=16, nodes=4, number=2, chains=True, dtype=torch.bfloat16)
    engine, tree = rounds.engine_after(case)
    values = list(engine.arguments(tree))
    values[5] = torch.full_like(values[5], 2)  # known rows
    values[16] = torch.zeros_like(values[16])  # and no path
    for x in values[2:5]:
        x[:, :2] = x[:, 2:4] = torch.ones_like(x[:, :2])
    values[2][:, 0] = 0.0
    values[9] = (values[9].float() * 1e14).bfloat16()
    results = []
    for norm in (0.0, 1e25):
        again = clone(tuple(values))
        again[3][:, 0] = norm
        output, _ = interpreter()(ops.tree_wy_verify_, *again)
        assert output.isfinite().all()
        results.append(output)
    assert same(*results)


def test_verifying_writes_no_state_where_the_path_fits() -> None:
    engine, tree = rounds.engine_after(Rounds(number=2, nodes=5))
    before = engine.pool.clone()
    engine.verify(tree)
    assert same(engine.pool, before)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Rounds(ring=17, number=1, nodes=4), r"ring_key has 17 rows, the kernels take up to 16"),
        (Rounds(nodes=129, number=1, accept_last=True, chains=True), r"value has 129 nodes, the kernels take up to 12"),
        (Rounds(key_dim=260, number=1, nodes=2), r"value has head dimensions 260 and 13, the kernels take up to 256"),
    ],
    ids=["ring", "nodes", "width"],
)
def test_what_the_kernels_cannot_take_is_refused_and_nothing_is_written(case: Rounds, message: str) -> None:
    run = interpreter()
    engine, tree = rounds.engine_after(case)
    values = engine.arguments(tree)
    before = clone(values)
    with pytest.raises(ValueError, match=message):
        run(ops.tree_wy_verify_, *values)
    assert all(same(a, b) for a, b in zip(values, before, strict=True) if isinstance(a, Tensor))


def test_the_shapes_of_these_tests_fill_rings_and_overfill_them() -> None:
    """Otherwise these tests would show little."""
    appends = just_fit = 0
    for shape, case in SHAPES.items():
        folds, known = 0, torch.zeros(case.batch, dtype=torch.int64)
        for tree in rounds.drawn(case):
            length = ops.path_to_node(tree.parents, tree.accepted)[1]
            total = known + length
            folds += int((total > case.ring).sum())
            appends += int(((total <= case.ring) & (length > 0)).sum())
            just_fit += int(((total == case.ring) & (length > 0)).sum())
            known = torch.where(total > case.ring, 0, total)
        assert folds > 0, shape
    assert appends > just_fit > 0
