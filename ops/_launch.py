"""How the kernels of the solve, the round, the commit and the attention are launched: tiles, warps and their limits.

The choices are measured, see `docs/benchmarks/ops.json`; those of attention are the largest tiles that do not spill.
They depend on shapes and on the GPU's shared memory alone: nothing is tuned at run time, and a size that is symbolic
under `torch.compile` is compared with the ends of its bucket only: a number of nodes with multiples of 16, a batch with
the few sizes from which on it is launched otherwise.
"""

from typing import Any

import torch
from torch import Tensor

LARGEST_TREE = 128
"""Nodes that the kernels take: an ancestor is a bit of two words."""

_BLOCK = 16
_PERSISTENT_PROGRAMS = 264  # two for each of the 132 multiprocessors of an H100 or H200; where fewer fit, some wait
_FEW_TABLES = 264  # with so many or fewer, tables leave multiprocessors idle
_MOST_PARTS = 64  # in which columns are attended to; each takes scratch, and is a term of a sum
_PROGRAMS_WITH_PARTS = 264  # with so many there are parts enough: two a multiprocessor, of large ones half as many
_MUCH_SHARED_MEMORY = 200 << 10  # bytes a program


KERNEL_DTYPES = (torch.bfloat16, torch.float16)
"""Values, queries and keys of the solve's kernels. Others stay with the reference, that is with PyTorch's own kernels:
products of halves keep 16 bits, and whoever computes in float32 wants 24."""


def kernels_apply(*tensors: Tensor) -> bool:
    """Tell whether states and what advances them go to the kernels: on CUDA, and nothing of it in float64."""
    return tensors[0].device.type == "cuda" and all(tensor.dtype != torch.float64 for tensor in tensors)


def solve_kernels_apply(value: Tensor, query: Tensor, key: Tensor, *others: Tensor) -> bool:
    """Tell whether a solve goes to the kernels."""
    inputs = (value, query, key)
    return kernels_apply(*others, *inputs) and all(tensor.dtype in KERNEL_DTYPES for tensor in inputs)


def check_kernel_limits(argument: str, num_nodes: int, key_dim: int, value_dim: int) -> None:
    """Raise where the kernels cannot go."""
    if num_nodes > LARGEST_TREE:
        raise ValueError(
            f"{argument} has {num_nodes} nodes, the kernels take up to {LARGEST_TREE}; split the tree, handing its "
            "first nodes to the second call as a prefix"
        )
    if max(key_dim, value_dim) > 256:
        raise ValueError(f"{argument} has head dimensions {key_dim} and {value_dim}, the kernels take up to 256")


def rows_contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Lay tensors out densely; no copy where they are."""
    return tuple(tensor.contiguous() for tensor in tensors)


def row_strided(tensor: Tensor) -> Tensor:
    """Return a tensor [B, N, H, D] whose rows are dense and evenly spaced, such as a slice of a wider projection."""
    _, num_nodes, _, width = tensor.shape
    dense = tensor.stride(3) == 1 and tensor.stride(2) == width
    return tensor if dense and tensor.stride(0) == num_nodes * tensor.stride(1) else tensor.contiguous()


def bucket(size: int) -> int:
    """Round a number of nodes up to a multiple of 16: one guard a bucket."""
    rounded = _BLOCK
    while rounded < size:
        rounded += _BLOCK
    return rounded


def prefix_chunks(length: int) -> int:
    """Return the blocks of a prefix, a power of two or none."""
    if length == 0:
        return 0
    chunks = 1
    while chunks * _BLOCK < length:
        chunks *= 2
    return chunks


def power_of_two(size: int, least: int = _BLOCK) -> int:
    """Round up to a power of two, at least `least`."""
    power = least
    while power < size:
        power *= 2
    return power


def head_options(value: Tensor, *keys: Tensor) -> dict[str, Any]:
    """Return what every kernel needs to know of heads and dtypes."""
    key_heads, key_dim = keys[0].shape[2:]
    return {
        "HK": key_heads,
        "HV": value.shape[2],
        "K": key_dim,
        "KP": power_of_two(key_dim),
        "KEYS_EXACT": all(x.dtype == torch.bfloat16 for x in keys),
        "FLOAT32": any(x.dtype == torch.float32 for x in (value, *keys)),
    }


def tile_columns(key_dim: int, value_dim: int, elements: int) -> int:
    """Return the columns of a tile of that many elements, for widths padded to powers of two."""
    return max(_BLOCK, min(power_of_two(value_dim), elements // power_of_two(key_dim)))


def tiles(value_dim: int, columns: int) -> int:
    """Return the tiles that cover a head."""
    return (value_dim + columns - 1) // columns


def commit_options(pseudo_value: Tensor, key: Tensor) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Return grid and options of `tree_commit_kernel`."""
    batch, num_nodes, value_heads, value_dim = pseudo_value.shape
    check_kernel_limits("pseudo_value", num_nodes, key.shape[3], value_dim)
    columns = tile_columns(key.shape[3], value_dim, 4096)
    options = {"V": value_dim, "COLUMNS": columns, "NODES": bucket(num_nodes), "num_warps": 4}
    return (tiles(value_dim, columns), value_heads, batch), head_options(pseudo_value, key) | options


