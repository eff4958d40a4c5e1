"""CUDA tensors that are not there: what lets code for a GPU be compiled, and looked at, on a machine without one.

The private names of PyTorch and Triton that this takes are here, in `fake_inductor.py`, `fake_round.py` and
`interpreted.py`. Checked with torch 2.11 (CUDA build) and 2.13 (CPU build), triton 3.6 and 3.9.
"""

import contextlib
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_DEVICE_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
struct NoOpGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {};
c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new NoOpGuard());
}
"""


@functools.cache
def obstacle() -> str:
    """Prepare fake CUDA tensors, once a process, and return why there can be none, or "".

    A CPU build of torch makes them, but refuses to index or copy them, or to make them contiguous, since these enter
    the device first and it has nothing that could. So it is given something that does nothing, in C++ (1 s to compile).
    """
    if torch.version.cuda is not None:
        return ""
    compiler = shutil.which("g++")
    if compiler is None:
        return "a CPU build of torch needs g++ before it can handle fake CUDA tensors"
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(_DEVICE_GUARD)
        command = [compiler, "-std=c++20", "-DNDEBUG", "-shared", "-fPIC", f"-I{root / 'include'}", str(source)]
        command += [f"-L{root / 'lib'}", "-lc10", "-o", str(library)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            return f"g++ does not compile against this torch: {result.stderr[-500:]}"
        torch.ops.load_library(library)
    return ""


def fake_cuda(values: tuple[Any, ...], mode: FakeTensorMode) -> tuple[Any, ...]:
    """Return `values` with fake CUDA tensors of the same dtypes, shapes, strides and offsets for the tensors."""

    def fake(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        with mode:
            whole = torch.empty(x.untyped_storage().nbytes() // x.element_size(), dtype=x.dtype, device="cuda")
            return whole.as_strided(x.shape, x.stride(), x.storage_offset())

    return tuple(map(fake, values))


class _Driver:
    """What Triton asks of its driver in order to compile."""

    def __init__(self, capability: int, device: Any) -> None:
        self._target, self._device = GPUTarget("cuda", capability, 32), device

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> Any:
        return self._device

    def get_current_stream(self, device: Any) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


@contextlib.contextmanager
def triton_target(capability: int, device: Any = 0) -> Iterator[None]:
    """Let Triton compile for `capability` (90 for sm_90); what it compiled is remembered as compiled for `device`."""
    active = driver._active
    driver.set_active(_Driver(capability, device))
    try:
        yield
    finally:
        driver._active = active


@contextlib.contextmanager
def launching_with(launch: Callable[..., None]) -> Iterator[None]:
    """Let operators run their bodies, and `kernel[grid](...)` call `launch(kernel, ..., grid=grid, warmup=False)`.

    Dispatched as usual, operators on fake tensors would call their fakes, which launch nothing.
    """

    def body(operator: CustomOpDef, *args: Any, **kwargs: Any) -> Any:
        return operator._init_fn(*args, **kwargs)

    with mock.patch.object(CustomOpDef, "__call__", body), mock.patch.object(JITFunction, "run", launch):
        yield
