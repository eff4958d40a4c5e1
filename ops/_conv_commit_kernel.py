"""The Triton kernel of `tree_conv_commit_`.

One program advances the window of one row and layer over a block of channels. Read from the right, the new window is a
walk up the tree from the accepted node, and one signed number says where the walk has come to, as in `_conv_kernel.py`:

    source >= 0: the column of node `source`          source < 0: column W + source of the old window

All columns of the new window walk at once, column w for W - 1 - w steps. Old columns move left within the window, so
everything is loaded before anything is stored; the barrier holds for the whole program, and no other program touches
these channels of this slot.
"""

# mypy: ignore-errors
# The language of kernels has no types.

import triton
import triton.language as tl


@triton.jit
def tree_conv_commit_kernel(
    pool_ptr,  # [L, S, C, W]
    slots_ptr,  # [B], contiguous
    x_ptr,  # [L, B, N, C]
    parents_ptr,  # [B, N]
    accepted_node_ptr,  # [B], contiguous
    num_rows,
    num_channels,
    pool_layer_stride,
    pool_slot_stride,
    pool_channel_stride: tl.constexpr,  # the compiler sees that the columns of a channel and its neighbours adjoin
    pool_column_stride,
    x_layer_stride,
    x_row_stride,
    x_node_stride,
    x_channel_stride,
    parents_row_stride,
    parents_node_stride,
    WINDOW: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    layer = (tl.program_id(0) // num_rows).to(tl.int64)
    row = (tl.program_id(0) % num_rows).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    accepted = tl.load(accepted_node_ptr + row).to(tl.int64)
    if (slot < 0) | (accepted < 0):
        return
    parents_ptr += row * parents_row_stride
    if tl.load(parents_ptr + accepted * parents_node_stride) == -2:
        return

    column = tl.arange(0, BLOCK_COLUMNS)
    source = tl.zeros([BLOCK_COLUMNS], tl.int64) + accepted
    for step in tl.static_range(WINDOW - 1):
        walks = column < WINDOW - 1 - step
        above = tl.load(parents_ptr + source * parents_node_stride, mask=walks & (source >= 0), other=0).to(tl.int64)
        source = tl.where(walks, tl.where(source >= 0, above, source - 1), source)

    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    in_window = (channel < num_channels)[:, None] & (column < WINDOW)[None, :]
    x_ptr += layer * x_layer_stride + row * x_row_stride
    pool_ptr += layer * pool_layer_stride + slot * pool_slot_stride
    new = tl.load(
        x_ptr + source[None, :] * x_node_stride + channel[:, None] * x_channel_stride,
        mask=in_window & (source >= 0)[None, :],
        other=0.0,
    ).to(pool_ptr.dtype.element_ty)
    old = tl.load(
        pool_ptr + channel[:, None] * pool_channel_stride + (WINDOW + source)[None, :] * pool_column_stride,
        mask=in_window & (source < 0)[None, :],
        other=0.0,
    )
    tl.debug_barrier()
    tl.store(
        pool_ptr + channel[:, None] * pool_channel_stride + column[None, :] * pool_column_stride,
        tl.where((source >= 0)[None, :], new, old),
        mask=in_window,
    )
