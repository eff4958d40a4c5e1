"""Register an operator once, in the form that eager, `torch.compile`, `torch.export` and Triton kernels all accept."""

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.library import triton_op

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef  # torch.library has it too, but does not export it to mypy


def tree_op(name: str, *, mutates_args: Iterable[str] = ()) -> Callable[[Callable[..., Any]], "CustomOpDef"]:
    """Register the function below as the operator `treewy::name`.

    `triton_op` rather than `custom_op`: the compiler sees into the body, whether it is the reference or launches a
    kernel. It works without the triton package too, but looks for kernels there and logs a warning for each operator
    when it finds none; where the package is absent there is nothing to find, so that warning is held back.
    """

    def register(body: Callable[..., Any]) -> "CustomOpDef":
        logger = logging.getLogger("torch._library.triton")
        level = logger.level
        if importlib.util.find_spec("triton") is None:
            logger.setLevel(logging.ERROR)
        try:
            operator = triton_op(f"treewy::{name}", _on_device_of_first(body), mutates_args=mutates_args)
            return cast("CustomOpDef", operator)
        finally:
            logger.setLevel(level)

    return register


def _on_device_of_first(body: Callable[..., Any]) -> Callable[..., Any]:
    """Run `body` with the CUDA device of its first argument as the current one, on which Triton launches.

    Code that a compiler writes enters the device itself. Tensors that only claim to be on a GPU leave CUDA untouched.
    `functools.wraps` lets PyTorch find signature and kernels in the body.
    """

    @functools.wraps(body)
    def run(first: Tensor, *rest: Any) -> Any:
        if first.device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return body(first, *rest)
        with torch.cuda.device(first.device):
            return body(first, *rest)

    return run
