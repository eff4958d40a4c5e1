"""Register an operator once, in the form that eager, `torch.compile`, `torch.export` and Triton kernels all accept."""

import importlib.util
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

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
            return cast("CustomOpDef", triton_op(f"treewy::{name}", body, mutates_args=mutates_args))
        finally:
            logger.setLevel(level)

    return register
