"""Rounds of one layer with `tree_wy_verify_`, as an engine makes them, beside a float64 computation of the same rounds.

    errors = play(Rounds(ring=5), by_recurrence)                     the reference, on the CPU
    errors = play(Rounds(ring=5), by_recurrence, run_interpreted)    the kernels, interpreted
    errors = play(Rounds(ring=5, device="cuda"), by_reference)       the kernels, on a GPU

Trees, accepted nodes and numbers come from the seed. Whatever a call has no business to read is NaN when it is made:
rows of the ring behind the known ones, nodes of the last tree off the accepted path, padding, slots of other rows.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import oracle
from tolerances import relative_error
from treewy import ops
from treewy.ops import PADDING
from treewy.testing import SolveInputs


@dataclass(frozen=True)
class Rounds:
    """Sizes, shapes of trees and the seed; all sizes differ.

    `nodes` bounds the nodes of a tree; some round has as many. `chains` makes chains of which rows pad the end, instead
    of any trees with holes. One row of the batch has no slot if `without_slot`. Log decays go from 0 to `-gate`.
    """

    batch: int = 3
    ring: int = 16
    nodes: int = 20
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 22
    value_dim: int = 13
    number: int = 6
    chains: bool = False
    without_slot: bool = False
    accept_last: bool = False
    qk_l2norm: bool = True
    gate: float = 1.0
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0

    @property
    def kept_dtype(self) -> torch.dtype:
        """Of states, pseudo-values and gates."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def slots(self) -> Tensor:
        slots = torch.tensor(random.Random(self.seed).sample(range(self.batch + 2), self.batch), device=self.device)
        if self.without_slot:
            slots[self.seed % self.batch] = -1
        return slots

    def pool(self) -> Tensor:
        shape = (self.batch + 2, self.value_heads, self.key_dim, self.value_dim)
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.device, self.kept_dtype)


class Round(NamedTuple):
    """A tree for each row, and the node that each row accepts, -1 for none."""

    value: Tensor
    query: Tensor
    key: Tensor
    log_decay: Tensor
    beta: Tensor
    parents: Tensor
    accepted: Tensor


def _tree(settings: Rounds, num_nodes: int, random: random.Random) -> list[int]:
    if settings.chains:
        length = num_nodes if settings.accept_last else random.randint(0, num_nodes)
        return [node - 1 if node < length else PADDING for node in range(num_nodes)]
    parents: list[int] = []
    for node in range(num_nodes):
        present = [-1, *(other for other in range(max(0, node - 6), node) if parents[other] != PADDING)]
        parents.append(PADDING if random.random() < 0.1 else random.choice(present))
    return parents


def _accepted(settings: Rounds, parents: list[int], random: random.Random) -> int:
    present = [node for node, parent in enumerate(parents) if parent != PADDING]
    if settings.accept_last and present:
        return present[-1]
    return random.choice([-1, *present * 4])


def drawn(settings: Rounds) -> Iterator[Round]:
    """Draw the rounds, with NaN for what padding holds."""
    choices, generator = random.Random(settings.seed), torch.Generator().manual_seed(settings.seed + 1)
    batch, key_heads, value_heads = settings.batch, settings.key_heads, settings.value_heads
    for number in range(settings.number):
        num_nodes = settings.nodes if number == 2 or settings.accept_last else choices.randint(1, settings.nodes)
        trees = [_tree(settings, num_nodes, choices) for _ in range(batch)]
        accepted = [_accepted(settings, tree, choices) for tree in trees]
        parents = torch.tensor(trees)

        def numbers(*shape: int, absent: Tensor = parents == PADDING) -> Tensor:
            x = torch.randn(batch, absent.shape[1], *shape, generator=generator, dtype=torch.float64)
            x[absent] = torch.nan
            return x.to(settings.device, settings.dtype)

        yield Round(
            value=numbers(value_heads, settings.value_dim),
            query=numbers(key_heads, settings.key_dim),
            key=numbers(key_heads, settings.key_dim) * (1.0 if settings.qk_l2norm else settings.key_dim**-0.5),
            log_decay=-settings.gate * numbers(value_heads).to(settings.kept_dtype).sigmoid(),
            beta=numbers(value_heads).sigmoid(),
            parents=parents.to(settings.device),
            accepted=torch.tensor(accepted, device=settings.device),
        )


def padded(tree: Round, num_nodes: int) -> Round:
    """Return the trees with padding behind them, which holds NaN."""
    missing = num_nodes - tree.parents.shape[1]

    def pad(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_full((len(x), missing, *x.shape[2:]), torch.nan)], dim=1)

    parents = torch.nn.functional.pad(tree.parents, (0, missing), value=PADDING)
    return Round(*(pad(x) for x in tree[:5]), parents, tree.accepted)


