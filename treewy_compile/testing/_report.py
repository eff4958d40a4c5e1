"""What a check found: one line a comparison, printed as a table."""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

GDN_STORES = ("GDN state", "convolution window")
ATTENTION_STORES = ("attention keys", "attention values")
NODE_LOGITS = "nodes of trees"
_RELATIVE = (*GDN_STORES, *ATTENTION_STORES, NODE_LOGITS)  # subjects that are compared by relative error
_BLIND = 0.5


@dataclass(frozen=True)
class Comparison:
    """One line of a report.

    Args:
        check: "tokens", "ties", "acceptance", "stores", "node logits" or "commit policies".
        subject: What was compared.
        compared: How many tokens, rounds, stores or nodes.
        worst: The figure that lies nearest to its bound or farthest beyond it.
        bound: Its bound.
        fault: The first difference beyond the bounds, in the order of rounds; None if there is none.
    """

    check: str
    subject: str
    compared: int
    worst: float
    bound: float
    fault: str | None = None

    @property
    def is_blind(self) -> bool:
        """Whether the plain model is so noisy that the bound on a relative error would let faults through."""
        return self.fault is None and self.subject.endswith(_RELATIVE) and self.bound > _BLIND

    @property
    def verdict(self) -> str:
        """One word for the table."""
        return "FAULT" if self.fault is not None else "blind" if self.is_blind else "ok"


@dataclass(frozen=True)
class Tie:
    """A difference of two texts where the plain model finds both tokens as good, within its own noise.

    Args:
        generation: Which generation.
        row: Row of the batch.
        position: Index among the new tokens.
        expected: Token of plain generation.
        actual: Token of speculative generation.
        gap: How far the worse of the two lies below the plain model's best logit.
    """

    generation: str
    row: int
    position: int
    expected: int
    actual: int
    gap: float

    def __str__(self) -> str:
        """Say where the texts part."""
        return (
            f"row {self.row}: new token {self.position} is {self.actual}, plain generation has {self.expected}; the "
            f"plain model has a gap of {self.gap:.1e} there"
        )


@dataclass(frozen=True)
class EquivalenceReport:
    """What :func:`treewy.testing.check_equivalence` compared.

    Args:
        model: Class, dtype and device of the model.
        comparisons: One a line of the table.
        ties: Where texts parted without a fault.

    Example:
        >>> EquivalenceReport("tiny", (Comparison("tokens", "chain", 32, 0.0, 1e-4),), ()).passed
        True

    Source:
        docs/testing.md says what each line means.
    """

    model: str
    comparisons: tuple[Comparison, ...]
    ties: tuple[Tie, ...]

    @property
    def passed(self) -> bool:
        """Whether no comparison found a fault."""
        return not self.faults

    @property
    def faults(self) -> tuple[Comparison, ...]:
        """The comparisons that found one."""
        return tuple(comparison for comparison in self.comparisons if comparison.fault is not None)

    def print(self) -> None:
        """Print a line a comparison, then ties and faults."""
        table = Table("check", "of", "compared", "worst", "bound", "", title=f"treewy on {self.model}")
        for line in self.comparisons:
            figures = (f"{line.compared:,}", f"{line.worst:.2g}", f"{line.bound:.2g}")
            table.add_row(line.check, line.subject, *figures, line.verdict)
        console = Console(highlight=False, markup=False)
        console.print(table)
        for tie in self.ties:
            console.print(f"tie in {tie.generation}, {tie}", soft_wrap=True)
        if any(line.is_blind for line in self.comparisons):
            console.print(
                "blind: the plain model is so noisy that this shows no fault; check a float32 copy of it",
                soft_wrap=True,
            )
        for line in self.faults:
            console.print(f"FAULT in {line.check}, {line.subject}: {line.fault}", soft_wrap=True)


class EquivalenceError(AssertionError):
    """Raised when speculative decoding of a model differs from plain decoding.

    Args:
        report: Everything that was compared.
    """

    def __init__(self, report: EquivalenceReport) -> None:
        self.report = report
        faults = [f"{line.check}, {line.subject}: {line.fault}" for line in report.faults]
        if "float32" not in report.model:
            faults.append("rounding that turns a router of experts can look so too: check a float32 copy as well")
        super().__init__("\n".join([f"treewy differs from plain decoding on {report.model}", *faults]))
