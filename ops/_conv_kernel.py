"""The Triton kernel of `tree_conv`.

One program convolves a block of nodes of one row over a block of channels. It walks all of its nodes up the tree at
once, a step a tap, and one signed number says where each walk has come to:

    source >= 0: the column of node `source`          source < 0: column W + source of the window

The step is `source = parents[source]` on nodes and `source - 1` on the window, which is why a parent of -1 needs no
case of its own: it is the window's newest column. Nodes above a node lie in the same block or not far before it, so all
reads of a column but the first are served by the caches; the memory sees x once.

The columns of the window are few and the same for all nodes of a row, so they are loaded as vectors of channels and
selected, not gathered. Products of two bfloat16 or float16 numbers are exact in float32, so that a fused multiply-add
rounds as the reference does.
"""

# mypy: ignore-errors
# The language of kernels has no types.

import triton
import triton.language as tl


@triton.jit
def tree_conv_kernel(
    x_ptr,  # [B, N, C]
    window_ptr,  # [B, C, W]
    weight_ptr,  # [C, TAPS], contiguous
    bias_ptr,  # [C], contiguous; not read without HAS_BIAS
    parents_ptr,  # [B, N]
    output_ptr,  # [B, N, C], contiguous
    num_nodes,
    num_channels,
    x_row_stride,
    x_node_stride,
    x_channel_stride,
    window_row_stride,
    window_channel_stride,
    window_column_stride,
    parents_row_stride,
    parents_node_stride,
    WINDOW: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    dtype = weight_ptr.dtype.element_ty
    node_blocks = tl.cdiv(num_nodes, BLOCK_NODES)
    row = (tl.program_id(0) // node_blocks).to(tl.int64)
    node = (tl.program_id(0) % node_blocks) * BLOCK_NODES + tl.arange(0, BLOCK_NODES)
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    in_row, in_channels = node < num_nodes, channel < num_channels
    x_ptr += row * x_row_stride
    window_ptr += row * window_row_stride
    parents_ptr += row * parents_row_stride
    output_ptr += row * num_nodes * num_channels

    # Everything that depends on no other load is loaded first, so that the program waits for memory once for all of it.
    parent = tl.load(parents_ptr + node * parents_node_stride, mask=in_row, other=-2).to(tl.int32)
    weight, columns = (), ()
    for tap in tl.static_range(TAPS):
        weight += (tl.load(weight_ptr + channel * TAPS + tap, mask=in_channels, other=0.0),)
    for back in tl.static_range(1, min(TAPS - 1, WINDOW) + 1):
        column_ptr = window_ptr + channel * window_channel_stride + (WINDOW - back) * window_column_stride
        columns += (tl.load(column_ptr, mask=in_channels, other=0.0).to(dtype),)
    total = tl.zeros([BLOCK_NODES, BLOCK_CHANNELS], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, mask=in_channels, other=0.0).to(tl.float32)[None, :]

    x_ptr += channel[None, :] * x_channel_stride
    source, on_node = node, in_row
    for steps_back in tl.static_range(TAPS):
        entry_ptr = x_ptr + source.to(tl.int64)[:, None] * x_node_stride
        entry = tl.load(entry_ptr, mask=on_node[:, None] & in_channels[None, :], other=0.0).to(dtype)
        for back in tl.static_range(1, min(steps_back, WINDOW) + 1):
            entry = tl.where((source == -back)[:, None], columns[back - 1][None, :], entry)
        total += weight[TAPS - 1 - steps_back].to(tl.float32)[None, :] * entry.to(tl.float32)
        if steps_back == 0:
            source = parent
        else:
            above = tl.load(parents_ptr + source * parents_node_stride, mask=on_node, other=0).to(tl.int32)
            source = tl.where(on_node, above, source - 1)
        on_node = source >= 0

    present = parent != -2
    result = total.to(dtype)
    if SILU:
        rounded = result.to(tl.float32)
        result = (rounded / (1.0 + tl.exp(-rounded))).to(dtype)
    result = tl.where(present[:, None], result, 0.0)
    tl.store(
        output_ptr + node.to(tl.int64)[:, None] * num_channels + channel[None, :],
        result.to(output_ptr.dtype.element_ty),
        mask=in_row[:, None] & in_channels[None, :],
    )