def fits_one_launch(batch: int, value_heads: int, num_nodes: int, prefix_length: int) -> bool:
    """Tell whether a solve makes its tables where it needs them.

    That is: when few programs wait for launches, and where the pass would unroll too many blocks.
    """
    few = batch * value_heads <= 64 and num_nodes <= _BLOCK and prefix_length == 0
    return few or num_nodes > 4 * _BLOCK or prefix_length > 2 * _BLOCK


def solve_options(value: Tensor, key_dim: int) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Return grid and options of `tree_solve_kernel`."""
    batch, _, value_heads, value_dim = value.shape
    columns = tile_columns(key_dim, value_dim, 4096)
    return (tiles(value_dim, columns), value_heads, batch), {"V": value_dim, "COLUMNS": columns, "num_warps": 4}


def tables_options(
    value: Tensor, key_dim: int, prefix_length: int, *, has_ring: bool
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return grid and options of `tree_tables_kernel`."""
    batch, num_nodes, value_heads, value_dim = value.shape
    blocks = bucket(num_nodes) // _BLOCK
    columns = min(64, tile_columns(key_dim, value_dim, 8192))  # for a warp to hold 32 rows of values in a fold
    few = batch * blocks * value_heads <= _FEW_TABLES
    num_warps = 2 if few else 1  # the warps of a program wait for each other
    if prefix_length != 0 or key_dim > 128:
        num_warps = 4
    # A fold should not take longer than the tables because there are few programs for it.
    parts = max(blocks, tiles(value_dim, columns)) if has_ring and few else blocks
    options = {"V": value_dim, "NODES": blocks * _BLOCK, "COLUMNS": columns, "PARTS": parts, "num_warps": num_warps}
    return (parts * value_heads, batch), options