class Exact(NamedTuple):
    """What a round gives in float64: the state is that after the accepted node."""

    output: Tensor
    pseudo_value: Tensor
    state: Tensor


def _solve_arguments(settings: Rounds, state: Tensor, tree: Round) -> tuple[Any, ...]:
    none = tree.value[:, :0], tree.key[:, :0], tree.log_decay[:, :0]
    mask = torch.zeros(*tree.parents.shape, 0, dtype=torch.bool, device=state.device)
    return (*tree[:5], state, tree.parents, *none, mask, settings.key_dim**-0.5, settings.qk_l2norm)


def by_recurrence(settings: Rounds, state: Tensor, tree: Round) -> Exact:
    """Walk each path node by node."""
    output, pseudo_value, _, _, after = oracle.solve(*_solve_arguments(settings, state, tree))
    accepted = tree.accepted.tolist()
    states = [after[row][node] if node >= 0 else state[row] for row, node in enumerate(accepted)]
    return Exact(output, pseudo_value, torch.stack(states))


def by_reference(settings: Rounds, state: Tensor, tree: Round) -> Exact:
    """Solve and commit at once, with the reference in float64: for what the recurrence would take too long."""
    double = Round(*(x.double() if x.is_floating_point() else x for x in tree))
    output, pseudo_value, key, _ = ops.tree_wy_solve(*_solve_arguments(settings, state, double))
    committed = ops.tree_wy_commit(state, pseudo_value, key, double.log_decay, tree.parents, tree.accepted)
    return Exact(output, pseudo_value, committed)


class Errors(NamedTuple):
    """The greatest relative errors: outputs, pseudo-values, and the states at the end with everything folded in."""

    output: float
    pseudo_value: float
    state: float


class Engine:
    """What one layer keeps between rounds: states, rings, and the tree of which a path was accepted."""

    def __init__(self, settings: Rounds, run: Callable[..., Any]) -> None:
        batch, ring, value_heads, kept = settings.batch, settings.ring, settings.value_heads, settings.kept_dtype
        self._settings, self._run = settings, run

        def nan(*shape: int, dtype: torch.dtype = kept) -> Tensor:
            return torch.full(shape, torch.nan, dtype=dtype, device=settings.device)

        self.slots = settings.slots
        pool = settings.pool()
        self.pool = nan(*pool.shape)
        self.pool[self.slots[self.slots >= 0]] = pool[self.slots[self.slots >= 0]]
        self.ring = (
            nan(batch, ring, value_heads, settings.value_dim),
            nan(batch, ring, settings.key_heads, settings.key_dim, dtype=settings.dtype),
            nan(batch, ring, value_heads),
        )
        self.known = torch.zeros(batch, dtype=torch.int64, device=settings.device)
        self.scratch = nan(batch, settings.nodes, value_heads, settings.value_dim)
        self.last_key = nan(batch, 1, settings.key_heads, settings.key_dim, dtype=settings.dtype)
        self.last_decay = nan(batch, 1, value_heads)
        self.path = torch.full((batch, 1), -1, device=settings.device)
        self.length = torch.zeros(batch, dtype=torch.int64, device=settings.device)

    def arguments(self, tree: Round) -> tuple[Any, ...]:
        """Return those of `tree_wy_verify_` for a tree behind all that was accepted before."""
        settings = self._settings
        return (
            *(self.pool, self.slots, *self.ring, self.known, self.scratch, *tree[:5], tree.parents),
            *(self.last_key, self.last_decay, self.path, self.length, settings.key_dim**-0.5, settings.qk_l2norm),
        )

    def verify(self, tree: Round) -> Tensor:
        """Return the output of the tree."""
        output, self.known = self._run(ops.tree_wy_verify_, *self.arguments(tree))
        return output

    def accept(self, tree: Round) -> None:
        """Keep what the next round may read, and fill everything else with NaN."""
        self.path, self.length = ops.path_to_node(tree.parents, tree.accepted)
        on_path = torch.zeros_like(self.scratch[:, :, 0, 0], dtype=torch.bool)
        for row, (nodes, length) in enumerate(zip(self.path.tolist(), self.length.tolist(), strict=True)):
            on_path[row, nodes[:length]] = True
        off_path = ~on_path[:, : self.path.shape[1], None]
        self.scratch.masked_fill_(~on_path[:, :, None, None], torch.nan)
        self.last_key = tree.key.masked_fill(off_path[..., None], torch.nan)
        self.last_decay = tree.log_decay.masked_fill(off_path, torch.nan)
        for x in self.ring:
            unknown = torch.arange(x.shape[1], device=x.device) >= self.known[:, None]
            x.masked_fill_(unknown.reshape(*unknown.shape, *[1] * (x.ndim - 2)), torch.nan)

    def fold(self) -> None:
        """Bring the states up to date with `tree_wy_commit_`: ring and path are a chain."""
        size, longest = self._settings.ring, self.path.shape[1]
        place = torch.arange(size + longest, device=self.path.device).expand(self._settings.batch, -1)
        known, total = self.known[:, None], (self.known + self.length)[:, None]
        node = self.path.gather(1, (place - known).clamp(0, longest - 1)).clamp(min=0)
        source = torch.where(place < known, place, size + node)
        rows = []
        for ring, last in zip(self.ring, (self.scratch[:, :longest], self.last_key, self.last_decay), strict=True):
            both = torch.cat([ring, last], dim=1)
            rows.append(both[torch.arange(len(both), device=both.device)[:, None], source])
        parents = torch.where(place < total, place - 1, PADDING)
        self._run(ops.tree_wy_commit_, self.pool, self.slots, *rows, parents, total[:, 0] - 1)


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Call an operator where its tensors are."""
    return function(*args)


def _without_factor(settings: Rounds, tree: Round, exact: Tensor) -> Tensor:
    """The pseudo-values that belong to keys as given."""
    if not settings.qk_l2norm:
        return exact
    factor = torch.rsqrt((tree.key.double() ** 2).sum(-1) + 1e-6).repeat_interleave(
        settings.value_heads // settings.key_heads, dim=2
    )
    return exact * factor.masked_fill((tree.parents == PADDING)[:, :, None], 0.0).unsqueeze(-1)


def engine_after(settings: Rounds, run: Callable[..., Any] = call) -> tuple[Engine, Round]:
    """Play all rounds but the last, and return that one's tree too."""
    engine, rounds = Engine(settings, run), list(drawn(settings))
    for tree in rounds[:-1]:
        engine.verify(tree)
        engine.accept(tree)
    return engine, rounds[-1]


