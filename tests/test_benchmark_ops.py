"""The benchmark of the kernels runs without a GPU as far as one can, and reports no time of wrong outputs."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import load_benchmark

POLICIES = ["deferred", "fused", "immediate", "snapshots"]


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_benchmark("ops")


@pytest.fixture
def run(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, dict[str, Any] | None]]:
    def main(*arguments: str) -> tuple[int, dict[str, Any] | None]:
        path = tmp_path / "ops.json"
        monkeypatch.setattr(sys, "argv", ["ops.py", "--device", "cpu", "--json", str(path), *arguments])
        return benchmark.main(), json.loads(path.read_text()) if path.exists() else None

    return main


def test_every_policy_has_a_row_for_each_tree_and_batch(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, record = run("--quick", "--batches", "1", "3", "--commit", "abc")
    assert status == 0
    assert "not meaningful" in capsys.readouterr().out
    assert record["commit"] == "abc"
    assert {"command", "date", "hardware", "versions", "copy_tb_s", "rows"} <= record.keys()
    rows = record["rows"]
    assert [row["policy"] for row in rows] == POLICIES * 4
    assert {(row["batch"], row["nodes"], row["depth"]) for row in rows} == {
        (1, 4, 4),
        (1, 16, 5),
        (3, 4, 4),
        (3, 16, 5),
    }
    for row in rows:
        assert row["worst_us"] >= row["round_us"] > row["floor_us"] > 0
        assert {"widths", "key_heads", "value_heads", "head_dims", "state_dtype", "launches"} <= row.keys()
        assert all("num_warps" in kernel for kernel in row["config"].values())
        beside = [other for other in rows if (other["batch"], other["tree"]) == (row["batch"], row["tree"])]
        assert row["snapshots_us"] == beside[3]["round_us"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fault", [torch.nan, 0.02])
def test_wrong_outputs_are_not_timed(
    run: Any, benchmark: ModuleType, policy: str, fault: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = benchmark.POLICIES[policy]

    def wrong(*arguments: Any) -> tuple[Tensor, Tensor | None]:
        output, kept = right(*arguments)
        output[-1, -1, -1, -1] += fault * output.abs().max()
        return output, kept

    monkeypatch.setitem(benchmark.POLICIES, policy, wrong)
    monkeypatch.setattr(benchmark, "TREES", benchmark.TREES[:1] * 6)
    assert run("--quick") == (1, None)


def test_snapshots_too_large_to_hold_are_written_down_as_not_run(
    run: Any, benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "MAX_SNAPSHOT_BYTES", 8 * 4 * 4 * 16 * 24)  # eight states of batch 1
    status, record = run("--quick", "--batches", "1")
    assert status == 0
    assert [(row["nodes"], row["round_us"] is None, "not_run" in row) for row in record["rows"][3::4]] == [
        (4, False, False),
        (16, True, True),
    ]
    assert all(row["snapshots_us"] is None for row in record["rows"][4:])


@pytest.mark.parametrize(("nodes", "rounds"), [(1, 17), (4, 6)])
def test_the_floor_of_the_deferred_policy_is_the_mean_of_its_rounds(
    benchmark: ModuleType, nodes: int, rounds: int
) -> None:
    """Counted round by round: rows pile up until the path does not fit, and then the state takes them in."""
    layer, tree = benchmark.Layer(2, 6, 10, 14), benchmark.Tree((1,) * (nodes - 1))
    state = 6 * 10 * 14 * 4
    row = 6 * 14 * 4 + 2 * 10 * 2 + 6 * 4
    node = 2 * 2 * 10 * 2 + 6 * 14 * 2 + 6 * 4 + 6 * 2 + 6 * 14 * 2 + 6 * 14 * 4
    total, known, count = 0, 0, 0
    while True:
        known += min(3, nodes)
        total += state + nodes * node + known * row
        count += 1
        if known > 16:
            total += state
            break
        total += min(3, nodes) * row
    assert count == rounds
    assert benchmark.floor_bytes("deferred", tree, 5, layer) == pytest.approx(5 * total / count)
    assert benchmark.floor_bytes("fused", tree, 5, layer) == 5 * (2 * state + nodes * node + min(3, nodes) * row)
    assert benchmark.floor_bytes("snapshots", tree, 5, layer) == 5 * ((nodes + 1) * state + nodes * (node - 6 * 14 * 4))


def test_trees_are_those_of_the_issue(benchmark: ModuleType) -> None:
    assert [(str(tree), tree.nodes, tree.depth) for tree in benchmark.TREES] == [
        ("chain 1", 1, 1),
        ("chain 4", 4, 4),
        ("chain 8", 8, 8),
        ("chain 16", 16, 16),
        ("(2,2,2)", 15, 4),
        ("(2,2,2) + 1", 16, 5),
        ("(3,3,3)", 40, 4),
        ("(3,3,3) + 24", 64, 5),
    ]
    assert all(parent < node for tree in benchmark.TREES for node, parent in enumerate(tree.parents))
    rows = benchmark.Rows(benchmark.TREES[5], 2, benchmark.Layer(1, 2, 4, 6), "cpu")
    assert rows.path[0].tolist() == [0, 1, 3] + [-1] * 13


def test_goals_take_the_worst_row(benchmark: ModuleType) -> None:
    def row(policy: str, batch: int, nodes: int, depth: int, us: float, snapshots_us: float | None) -> dict[str, Any]:
        return {"policy": policy, "batch": batch, "nodes": nodes, "depth": depth, "round_us": us} | {
            "floor_us": 10.0,
            "snapshots_us": snapshots_us,
            "launches": 1,
        }

    rows = [
        row("deferred", 32, 16, 16, 13.0, 130.0),
        row("deferred", 32, 16, 5, 15.0, 130.0),
        row("immediate", 32, 16, 5, 99.0, 130.0),
        row("deferred", 256, 64, 5, 15.0, None),
    ]
    lines = {line[:56].strip(): line[56:].split(maxsplit=3) for line in benchmark.goal_table(rows).splitlines()}
    assert lines["batch 32, 16 nodes: x floor"] == ["1.50", "<=", "1.4", "not reached"]
    assert lines["batch 32, 16 nodes: snapshots over ours"] == ["8.67", ">=", "8", "reached"]
    assert lines["batch 32, chain 16: ReplaySSM, 64.8 us, over ours"] == ["4.98", ">=", "1.3", "reached"]
    assert lines["anywhere: ours over snapshots"] == ["0.12", "<=", "1.03", "reached"]
    assert lines["batch 1, 40 nodes: us"] == ["-", "<=", "7", "not run"]
