"""Arguments of `tree_snapshots` and what it should return for them, which the tests of its three forms share."""

from typing import NamedTuple

import torch
from torch import Tensor

import oracle
from treewy.ops import PADDING
from treewy.testing import OpCase


class SnapshotInputs(NamedTuple):
    value: Tensor
    query: Tensor
    key: Tensor
    log_decay: Tensor
    beta: Tensor
    committed_state: Tensor
    parents: Tensor
    earlier_states: Tensor
    scale: float
    qk_l2norm: bool

    def to(self, dtype: torch.dtype, state_dtype: torch.dtype, device: str = "cpu") -> "SnapshotInputs":
        """Nodes in one dtype, states in another."""

        def convert(name: str, x: Tensor) -> Tensor:
            return x.to(device, state_dtype if "state" in name else dtype if x.is_floating_point() else x.dtype)

        return SnapshotInputs(*(convert(name, x) if isinstance(x, Tensor) else x for name, x in self._asdict().items()))

    def rows(self, rows: slice) -> "SnapshotInputs":
        return SnapshotInputs(*(x[rows] if isinstance(x, Tensor) else x for x in self))

    def nodes(self, nodes: list[int], parents: Tensor, earlier_states: Tensor) -> "SnapshotInputs":
        """The same call on some nodes, with parents of their own."""
        return SnapshotInputs(
            *(x[:, nodes] for x in self[:5]), self.committed_state, parents, earlier_states, *self[8:]
        )


def snapshot_inputs(
    case: OpCase, dtype: torch.dtype = torch.float64, *, num_earlier: int = 0, max_beta: float = 1.0
) -> SnapshotInputs:
    """The numbers of a case; of its roots, some continue the committed state and some an earlier one, if there are."""
    solve = case.solve_inputs(dtype, max_beta=max_beta)
    generator = torch.Generator().manual_seed(case.seed + 1)
    batch, num_nodes = solve.parents.shape
    shape = (batch, num_earlier, *solve.committed_state.shape[1:])
    earlier = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    above = torch.randint(-1, num_earlier, (batch, num_nodes), generator=generator) if num_earlier else -1
    parents = torch.where(solve.parents >= 0, solve.parents + num_earlier, solve.parents)
    parents = torch.where(parents == -1, above, parents)
    return SnapshotInputs(*solve[:6], parents, earlier, solve.scale, solve.qk_l2norm)


def expected(inputs: SnapshotInputs, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Output and states by the oracle: in each row the roots of one state at a time, with all below them."""
    num_earlier = inputs.earlier_states.shape[1]
    output = torch.zeros_like(inputs.value, dtype=dtype)
    states = torch.zeros(*inputs.value.shape[:2], *inputs.committed_state.shape[1:], dtype=dtype)
    for row, parents in enumerate(inputs.parents.tolist()):
        one = inputs.rows(slice(row, row + 1))
        above: list[int] = []
        for parent in parents:
            above.append(above[parent - num_earlier] if parent >= num_earlier else parent)
        for start in set(above) - {PADDING}:
            committed = one.committed_state if start == -1 else one.earlier_states[:, start]
            within = [
                PADDING if above[node] != start else parent - num_earlier if parent >= num_earlier else -1
                for node, parent in enumerate(parents)
            ]
            none = one.value[:, :0], one.key[:, :0], one.log_decay[:, :0], torch.zeros(1, len(parents), 0).bool()
            tree = torch.tensor([within])
            results = oracle.solve(*one[:5], committed, tree, *none, *one[8:], dtype=dtype)
            output[row] += results[0][0]
            for node, state in results[4][0].items():
                states[row, node] = state
    return output, states
