"""What whole generations are to reach, and whether the rows of `end_to_end.py` do."""

from collections.abc import Iterator
from typing import Any

from _end_to_end_rows import CHAINS, EQUAL_CHAINS, FREE, POLICIES, REJECTED, TREES, WRONG
from _goals import Goal, table

_LONGER = 1.05  # a tree that is accepted so much longer than the best chain is to beat it


def _goals(rows: list[dict[str, Any]]) -> Iterator[Goal]:
    measured = {(row["model"], row["batch"], row["way"]): row for row in rows if "tokens_per_s" in row}
    speeds = {key: row["tokens_per_s"] for key, row in measured.items()}
    settings = sorted({(model, batch) for model, batch, _ in measured})

    def ratios(model: str, batch: int, upper: list[str], lower: str) -> list[float]:
        if (model, batch, lower) not in speeds:
            return []
        return [speeds[key] / speeds[model, batch, lower] for way in upper if (key := (model, batch, way)) in speeds]

    for model, free in (("pair", ""), ("large", FREE), ("large", "")):
        drafted = [name + free for name in (*CHAINS, *EQUAL_CHAINS, *TREES)]
        best = ratios(model, 1, drafted, "plain")
        yield f"{model}{free}, batch 1: best over plain", [max(best)] if best else [], 2.0, False
    for model, batch in settings:
        for free in ("", FREE) if model == "large" else ("",):
            chains = [key for name in (*CHAINS, *EQUAL_CHAINS) if (key := (model, batch, name + free)) in measured]
            best_chain = max(chains, key=speeds.__getitem__, default=None)
            if best_chain is None:
                continue
            needed = _LONGER * measured[best_chain]["mean_accepted_length"]
            trees = [key for name in TREES if (key := (model, batch, name + free)) in measured]
            longer = [key for key in trees if measured[key]["mean_accepted_length"] >= needed]
            if longer:  # the goal is for these alone
                values = [speeds[key] / speeds[best_chain] for key in longer]
                yield f"{model}{free}, batch {batch}: longer trees over best chain", values, 1.0, False
    for model, batch in settings:
        wrong = [name + WRONG for name in REJECTED]
        slower = [1 / ratio for ratio in ratios(model, batch, wrong, "plain")]
        yield f"{model}, batch {batch}: time of wrong drafts over plain", slower, 1.05, True
        for name in wrong if model == "pair" else ():
            ours = [name, f"{name}, eager {POLICIES[0]}"]
            faster = ratios(model, batch, ours, f"{name}, eager {POLICIES[1]}")
            yield f"{model}, batch {batch}, {name}: over snapshots", faster, 1.0, False


def goal_table(rows: list[dict[str, Any]]) -> str:
    """Return a line a goal: the worst value, the goal, and whether it is reached."""
    return table(_goals(rows))
