"""The interpreted form of a kernel: what it computes, what the interpreter can do, and that it leaves no trace."""

import types

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="kernels need the triton package")
tl = pytest.importorskip("triton.language")

from interpreted import interpreted, run_interpreted  # noqa: E402
from toy_ops import scale_by_sum, scale_by_sum_  # noqa: E402

SIDE = 16


def _compile(kernel, signature, **constexprs):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = signature | dict.fromkeys(constexprs, "constexpr")
    source = ASTSource(kernel, signature=signature, constexprs=constexprs)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


@triton.jit
def _square(x):
    return x * x


@triton.jit
def _product_of_squares(left, right):
    return tl.dot(_square(left), _square(right), input_precision="tf32x3")


@triton.jit
def _everything(x, y, product, suffix_sums, numbers, count, side: tl.constexpr):
    row = tl.arange(0, side)
    at = row[:, None] * side + row[None, :]
    left = tl.load(x + at)
    right = tl.load(y + at, mask=row[:, None] < count, other=0.0)
    result = _product_of_squares(left, right)
    for step in tl.range(0, count, num_stages=2):
        result += step
    for step in range(count):
        result -= step
    for _ in tl.static_range(2):
        result = tl.where(at % 2 == 0, result, -result)
    tl.store(product + at, result)
    tl.store(suffix_sums + at, tl.cumsum(left, axis=0, reverse=True))
    bits = tl.sum(tl.where(row < count, tl.full((side,), 1, tl.int64) << (row.to(tl.int64) + 33), 0), axis=0)
    remaining = row
    halvings = 0
    while tl.max(remaining, axis=0) > 0:
        remaining = remaining >> 1
        halvings += 1
    tl.store(numbers, bits)
    tl.store(numbers + 1, halvings)
    tl.store(numbers + 2, tl.program_id(1) * 10 + tl.num_programs(0))


def _arguments():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(SIDE, SIDE, generator=generator) for _ in range(2))
    return x, y, torch.full_like(x, torch.nan), torch.full_like(x, torch.nan), torch.zeros(3, dtype=torch.int64)


def test_helpers_loops_scans_products_and_bits_compute_what_they_say():
    x, y, product, suffix_sums, numbers = _arguments()
    interpreted(_everything)[(2, 3)](x, y, product, suffix_sums, numbers, 5, side=SIDE, num_warps=4)
    right = torch.cat([y[:5], torch.zeros(SIDE - 5, SIDE)])
    torch.testing.assert_close(product, x.square() @ right.square())
    torch.testing.assert_close(suffix_sums, x.flip(0).cumsum(0).flip(0))
    assert numbers.tolist() == [0b11111 << 33, 4, 22]


@triton.jit
def _in_bfloat16(x, y, product, sums, less, side: tl.constexpr):
    row = tl.arange(0, side)
    at = row[:, None] * side + row[None, :]
    left, right = tl.load(x + at), tl.load(y + at)
    tl.store(product + at, tl.dot(left, right))
    tl.store(sums + at, (left + right) * left - right * 0.5)
    tl.store(less + at, tl.where(left < right, left, right.to(tl.float32) * 3))


def test_bfloat16_rounds_to_the_nearest_and_multiplies_as_on_a_gpu() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(SIDE, SIDE, generator=generator).bfloat16() for _ in range(2))
    product, (sums, less) = torch.empty(SIDE, SIDE), torch.empty(2, SIDE, SIDE).bfloat16()
    interpreted(_in_bfloat16)[(1,)](x, y, product, sums, less, side=SIDE)
    torch.testing.assert_close(product, x.float() @ y.float())
    assert torch.equal(sums, (x + y) * x - y * 0.5)
    assert torch.equal(less, torch.where(x < y, x, (y.float() * 3).bfloat16()))


def test_an_operator_launches_as_on_a_gpu() -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).T
    expected = x * x.sum() * 3
    torch.testing.assert_close(run_interpreted(scale_by_sum, x, 3.0, 4), expected)
    y = x.contiguous()
    run_interpreted(scale_by_sum_, y, 3.0)
    torch.testing.assert_close(y, expected)
    assert x.device.type == "cpu"


def test_what_an_operator_allocates_is_poisoned() -> None:
    def allocate(x: Tensor) -> list[Tensor]:
        factories = (torch.empty_like(x), x.new_empty(3), torch.empty(3, device=x.device))
        return [*factories, torch.empty_strided((3,), (1,), device=x.device), torch.zeros(3, device=x.device)]

    *poisoned, zeros = run_interpreted(allocate, torch.ones(3))
    assert all(x.isnan().all() for x in poisoned)
    assert not zeros.any()


def _state(module):
    return {name: id(value) for name, value in vars(module).items()}


def test_nothing_is_left_changed_and_the_kernel_still_compiles():
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    watched = [
        tl,
        tl.core,
        tl.core.tensor,
        tl.core.dtype,
        tl.math,
        tl.standard,
        interpreter,
        interpreter.InterpreterBuilder,
        JITFunction,
        triton.knobs.runtime,
        types.SimpleNamespace(**_everything.fn.__globals__),
    ]
    before = [_state(module) for module in watched]
    x, y, product, suffix_sums, numbers = _arguments()
    interpreted(_everything)[(1,)](x, y, product, suffix_sums, numbers, 5, side=SIDE)
    watched[-1] = types.SimpleNamespace(**_everything.fn.__globals__)
    assert [_state(module) for module in watched] == before
    signature = {"x": "*fp32", "y": "*fp32", "product": "*fp32", "suffix_sums": "*fp32", "numbers": "*i64"}
    assert "mma" in _compile(_everything, signature | {"count": "i32"}, side=SIDE)


@triton.jit
def _fails(x):
    tl.static_assert(x < 0, "on purpose")


def test_a_kernel_that_fails_leaves_nothing_changed():
    before = _state(tl), _state(tl.core), _state(tl.core.tensor)
    with pytest.raises(Exception, match="on purpose"):
        interpreted(_fails)[(1,)](3)
    assert (_state(tl), _state(tl.core), _state(tl.core.tensor)) == before
