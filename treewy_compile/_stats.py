"""What a speculative generation did, in numbers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SpeculationStats:
    """Describe one call of ``generate``.

    Args:
        rounds: Verification rounds, counted once however many rows took part.
        target_forwards: Forwards of the target: one a round, and one a chunk of the prefill.
        tokens: New tokens over all rows, the first one (from prefill) included.
        mean_accepted_length: Tokens a row and round, the target's own bonus token included; 0.0 without a round.
        acceptance_by_depth: For depth 1, 2, ...: of the rounds whose tree reached that depth, the fraction in which a
            node of that depth was emitted.
        nodes: Most nodes verified in a round for a row, the root counted.
        state_bytes: Most bytes kept for verification in a round, over all GDN layers and rows: pseudo-values, keys,
            decays and inputs of the convolution, and the known rows of a policy that folds late.
        snapshot_bytes: Bytes that a state and a convolution window a node would have taken instead.

    Source:
        Mean accepted length as in Leviathan et al. (2023), section 3.1.
    """

    rounds: int
    target_forwards: int
    tokens: int
    mean_accepted_length: float
    acceptance_by_depth: tuple[float, ...]
    nodes: int
    state_bytes: int
    snapshot_bytes: int


class StatsCounter:
    """Add up rounds into :class:`SpeculationStats`."""

    def __init__(self) -> None:
        self._rounds = 0
        self._row_rounds = 0
        self._tokens = 0
        self._round_tokens = 0
        self._reached: list[int] = []
        self._emitted: list[int] = []
        self._nodes = 0
        self._state_bytes = 0
        self._snapshot_bytes = 0

    def add_first_tokens(self, num_tokens: int) -> None:
        """Count the tokens that prefill gave."""
        self._tokens += num_tokens

    def add_round(
        self,
        num_tokens: list[int],
        num_accepted: list[int],
        draft_depths: list[int],
        nodes: int,
        state_bytes: int,
        snapshot_bytes: int,
    ) -> None:
        """Count one round: tokens emitted, how many of them drafted, and depth drafted, of each row that took part."""
        self._rounds += 1
        self._row_rounds += len(num_tokens)
        self._tokens += sum(num_tokens)
        self._round_tokens += sum(num_tokens)
        self._nodes = max(self._nodes, nodes)
        self._state_bytes = max(self._state_bytes, state_bytes)
        self._snapshot_bytes = max(self._snapshot_bytes, snapshot_bytes)
        for accepted, depth in zip(num_accepted, draft_depths, strict=True):
            missing = depth - len(self._reached)
            self._reached += [0] * missing
            self._emitted += [0] * missing
            for level in range(depth):
                self._reached[level] += 1
                self._emitted[level] += level < accepted

    def summary(self, prefill_forwards: int) -> SpeculationStats:
        """Return what was counted, and the forwards of the prefill with it."""
        return SpeculationStats(
            rounds=self._rounds,
            target_forwards=self._rounds + prefill_forwards,
            tokens=self._tokens,
            mean_accepted_length=self._round_tokens / self._row_rounds if self._row_rounds else 0.0,
            acceptance_by_depth=tuple(e / r for e, r in zip(self._emitted, self._reached, strict=True)),
            nodes=self._nodes,
            state_bytes=self._state_bytes,
            snapshot_bytes=self._snapshot_bytes,
        )
