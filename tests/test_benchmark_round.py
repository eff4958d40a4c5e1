"""The benchmark of whole rounds runs without a GPU as far as one can, and reports no time of wrong logits."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import load_benchmark

pytestmark = pytest.mark.usefixtures("graphs_run_as_they_are")


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_benchmark("round")


@pytest.fixture
def measure(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs the benchmark with tiny models, and returns the record that it leaves."""

    def run(*options: str) -> dict[str, Any]:
        path = tmp_path / "round.json"
        monkeypatch.setattr(sys, "argv", ["round.py", "--quick", "--json", str(path), *options])
        benchmark.main()
        record: dict[str, Any] = json.loads(path.read_text())
        return record

    return run


def test_a_row_says_what_was_measured_against_what(
    benchmark: ModuleType, measure: Callable[..., dict[str, Any]]
) -> None:
    record = measure("--models", "dense", "--sizes", "8,16,128")
    (row,) = record["rows"]
    assert (row["batch"], row["nodes"], row["prefix"], row["mode"], row["policy"]) == (
        8,
        16,
        128,
        "compiled",
        "deferred",
    )
    assert row["tokens_per_s"] == pytest.approx(8e3 / row["round_ms"])
    model = benchmark.random_model("dense", "cpu")
    weights = sum(parameter.nbytes for parameter in model.parameters()) - 151 * 32 * 4
    cache = 8 * 128 * 1 * 2 * 2 * 16 * 4  # rows, columns, attention layers, keys and values, heads, width, bytes
    assert row["floor_ms"] == pytest.approx((weights + cache) / record["copy_tb_s"] / 1e9)
    assert row["logit_error"] < 1e-5
    assert row["experts"] == 0


def test_of_experts_only_those_count_that_are_used(
    benchmark: ModuleType, measure: Callable[..., dict[str, Any]]
) -> None:
    record = measure("--models", "moe", "--sizes", "1,1,128")
    (row,) = record["rows"]
    assert (row["nodes"], row["mode"]) == (1, "plain")
    assert row["experts"] == 4 * 2  # of each layer the two of one token
    model = benchmark.random_model("moe", "cpu")
    expert = 3 * 32 * 16 * 4  # three matrices in float32
    weights = sum(parameter.nbytes for parameter in model.parameters()) - 151 * 32 * 4 - (4 * 8 - 8) * expert
    cache = 128 * 1 * 2 * 2 * 16 * 4
    assert row["floor_ms"] == pytest.approx((weights + cache) / record["copy_tb_s"] / 1e9)


def test_wrong_logits_are_not_timed(
    benchmark: ModuleType, measure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmark, "logit_errors", lambda *args: (1e-3, 3e-3, 0.0))
    with pytest.raises(SystemExit, match=r"logits of \(1, 16, 128\) are off by 3.0e-03.*1.0e-03"):
        measure("--sizes", "1,16,128")
    assert not list(tmp_path.iterdir())


def test_a_round_of_one_node_is_plain_decoding(benchmark: ModuleType) -> None:
    assert benchmark.tree_of(1, 2, "cpu").tolist() == [[-1], [-1]]
    assert benchmark.tree_of(6, 1, "cpu").tolist() == [[-1, 0, 0, 0, 1, 1]]