def play(settings: Rounds, exact: Callable[[Rounds, Tensor, Round], Exact], run: Callable[..., Any] = call) -> Errors:
    """Play the rounds and return the errors; what is not a number but a fact is asserted."""
    engine = Engine(settings, run)
    slots, before = engine.slots, engine.pool.clone()
    has_slot = slots >= 0
    state = settings.pool().double()[slots.clamp(min=0)].masked_fill(~has_slot[:, None, None, None], 0.0)
    worst_output = worst_pseudo_value = 0.0
    for tree in drawn(settings):
        total = engine.known + engine.length
        folds = total > settings.ring
        output = engine.verify(tree)
        assert torch.equal(engine.known, torch.where(folds, 0, total))
        state[folds & ~has_slot] = 0.0  # a row without a slot has nowhere to keep what does not fit into the ring
        right = exact(settings, state, tree)
        absent = tree.parents == PADDING
        scratch = engine.scratch[:, : absent.shape[1]]
        assert output.isfinite().all()
        assert scratch.isfinite().all()
        assert (output[absent] == 0).all()
        assert (scratch[absent] == 0).all()
        if not absent.all():
            expected = _without_factor(settings, tree, right.pseudo_value)
            worst_output = max(worst_output, relative_error(output, right.output))
            worst_pseudo_value = max(worst_pseudo_value, relative_error(scratch, expected))
        state = right.state
        engine.accept(tree)
    engine.fold()
    others = torch.ones(len(before), dtype=torch.bool, device=slots.device)
    others[slots[has_slot]] = False
    assert engine.pool[others].isnan().all()
    return Errors(worst_output, worst_pseudo_value, relative_error(engine.pool[slots[has_slot]], state[has_slot]))


def verify_arguments(solve: SolveInputs) -> tuple[Any, ...]:
    """The path that was accepted in the last tree, which is the tree itself, fits into the ring of the first row alone.

    No argument is another one, and none has NaN in it, which is equal to nothing.
    """
    value, _, key, log_decay, _, state, parents = solve[:7]
    batch, num_nodes = parents.shape
    size = 3

    def ring(x: Tensor) -> Tensor:
        return (x[:, :1] / 2).repeat(1, size, *[1] * (x.ndim - 2))

    index = torch.arange(num_nodes).expand(batch, -1)
    return (
        *(torch.cat([state, state]), torch.arange(batch) * 2),
        *(ring(value).to(state.dtype), ring(key), ring(log_decay), torch.arange(batch).clamp(max=1)),
        *(value.to(torch.promote_types(value.dtype, torch.float32), copy=True), *solve[:5], parents),
        *(key.flip(1), log_decay.flip(1), index.clone(), (2 * torch.arange(batch) + 1).clamp(max=num_nodes)),
        *(solve.scale, solve.qk_l2norm),
    )
