"""Run an operator as it runs on a GPU, with its kernels interpreted: the same checks, tiles, grids and strides."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from triton.runtime.jit import JITFunction

from interpreted import interpreted


class _OnDevice(Tensor):
    """A CPU tensor that says of itself that it is on a GPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


def _body(operator: CustomOpDef, *args: Any, **kwargs: Any) -> Any:
    return operator._init_fn(*args, **kwargs)


def _plain(x: Any) -> Any:
    return x.as_subclass(Tensor) if isinstance(x, _OnDevice) else x


def _new_empty(x: Tensor, shape: Any, **kwargs: Any) -> Tensor:
    """What a kernel does not write stays NaN."""
    return x.new_full(shape, torch.nan, **kwargs)


def interpret(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`, where `function` calls operators whose bodies launch kernels on CUDA."""
    launched = []

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launched.append(kernel)
        interpreted(kernel)[grid](*map(_plain, args), **kwargs)

    on_device = (x.as_subclass(_OnDevice) if isinstance(x, Tensor) else x for x in args)
    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(CustomOpDef, "__call__", _body),
        mock.patch.object(_OnDevice, "new_empty", _new_empty, create=True),
    ):
        result = function(*on_device)
    assert launched, "the operator launched nothing"
    return _plain(result)
