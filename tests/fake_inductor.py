"""What Inductor writes for a GPU, without one. For a process of its own: it replaces parts of torch while it runs.

    python tests/fake_inductor.py kernel_cases

prints, for each function in `CASES` of that module and each sequence of kernels that it launches in eager mode, the
names of these and of all that Inductor's code runs for the first such case, for its sizes and for any.
"""

import contextlib
import importlib
import json
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.exc import TorchDynamoException
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fake_cuda import fake_cuda, obstacle, triton_target
from resources import launches

_H200 = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=140 << 30,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    L2_cache_size=50 << 20,
    gcnArchName="",
    is_integrated=0,
)

SETTINGS = {
    "fx_graph_cache": False,
    "compile_threads": 1,
    "joint_graph_constant_folding": False,
    "shape_padding": False,
}
"""Of Inductor: nothing is remembered, and nothing is computed or measured while it compiles."""


@contextlib.contextmanager
def h200() -> Iterator[None]:
    """Let torch and Triton compile for an H200."""
    replacements = {
        (CudaInterface, "is_available"): True,
        (CudaInterface, "get_device_properties"): _H200,
        (CudaInterface, "is_bf16_supported"): True,
        (CudaInterface.Worker, "get_device_properties"): _H200,
        (torch.cuda, "get_device_properties"): _H200,
    }

    def constant(value: Any) -> Any:
        return staticmethod(lambda *args, **kwargs: value)

    with contextlib.ExitStack() as stack:
        stack.enter_context(triton_target(90))
        for (owner, name), value in replacements.items():
            stack.enter_context(mock.patch.object(owner, name, constant(value)))
        DeviceProperties.create.cache_clear()
        yield


class _WrittenError(Exception):
    pass


def generated_code(function: Callable[..., Any], *args: Any, dynamic: bool = False) -> str:
    """Return what Inductor writes for `function` on CUDA tensors of the dtypes, shapes and strides of `args`.

    With `dynamic` for any such shapes: operators then choose their launches by sizes that are symbols.
    """
    written: list[str] = []

    def stop(graph: GraphLowering) -> None:
        code, *_ = graph.codegen()
        written.append(code.value)
        raise _WrittenError

    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = fake_cuda(args, mode)
    torch._dynamo.reset()
    with h200(), mode, mock.patch.object(GraphLowering, "compile_to_module", stop), config.patch(SETTINGS):
        try:
            torch.compile(function, fullgraph=True, dynamic=dynamic)(*fakes)
        except TorchDynamoException:  # Inductor's wrapping of _WrittenError, or of a failure before it
            if not written:
                raise
    (code,) = written
    return code


_RUN = r"(\w+)_\d+\.run\(|((?:torch\.ops|extern_kernels|aten)\.[\w.]+|cpp_fused\w*|\w+\.copy_)\("


def launched(code: str) -> list[str]:
    """Return the names of what the generated `code` runs, in order: kernels, opaque operators, copies between devices.

    Kernels have their own names, of which Inductor counts the uses (`name_0`); what it wrote itself is `triton_...`, or
    `cpp_...` on the CPU.
    """
    call = re.search(r"\n    def call\(.*?(?=\nrunner = )", code, re.DOTALL)
    assert call is not None, code
    found = re.findall(_RUN, call.group())
    return [kernel or other for kernel, other in found]


def _main(module: str) -> None:
    if reason := obstacle():
        print(json.dumps({"skip": reason}))
        return
    cases = importlib.import_module(module).CASES
    seen = set()
    results = {}
    for name, (function, args) in cases.items():
        eager = [launch.kernel.fn.__name__ for launch in launches(function, *args)]
        if (function, *eager) in seen:
            continue
        seen.add((function, *eager))

        def call(*args: Any, function: Any = function) -> Any:  # Dynamo wants a function of the caller's
            return function(*args)

        results[name] = {
            "eager": eager,
            "compiled": launched(generated_code(call, *args)),
            "compiled for any size": launched(generated_code(call, *args, dynamic=True)),
        }
    print(json.dumps(results))


if __name__ == "__main__":
    _main(sys.argv[1])
