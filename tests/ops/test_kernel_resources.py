"""Kernels at the configurations that are shipped, compiled for GPUs that are not here: no spills, and they fit."""

from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels need the triton package")

from fake_cuda import obstacle
from kernel_cases import CASES
from resources import SHARED_BYTES, launches, resources
from toy_ops import scale_by_sum, scale_by_sum_kernel
from treewy.ops import _launch as kernel_choices


@pytest.fixture(autouse=True)
def _fake_cuda() -> None:
    if reason := obstacle():
        pytest.skip(reason)


# Compiling the unrolled kernels of large trees takes up to 12 s each, so only for the GPU that the tiles were chosen on
# and for the one with the least shared memory.
TARGETS = [
    (case, capability)
    for case in CASES
    for capability in SHARED_BYTES
    if capability in (90, 120) or not ("nodes" in case and ("tables" in case or "solve" in case))
]


# Bytes that Triton 3.9 spills. With 3.6, with which tiles were chosen on an H200, rounds of 128 x 128 spill 8 to 24
# bytes on sm_90, heads of 256 another 260; solves spill 8 behind a prefix of 32. Attention over 256 dimensions
# in 16 bits spills on GPUs where twice the warps, which do not, take half as long again; with 3.6 it spills 132 to 216
# bytes on sm_90. In float32 it keeps queries as two halves in registers, with 3.6 it spills 324 to 496 bytes of them.
KNOWN_SPILLS = {
    ("attention, 256", 90): 44,
    ("attention, 256", 100): 196,
    ("attention, 256, 48 nodes, many rows", 100): 140,
    ("attention, 256, window", 90): 152,
    ("attention, 256, window", 100): 180,
    ("attention, 256, float16", 90): 44,
    ("attention, 256, float16", 100): 196,
    ("attention, 256, float32", 80): 124,
    ("attention, 256, float32", 89): 104,
    ("attention, 256, float32", 90): 188,
    ("attention, 256, float32", 100): 188,
    ("attention, 256, float32", 120): 220,
    ("tables, float16", 80): 68,
    ("tables, 128 x 128", 89): 44,
    ("tables, 40 nodes", 90): 16,
    ("tables, 40 nodes", 120): 16,
    ("tables, 64 nodes", 90): 48,
    ("tables, 64 nodes", 120): 56,
    ("tables, prefix of 16", 90): 48,
    ("tables, prefix of 16", 100): 24,
    ("tables, prefix of 16", 120): 56,
    ("tables, prefix of 32", 90): 32,
    ("tables, prefix of 32", 100): 32,
    ("tables, prefix of 32", 120): 40,
    ("tables, 32 nodes, float16, prefix of 32", 90): 240,
    ("tables, 32 nodes, float16, prefix of 32", 120): 112,
    ("tables, 64 x 128, float16", 90): 16,
    ("tables, 64 x 128, float16", 100): 48,
    ("verify, tables, 128 x 128", 89): 32,
    ("verify, tables, 40 nodes", 90): 128,
    ("verify, tables, 40 nodes", 120): 32,
    ("verify, tables, 40 nodes, few rows", 90): 128,
    ("verify, tables, 256 x 256, float16, 40 nodes", 90): 308,
    ("verify, tables, 256 x 256, float16, 40 nodes", 120): 312,
}


@pytest.mark.parametrize(("case", "capability"), TARGETS)
def test_kernels_neither_spill_nor_exceed_shared_memory(case: str, capability: int) -> None:
    function, args = CASES[case]
    with mock.patch.object(kernel_choices, "shared_memory", return_value=SHARED_BYTES[capability]):
        found = launches(function, *args)
    assert found, "the operator launched nothing"
    for launch in found:
        taken = resources(launch, capability)
        assert taken.spill_bytes <= KNOWN_SPILLS.get((case, capability), 0), (launch.kernel, taken)
        assert taken.shared_bytes <= SHARED_BYTES[capability], (launch.kernel, taken)


@pytest.mark.parametrize("case", ["attention, 64", "snapshots, 64 x 64", "solve", "tables, 64 x 64", "verify"])
def test_numbers_from_inductor_are_computed_with_in_float32(case: str) -> None:
    """They come in float64. Sums along paths are in float64 anyway."""
    function, args = CASES[case]
    for launch in launches(function, *args):
        eager, compiled = (resources(launch, 90, as_inductor=as_inductor) for as_inductor in (False, True))
        assert compiled.ptx.count(".f64") <= eager.ptx.count(".f64") + 4, launch.kernel  # loaded and converted


def test_a_tile_that_does_not_fit_into_the_registers_is_seen_to_spill() -> None:
    def taken(num_warps: int):
        (launch,) = launches(scale_by_sum, torch.empty(64, 128, device="meta").T, 2.0, num_warps)
        return resources(launch, 90)

    wide, narrow = taken(16), taken(1)
    assert wide.spill_bytes == 0
    assert 16 < wide.registers < 128  # 128 * 64 numbers for 512 threads
    assert wide.shared_bytes > 0  # warps exchange their sums
    assert narrow.spill_bytes > 0  # 256 numbers a thread, of which 255 fit at most


def test_launches_are_taken_down_as_they_are_made() -> None:
    (launch,) = launches(scale_by_sum, torch.empty(64, 128, device="meta").T, 2.0, 8)
    x, y, *rest = launch.args
    assert (launch.kernel.fn.__name__, launch.grid, launch.kwargs) == ("scale_by_sum_kernel", (1,), {"num_warps": 8})
    assert (x.shape, x.stride(), x.device.type, y.dtype) == ((128, 64), (64, 1), "cuda", torch.float32)
    assert rest == [64, 2.0, 128, 64]


def test_what_is_known_of_addresses_and_integers_reaches_the_compiler() -> None:
    """As on a GPU: only a tensor whose address is divisible by 16 is read 16 bytes at a time."""
    whole = torch.empty(64 * 256 + 1, device="meta")

    def has_vectors(x: Tensor) -> bool:
        (launch,) = launches(lambda x: scale_by_sum_kernel[(1,)](x, x, 256, 2.0, 64, 256), x)
        return "ld.global.v4" in resources(launch, 90).ptx

    assert has_vectors(whole[:-1])
    assert not has_vectors(whole[1:])