def shared_memory() -> int:
    """Return the bytes of shared memory that a program may have, on the least GPU supported where CUDA is untouched."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 99 << 10
    properties = torch.cuda.get_device_properties()
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def pass_options(
    value: Tensor, heads: dict[str, Any], prefix_length: int, *, has_ring: bool
) -> tuple[int, dict[str, Any]]:
    """Return the number of tiles, which programs take in turns, and the options of `tree_pass_kernel`.

    Programs have as many tiles on their way as fit: up to two beside the one in work for one block of nodes, one for
    more blocks, which have more tables.
    """
    batch, num_nodes, value_heads, value_dim = value.shape
    blocks = bucket(num_nodes) // _BLOCK
    columns = tile_columns(heads["K"], value_dim, 8192)
    known = _BLOCK if has_ring else prefix_chunks(prefix_length) * _BLOCK
    state = 4 * heads["KP"] * columns
    rows = blocks * 2 * row_halves(heads) * _BLOCK * 2 * heads["KP"]
    tables = blocks * 8 * (known + blocks * _BLOCK) * _BLOCK
    values = (4 * known + 2 * blocks * _BLOCK) * columns
    most = 2 if blocks == 1 else 1
    converted = max(6144, 2048 + 4 * _BLOCK * columns)  # what the compiler takes to change layouts
    ahead = min(most, (shared_memory() - converted) // (state + rows + tables + values))
    return batch * value_heads * tiles(value_dim, columns), {
        "V": value_dim,
        "COLUMNS": columns,
        "NODES": blocks * _BLOCK,
        "STAGES": ahead + 1,
        "num_warps": 4,
    }


def attention_options(query: Tensor, key_heads: int) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Return grid and options of `tree_attention_parts_kernel`.

    With enough rows a key is read once for all nodes of a tree and query heads of a group. What fits the registers
    depends on whether tensor cores read their operands there or in shared memory, as those do that come with much of it
    (Hopper and later). There a few bytes spill for 256 dimensions, and it is still faster than twice the warps. In
    float32 each warp keeps the queries as two halves, so that there are no more than 16 rows of 128 dimensions.
    """
    batch, num_nodes, query_heads, head_dim = query.shape
    if num_nodes > LARGEST_TREE:
        raise ValueError(
            f"query has {num_nodes} nodes, the kernels take up to {LARGEST_TREE}; split the tree, giving each part the "
            "ancestors of its nodes"
        )
    if head_dim > 256:
        raise ValueError(f"query has head dimension {head_dim}, the kernels take up to 256")
    ratio, width, float32 = query_heads // key_heads, power_of_two(head_dim), query.dtype == torch.float32
    from_shared = shared_memory() > _MUCH_SHARED_MEMORY
    most_rows = max(_BLOCK, 2048 // width) if float32 else 128 if from_shared else 64
    rows = _BLOCK
    while rows < most_rows and rows < ratio * num_nodes:
        rows *= 2
    columns = _BLOCK if width == 256 and float32 else 2 * _BLOCK
    large = width == 256 and rows >= 64
    many_warps = (width == 256 and float32) or rows == 128 or (large and not from_shared)
    # Two blocks of keys and values on their way beside the one in work, if they fit beside the queries.
    stages = 3 if query.element_size() * width * (rows + 3 * 2 * columns) + 4096 <= shared_memory() else 2
    programs = batch * key_heads * tiles(ratio * bucket(num_nodes), rows)
    at_once = _PROGRAMS_WITH_PARTS // 2 if large else _PROGRAMS_WITH_PARTS
    parts = _MOST_PARTS
    while parts > 2 and parts * programs > at_once:  # one range guard a halving when the batch is symbolic
        parts //= 2
    return (parts, key_heads * tiles(ratio * num_nodes, rows), batch), {
        "RATIO": ratio,
        "KEY_HEADS": key_heads,
        "PARTS": parts,
        "D": head_dim,
        "DP": width,
        "ROWS": rows,
        "COLUMNS": columns,
        "STAGES": stages,
        "num_warps": 8 if many_warps else 4,
    }


def row_halves(heads: dict[str, Any]) -> int:
    """Return in how many halves scaled keys and queries come: bfloat16 is exact as it is."""
    return 1 if heads["KEYS_EXACT"] or heads["FLOAT32"] else 2


def workspace(value: Tensor, key: Tensor, heads: dict[str, Any], known: int) -> tuple[Tensor, ...]:
    """Return empty tensors for what `tree_tables_kernel` writes: scaled rows and their factors, tables and theirs."""
    batch, num_nodes, value_heads, _ = value.shape
    blocks = bucket(num_nodes) // _BLOCK
    halves = 1 if heads["FLOAT32"] else 2
    dtype = torch.float32 if heads["FLOAT32"] else torch.bfloat16
    rows = known + blocks * _BLOCK
    return (
        key.new_empty(batch, heads["HK"], blocks, 2, row_halves(heads), _BLOCK, heads["KP"], dtype=dtype),
        key.new_empty(batch, heads["HK"], blocks, 2, _BLOCK, dtype=torch.float32),
        key.new_empty(batch, value_heads, blocks, 2, halves, rows, _BLOCK, dtype=dtype),
        key.new_empty(batch, value_heads, blocks, 4 * _BLOCK + known, dtype=torch.float32),
    )


def programs(num_tiles: int) -> tuple[int]:
    """Return the grid of `tree_pass_kernel`."""
    return (min(num_tiles, _PERSISTENT_PROGRAMS),)
