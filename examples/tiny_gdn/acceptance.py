"""Estimate how much of a draft the target accepts, without a speculative engine.

Greedy speculation emits exactly the target's greedy continuation. Every draft token that is accepted is a token of that
continuation, so what the draft model proposes after accepted tokens equals its teacher-forced prediction on the
continuation itself. Ranks of the target's tokens under the teacher-forced draft therefore replay each round exactly.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

LOOP_NGRAM = 8
LOOP_COUNT = 3
DISTINCT_NGRAM = 2
MIN_DISTINCT = 0.5


@dataclass(frozen=True)
class Replay:
    """What greedy speculation does with one continuation."""

    rounds: int
    tokens: int

    def __add__(self, other: "Replay") -> "Replay":
        """Add up rounds and tokens."""
        return Replay(self.rounds + other.rounds, self.tokens + other.tokens)

    @property
    def mean_accepted(self) -> float:
        """Tokens a round, the bonus one included; NaN without rounds."""
        return self.tokens / self.rounds if self.rounds else float("nan")


def replay(ranks: Sequence[int], widths: Sequence[int]) -> Replay:
    """Replay greedy speculation with a tree given by its widths.

    The first token comes from the prefill. A round drafts ``len(widths)`` levels and follows them as long as the
    target's token at level d is among the ``widths[d]`` best of the draft; then the target adds a bonus token. The last
    round stops at the end of the continuation, like generation with a token limit.

    Args:
        ranks: for each token of the continuation, how many tokens the draft rates higher (0: its first choice).
        widths: children a node at each level; ``(1, 1, 1, 1)`` is a chain of depth 4.

    Returns:
        Rounds, and tokens they emitted.
    """
    position, rounds = 1, 0
    while position < len(ranks):
        for width in widths:
            if position >= len(ranks) or ranks[position] >= width:
                break
            position += 1
        position = min(position + 1, len(ranks))
        rounds += 1
    return Replay(rounds, max(0, len(ranks) - 1))


def loops(tokens: Sequence[int]) -> bool:
    """Return whether a continuation repeats itself.

    It does when some run of 8 tokens occurs at least 3 times, or when fewer than half of its pairs of tokens are
    distinct (repetition with a counter in it). Hand-written code with long tables is flagged too: the rule errs towards
    leaving out.

    Args:
        tokens: the continuation.
    """
    long_runs = Counter(tuple(tokens[i : i + LOOP_NGRAM]) for i in range(len(tokens) - LOOP_NGRAM + 1))
    if long_runs and max(long_runs.values()) >= LOOP_COUNT:
        return True
    short_runs = [tuple(tokens[i : i + DISTINCT_NGRAM]) for i in range(len(tokens) - DISTINCT_NGRAM + 1)]
    return bool(short_runs) and len(set(short_runs)) < MIN_DISTINCT * len(short_runs)
