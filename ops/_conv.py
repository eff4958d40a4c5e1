"""Convolve each node of a tree over its own path.

A causal depthwise convolution of kernel size Kw gives position t the last Kw inputs. In a tree the inputs before node i
are its ancestors, and before the root the columns of the committed window, newest last:

    y_i = act(bias + sum_{d < Kw} weight[:, Kw - 1 - d] * e_i(d))

where e_i(d) is what lies d steps back from i: i itself for d = 0, its d-th ancestor while it has one, then the window's
columns from the right, and 0 once these are used up. So a window longer than Kw - 1 is read in part, a shorter one is
extended with zeros, and neither the tree nor the window is ever laid out as a sequence.

Rounding follows Hugging Face, whose verification must agree with its decoding: inputs in the dtype of the weight,
products accumulated in float32 at least, rounded once to the dtype of the weight, then the activation in that dtype.

On CUDA one kernel gathers, convolves and activates (`_conv_kernel.py`). Queries, keys and values are views of its one
contiguous output: splitting moves nothing, so there is no operator for it.
"""

import importlib.util

import torch
from torch import Tensor
from torch.nn import functional

from treewy.ops._registration import tree_op
from treewy.ops._tree import PADDING, depths
from treewy.ops._validation import check_index, check_nodes, check_rank, check_shape

if importlib.util.find_spec("triton") is not None:
    import triton
    from torch.library import wrap_triton

    from treewy.ops._conv_kernel import tree_conv_kernel


def _reference(x: Tensor, window: Tensor, weight: Tensor, bias: Tensor, parents: Tensor, activation: str) -> Tensor:
    dtype = torch.promote_types(torch.float32, weight.dtype)
    num_nodes, window_length, taps = x.shape[1], window.shape[2], weight.shape[1]
    entries = torch.cat([window.transpose(1, 2).to(weight.dtype), x.to(weight.dtype)], dim=1)  # [B, W + N, C]
    depth = depths(parents)
    node = torch.arange(num_nodes, device=x.device).expand_as(parents)
    total = bias.to(dtype) if bias.shape[0] else torch.zeros((), dtype=dtype, device=x.device)
    for steps_back in range(taps):
        column = window_length + depth - steps_back
        index = torch.where(node >= 0, window_length + node, column)
        entry = entries.gather(1, index.clamp(min=0).unsqueeze(-1).expand_as(x)).masked_fill(
            (index < 0).unsqueeze(-1), 0.0
        )
        total = total + weight[:, taps - 1 - steps_back].to(dtype) * entry.to(dtype)
        node = torch.where(node >= 0, parents.long().gather(1, node.clamp(min=0)), node)
    result = total.to(weight.dtype)
    if activation == "silu":
        result = functional.silu(result)
    return result.to(x.dtype).masked_fill((parents == PADDING).unsqueeze(-1), 0.0).contiguous()


def _tile(num_nodes: int, taps: int) -> tuple[int, int, int]:
    """Choose nodes and channels a program, and its warps.

    64 channels of bfloat16 are one cache line. With all nodes of a small tree in one program its weights and window are
    loaded once, and ancestors are found in the first-level cache. More nodes, and more taps, would not fit registers.
    """
    if num_nodes <= 4:
        return 4, 64, 2
    if num_nodes <= 8 or taps > 4:
        return 8, 64, 2
    return 16, 64, 2


@tree_op("tree_conv")
def _tree_conv(x: Tensor, window: Tensor, weight: Tensor, bias: Tensor, parents: Tensor, activation: str) -> Tensor:
    if x.device.type != "cuda" or torch.float64 in (x.dtype, window.dtype, weight.dtype, bias.dtype):
        return _reference(x, window, weight, bias, parents, activation)
    batch, num_nodes, num_channels = x.shape
    block_nodes, block_channels, num_warps = _tile(num_nodes, weight.shape[1])
    has_bias = bias.shape[0] != 0
    weight = weight.contiguous()
    output = x.new_empty(x.shape)
    grid = (batch * triton.cdiv(num_nodes, block_nodes), triton.cdiv(num_channels, block_channels))
    wrap_triton(tree_conv_kernel)[grid](
        x,
        window,
        weight,
        bias.contiguous() if has_bias else weight,
        parents,
        output,
        num_nodes,
        num_channels,
        *x.stride(),
        *window.stride(),
        *parents.stride(),
        WINDOW=window.shape[2],
        TAPS=weight.shape[1],
        HAS_BIAS=has_bias,
        SILU=activation == "silu",
        BLOCK_NODES=block_nodes,
        BLOCK_CHANNELS=block_channels,
        num_warps=num_warps,
    )
    return output


@_tree_conv.register_fake
def _(x: Tensor, window: Tensor, weight: Tensor, bias: Tensor, parents: Tensor, activation: str) -> Tensor:
    return x.new_empty(x.shape)


def tree_conv(x: Tensor, window: Tensor, weight: Tensor, bias: Tensor, parents: Tensor, activation: str) -> Tensor:
    """Run a causal depthwise convolution along every path of a tree at once, leaving the window as it is.

        y_i = act(bias + sum_{d < Kw} weight[:, Kw - 1 - d] * e_i(d))

    with e_i(d) the entry d steps back from node i among the window's columns, its ancestors and itself.

    On CUDA a kernel runs, but for float64, which takes the reference.

    Args:
        x: `[B, N, C]`, floating; may be a slice of a wider projection.
        window: `[B, C, W]`, floating: the last committed columns, newest last; W may be less or more than Kw - 1,
            missing columns are 0.
        weight: `[C, Kw]`, floating; the last tap meets the node itself.
        bias: `[C]`, floating, or `[0]` for none.
        parents: `[B, N]`, integer; -1 for a child of the newest column, `PADDING` for no node.
        activation: "silu", or "" for none.

    Returns:
        `[B, N, C]`, contiguous, in the dtype of `x`, rounded as Hugging Face rounds; 0 for padding. Queries, keys and
        values are views of it: `result.split([HK * K, HK * K, HV * V], dim=-1)`, each then `unflatten(-1, (H, D))`.

    Raises:
        ValueError: A shape, a dtype or the activation does not fit.

    Example:
        A root and two children; a kernel of two ones adds each node to its parent.

        >>> x, window = torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([[[8.0, 9.0]]])
        >>> tree_conv(x, window, torch.ones(1, 2), torch.zeros(0), torch.tensor([[-1, 0, 0]]), "").flatten()
        tensor([10.,  3.,  4.])

    Source:
        `causal_conv1d_fn` of Hugging Face transformers, for the rounding.
    """
    check_rank("x", x, "B, N, C")
    check_rank("window", window, "B, C, W")
    check_rank("weight", weight, "C, Kw")
    check_rank("bias", bias, "C or 0")
    batch, num_nodes, channels = x.shape
    check_nodes("x", num_nodes)
    check_shape("window", window, "B, C, W", batch, channels, window.shape[2])
    check_shape("weight", weight, "C, Kw", channels, weight.shape[1])
    if weight.shape[1] < 1:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, expected [C, Kw] with Kw at least 1")
    if bias.shape[0] != 0:
        check_shape("bias", bias, "C or 0", channels)
    check_shape("parents", parents, "B, N", batch, num_nodes)
    check_index("parents", parents)
    if activation not in ("", "silu"):
        raise ValueError(f'activation is {activation!r}, expected "silu" or ""')
    result: Tensor = _tree_conv(x, window, weight, bias, parents, activation)
    return result
