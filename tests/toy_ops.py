"""Small kernels and operators on which the tools that watch the real ones are tried."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op, triton_op, wrap_triton


@triton.jit
def scale_by_sum_kernel(x, y, stride, factor, rows: tl.constexpr, columns: tl.constexpr):
    at = tl.arange(0, rows)[:, None] * stride + tl.arange(0, columns)[None, :]
    tile = tl.load(x + at)
    tl.store(y + at, tile * tl.sum(tl.sum(tile, axis=0), axis=0) * factor)


@triton_op("treewy_tests::scale_by_sum", mutates_args={})
def scale_by_sum(x: Tensor, factor: float, num_warps: int) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    rows, columns = x.shape
    wrap_triton(scale_by_sum_kernel)[(1,)](x, y, columns, factor, rows, columns, num_warps=num_warps)
    return y


@triton_op("treewy_tests::scale_by_sum_", mutates_args={"x"})
def scale_by_sum_(x: Tensor, factor: float) -> None:
    rows, columns = x.shape
    wrap_triton(scale_by_sum_kernel)[(1,)](x, x, columns, factor, rows, columns)


@custom_op("treewy_tests::opaque", mutates_args={})
def opaque(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@opaque.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _tensor(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


CASES = {
    "functional": (lambda x: scale_by_sum(x, 2.0, 4), (_tensor(64, 128),)),
    "in place": (lambda x: scale_by_sum_(x, 2.0), (_tensor(64, 128),)),
    "in place, on a part of a pool": (lambda pool: scale_by_sum_(pool[1], 2.0), (_tensor(4, 64, 128),)),
    "needs a copy": (lambda x: scale_by_sum(x, 2.0, 4), (_tensor(128, 64).T,)),
    "leaves the GPU": (lambda x: x.cpu() + 1, (_tensor(64, 128),)),
    "opaque": (lambda x: opaque(x), (_tensor(64, 128),)),
}
