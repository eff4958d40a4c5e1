"""What a kernel takes of a GPU, registers, spills and shared memory, found by compiling it where there is none.

    for launch in launches(ops.tree_conv, *arguments):
        print(launch.kernel.__name__, resources(launch, capability=90))

runs the operator on fake CUDA tensors and takes down what it launches, so that no test repeats a list of arguments or a
choice of configuration; then has Triton compile each launch exactly as it would for a GPU: dtypes of pointers, which
pointers and integers are divisible by 16, integers that are 1. Triton brings the assembler along (`ptxas`).
"""

import contextlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction

from fake_cuda import fake_cuda, launching_with, triton_target

# What one block may have, in bytes (CUDA C++ programming guide, "technical specifications per compute capability").
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: arguments in order, then constexprs and options such as `num_warps` by name."""

    kernel: JITFunction
    grid: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Resources:
    """Registers a thread, bytes that it spills (stores and loads), bytes of shared memory a block; and the assembly."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    ptx: str = field(repr=False)


class _Pointer:
    """What Triton looks at in a tensor: its dtype, and whether its address is divisible by 16."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._offset = tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return self._offset


def launches(function: Callable[..., Any], *args: Any) -> list[Launch]:
    """Return the launches that `function` makes on CUDA tensors with the dtypes, shapes and strides of `args`."""
    found: list[Launch] = []

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append(Launch(kernel, grid, args, kwargs))

    mode = FakeTensorMode()
    fakes = fake_cuda(args, mode)
    with mode, launching_with(record):
        function(*fakes)
    return found


def resources(launch: Launch, capability: int, *, as_inductor: bool = False) -> Resources:
    """Compile `launch` for `capability` (90 for sm_90) and return what it takes.

    Numbers reach a kernel in float32, from the code of Inductor in float64.
    """

    def argument(x: Any) -> Any:
        return _Pointer(x) if isinstance(x, Tensor) else x

    args = [argument(x) for x in launch.args]
    kwargs = {name: argument(x) for name, x in launch.kwargs.items()}
    device = object()  # under which this one is remembered by the kernel, beside those of real devices
    output = io.StringIO()
    with (
        triton_target(capability, device),
        triton.knobs.compilation.scope(),
        triton.knobs.nvidia.scope(),
        contextlib.redirect_stdout(output),
    ):
        triton.knobs.compilation.always_compile = True  # what is found in the cache on disk brings no log
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = launch.kernel.run(*args, grid=launch.grid, warmup=True, **kwargs)
        if as_inductor:
            source = compiled.src
            source.signature = {name: "fp64" if kind == "fp32" else kind for name, kind in source.signature.items()}
            options = {name: getattr(compiled.metadata, name) for name in ("num_warps", "num_stages")}
            compiled = triton.compile(source, target=compiled.metadata.target, options=options)
    del launch.kernel.device_caches[device]
    log = output.getvalue()
    return Resources(
        registers=max(map(int, re.findall(r"Used (\d+) registers", log))),
        spill_bytes=sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        shared_bytes=compiled.metadata.shared,
        ptx=compiled.asm["ptx"],
    )
