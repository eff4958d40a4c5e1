"""Run Triton kernels on the CPU, in Triton's interpreter, beside others of the same process that are compiled.

Triton decides when a function is decorated whether it will be interpreted: TRITON_INTERPRET=1 must be set before Triton
is first imported, and then holds for the whole process, its standard library (`tl.sum`, `tl.cumsum`, ...) included.
That would ask for a process for each kind of test. Here the decision is made at the launch instead:

    interpreted(kernel)[grid](*args, **constexprs)    launches one kernel
    run_interpreted(ops.tree_conv, *arguments)        runs an operator as on a GPU: its own launches, on CPU tensors

This rewrites a copy of the kernel's Python function as the interpreter would. While it runs, a compiled function that is
called, be it a helper in another module of kernels or one of the standard library, is rewritten likewise. When it has
run, everything is as it was: `kernel` itself still compiles.

The interpreter computes with numpy, which has no bfloat16: arithmetic in it is garbage without a warning (an inner
product is off by 1e11). Inputs of bfloat16 are read exactly by a kernel that converts them to float32 before it
computes, but results are rounded toward zero, so that comparisons are made in float32. Launch options such as
`num_warps` are ignored, and programs run one after the other: a race between them does not show.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from torch._library.custom_ops import CustomOpDef
from torch.overrides import TorchFunctionMode
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction


@functools.cache
def _rewritten(function: types.FunctionType) -> interpreter.InterpretedFunction:
    # The interpreter adds names of its own to the globals of what it rewrites, so it gets a copy of them.
    copy = types.FunctionType(
        function.__code__, dict(function.__globals__), function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return interpreter.InterpretedFunction(functools.update_wrapper(copy, function))


def _call(kernel: JITFunction, *args: Any, **kwargs: Any) -> Any:
    return _rewritten(kernel.fn).rewrite()(*args, **kwargs)


_patch_tensor_as_triton_does = interpreter._patch_lang_tensor


def _patch_tensor(tensor: Any, scope: Any) -> None:
    _patch_tensor_as_triton_does(tensor, scope)
    # For Triton 3.6, which makes an int of an array that has one dimension: numpy 2.4 refuses.
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    # The interpreter restores what the launched kernel sees of triton.language, but not what functions called by it see
    # (the standard library: tl.core). So both are patched here first, and restored last.
    sees_both = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    with (
        mock.patch.object(JITFunction, "__call__", _call),
        mock.patch.object(interpreter, "_patch_lang_tensor", _patch_tensor),
    ):
        scope = interpreter._patch_lang(sees_both)
        try:
            yield
        finally:
            scope.restore()


def _launch(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    with torch._C.DisableTorchFunction(), _interpreting():
        _rewritten(kernel.fn)[grid](*args, **kwargs)


class _Interpreted:
    def __init__(self, kernel: JITFunction) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return functools.partial(_launch, self._kernel, grid=grid, warmup=False)


def interpreted(kernel: JITFunction) -> _Interpreted:
    """Return what launches `kernel` as `kernel[grid](...)` would, interpreted, on CPU tensors."""
    return _Interpreted(kernel)


_UNINITIALISED = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)


class _CallItCuda(TorchFunctionMode):
    """Tensors say that they are on a GPU; those made for one are made on the CPU, full of NaN where nothing is said."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == torch.Tensor.device.__get__:
            return torch.device("cuda")
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        return result.fill_(torch.nan) if function in _UNINITIALISED and result.is_floating_point() else result


def run_interpreted(function: Callable[..., Any], *args: Any) -> Any:
    """Return what `function`, which calls operators, returns on a GPU: they choose launches, and these are interpreted.

    Results and scratch that an operator allocates are full of NaN before it launches a kernel.
    """

    def body(operator: CustomOpDef, *args: Any, **kwargs: Any) -> Any:
        return operator._init_fn(*args, **kwargs)

    with (
        mock.patch.object(JITFunction, "run", _launch),
        mock.patch.object(CustomOpDef, "__call__", body),
        _CallItCuda(),
    ):
        return function(*args)
