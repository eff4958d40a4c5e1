"""`torch.compile` for CUDA, where there is none: what Inductor writes runs the kernels of the operators alone."""

import pytest

from own_process import results_of

pytest.importorskip("triton", reason="kernels need the triton package")


def test_compiled_operators_run_their_kernels_and_nothing_else() -> None:
    """No call of an operator that stayed opaque, and no copy: a commit writes into the pool itself."""
    for name, launched in results_of("fake_inductor.py", "kernel_cases").items():
        assert launched["eager"], name
        assert launched["compiled"] == launched["compiled for any size"] == launched["eager"], name


def test_copies_and_opaque_operators_would_be_seen() -> None:
    kernel = ["scale_by_sum_kernel"]
    results = results_of("fake_inductor.py", "toy_ops")
    for mode in ("compiled", "compiled for any size"):
        launched = {name: result[mode] for name, result in results.items()}
        assert launched["functional"] == launched["in place"] == kernel
        before, *kernels, after = launched["in place, on a part of a pool"]
        assert (before.startswith("triton_"), kernels, after.startswith("triton_")) == (True, kernel, True)
        before, *kernels = launched["needs a copy"]
        assert (before.startswith("triton_"), kernels) == (True, kernel)
        copy, addition = launched["leaves the GPU"]
        assert (copy.endswith("copy_"), addition.startswith("cpp_")) == (True, True)
        assert launched["opaque"] == ["torch.ops.treewy_tests.opaque.default"]
