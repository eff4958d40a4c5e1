"""Rounds on CUDA, where there is none: a CUDA graph could hold all that runs in them."""

import pytest

from models import FAMILIES
from own_process import results_of

pytest.importorskip("triton", reason="kernels need the triton package")

FAMILY = "qwen3_next"
FORBIDDEN = "what no capture allows"

GRAPHS = 5
"""Of a round of two layers: each layer with what comes before it, the head, what is accepted, and the commit."""

CHOICES = (
    "greedy, behind processors",
    "sampled, top",
    "sampled, with_replacement",
    "sampled, without_replacement",
)

SEEN_IN_THE_CONTROL = {
    "unsafe: aten._local_scalar_dense.default",  # .item()
    "unsafe: aten.nonzero.default",
    "unsafe: aten.index_put.default",  # with a mask
    "not on the GPU: aten.full.default",
    "not on the GPU: prims.device_put.default",
    "left out by Inductor: DeviceCopy ops",
    "left out by Inductor: cpu ops",
    "left out by Inductor: unbacked binding ops",
    "beside the graphs: aten.add.Tensor",
}


def test_a_round_that_chooses_in_any_way_is_graphs_that_a_capture_takes_and_what_it_would_not_take_is_seen() -> None:
    """Nothing waits for the host, has a shape that depends on numbers, is on the CPU, or runs beside the graphs."""
    results = results_of("fake_round.py", FAMILY, FORBIDDEN)
    control = results.pop(FORBIDDEN)
    filtered = results.pop("a mask that decides where scores are set")
    assert results.pop(FAMILY) == {"graphs": GRAPHS, "obstacles": []}
    assert results.keys() == {*CHOICES}
    assert all(result == {"graphs": 1, "obstacles": []} for result in results.values())  # of what is accepted
    assert set(filtered["obstacles"]) == {"unsafe: aten.index_put.default"}
    assert set(control["obstacles"]) >= SEEN_IN_THE_CONTROL


def test_a_round_of_each_other_family_is_graphs_that_a_capture_takes() -> None:
    others = [family for family in FAMILIES if family != FAMILY]
    results = results_of("fake_round.py", *others)
    assert results == {family: {"graphs": GRAPHS, "obstacles": []} for family in others}
