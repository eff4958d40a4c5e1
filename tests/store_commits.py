"""Arguments of the commits of the two small stores, with NaN wherever a commit has no business to read."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

import oracle
from treewy.testing import OpCase, op_cases

LAYERS, HEADS = 3, 2


class Accepted(NamedTuple):
    """Trees, the node that each row accepts, and the row's slot in a pool of `num_slots`; -1 for none."""

    case: OpCase
    nodes: tuple[int, ...]
    slots: tuple[int, ...]
    num_slots: int

    @property
    def writes(self) -> Tensor:
        """Which nodes [B, N] a commit reads: those on the accepted paths of rows with a slot."""
        mask = torch.zeros_like(self.case.tree, dtype=torch.bool)
        for row, (parents, node, slot) in enumerate(zip(self.case.parents, self.nodes, self.slots, strict=True)):
            mask[row, oracle.path(list(parents), node) if slot >= 0 else []] = True
        return mask


@st.composite
def accepted(draw: st.DrawFn) -> Accepted:
    """Any node of each row, padding too, or none; any slots, some rows without."""
    case = draw(op_cases(max_prefix=0))
    batch, num_nodes = len(case.parents), len(case.parents[0])
    num_slots = batch + draw(st.integers(0, 3))
    slots = draw(st.permutations(range(num_slots)))[:batch]
    return Accepted(
        case,
        tuple(draw(st.integers(-1, num_nodes - 1)) for _ in range(batch)),
        tuple(slot if draw(st.booleans()) else -1 for slot in slots),
        num_slots,
    )


class ConvCommitInputs(NamedTuple):
    window_pool: Tensor
    slots: Tensor
    x: Tensor
    parents: Tensor
    accepted_node: Tensor


class KvCommitInputs(NamedTuple):
    key_pool: Tensor
    value_pool: Tensor
    slots: Tensor
    start: Tensor
    parents: Tensor
    accepted_node: Tensor


def conv_commit_inputs(
    accepted: Accepted, dtype: torch.dtype = torch.float32, *, window: int = 4, channels: int = 5
) -> ConvCommitInputs:
    random = torch.Generator().manual_seed(accepted.case.seed)
    batch, num_nodes = accepted.case.tree.shape
    x = torch.randn(LAYERS, batch, num_nodes, channels, generator=random)
    return ConvCommitInputs(
        window_pool=torch.randn(LAYERS, accepted.num_slots, channels, window, generator=random).to(dtype),
        slots=torch.tensor(accepted.slots),
        x=x.masked_fill(~accepted.writes[:, :, None], torch.nan).to(dtype),
        parents=accepted.case.tree,
        accepted_node=torch.tensor(accepted.nodes),
    )


def kv_commit_inputs(accepted: Accepted, dtype: torch.dtype = torch.float32, *, head_dim: int = 7) -> KvCommitInputs:
    """Rows start at various columns, the last of them such that its nodes end with the store."""
    random = torch.Generator().manual_seed(accepted.case.seed)
    batch, num_nodes = accepted.case.tree.shape
    shape = (LAYERS, accepted.num_slots, HEADS, num_nodes + batch - 1, head_dim)
    return KvCommitInputs(
        key_pool=torch.randn(shape, generator=random).to(dtype),
        value_pool=torch.randn(shape, generator=random).to(dtype),
        slots=torch.tensor(accepted.slots),
        start=torch.arange(batch),
        parents=accepted.case.tree,
        accepted_node=torch.tensor(accepted.nodes),
    )


def same_bits(x: Tensor, y: Tensor) -> bool:
    """NaN equals itself here, and 0 is not -0."""
    return x.dtype == y.dtype and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
