"""Run Triton kernels on the CPU, in Triton's interpreter, beside others of the same process that are compiled.

Triton decides when a function is decorated whether it will be interpreted: TRITON_INTERPRET=1 must be set before Triton
is first imported, and then holds for the whole process, its standard library (`tl.sum`, `tl.cumsum`, ...) included.
That would ask for a process for each kind of test. Here the decision is made at the launch instead:

    interpreted(kernel)[grid](*args, **constexprs)    launches one kernel
    run_interpreted(ops.tree_conv, *arguments)        runs an operator as on a GPU: its own launches, on CPU tensors

This rewrites a copy of the kernel's Python function as the interpreter would. While that runs, a compiled function that
it calls, be it a helper in another module of kernels or one of the standard library, is rewritten likewise. When it has
run, everything is as it was: `kernel` itself still compiles.

The interpreter computes with numpy, which has no bfloat16: left alone it adds and multiplies the bits as integers, and
cuts digits off where a GPU rounds to the nearest. Here arithmetic on bfloat16 is done in float32 and rounded, inner
products of bfloat16 are exact up to the rounding of their sums, as on a GPU. What differs from a GPU: products in tf32
and in three of them (tf32x3) have float32's precision, `tl.exp` is numpy's, programs run one after the other, so that
no race between them shows, and launch options such as `num_warps` do nothing. Inline assembly and libdevice do not run.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from torch.overrides import TorchFunctionMode
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from fake_cuda import launching_with
from treewy.ops import _launch as kernel_choices


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


def _patch_tensor(tensor: Any, scope: Any, *, original: Any = interpreter._patch_lang_tensor) -> None:
    original(tensor, scope)
    # For Triton 3.6, which makes an int of an array that has one dimension: numpy 2.4 refuses.
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


def _convert_float(
    data: Any, input_dtype: Any, output_dtype: Any, rounding: Any, *, original: Any = interpreter._convert_float
) -> Any:
    if (input_dtype, output_dtype) == (tl.float32, tl.bfloat16) and rounding != interpreter._ir.ROUNDING_MODE.RTZ:
        return torch.from_numpy(np.array(data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
    return original(data, input_dtype, output_dtype, rounding)


def _in_float32(method: Any) -> Any:
    """Let a method of the interpreter's builder convert operands in bfloat16, and its result back if all were."""

    def converting(self: Any, *args: Any) -> Any:
        dtypes = [x.dtype.scalar if isinstance(x, interpreter.TensorHandle) else None for x in args]
        if tl.bfloat16 not in dtypes:
            return method(self, *args)
        pairs = zip(args, dtypes, strict=True)
        result = method(self, *(self.cast_impl(x, tl.float32) if dtype == tl.bfloat16 else x for x, dtype in pairs))
        narrow = tl.float32 not in dtypes and result.data.dtype != np.bool_  # comparisons give bools
        return self.cast_impl(result, tl.bfloat16) if narrow else result

    return converting


_ARITHMETIC = {
    name: _in_float32(getattr(interpreter.InterpreterBuilder, name))
    for name in ("unary_op", "binary_op", "ternary_op", "create_fma", "create_dot")
}
_ARITHMETIC["get_bf16"] = lambda self, value: self.cast_impl(self.get_fp32(value), tl.bfloat16)  # Triton 3.6 has none


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    # The interpreter restores what the launched kernel sees of triton.language, but not what functions called by it see
    # (the standard library: tl.core). So both are patched here first, and restored last.
    sees_both = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    with (
        mock.patch.object(JITFunction, "__call__", _call),
        mock.patch.multiple(interpreter, _patch_lang_tensor=_patch_tensor, _convert_float=_convert_float),
        mock.patch.multiple(interpreter.InterpreterBuilder, create=True, **_ARITHMETIC),
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

    Results and scratch that an operator allocates are full of NaN before it launches a kernel. Solves in float32, which
    a GPU leaves to the reference, are interpreted too: without the rounding of halves, kernels must be as precise.
    """
    dtypes = (*kernel_choices.KERNEL_DTYPES, torch.float32)
    precise = mock.patch.object(kernel_choices, "KERNEL_DTYPES", dtypes)
    with precise, launching_with(_launch), _CallItCuda():
        return function(*args)
