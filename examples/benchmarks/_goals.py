"""A table of goals, and whether what was measured reaches them."""

from collections.abc import Iterable

Goal = tuple[str, list[float], float, bool]
"""What is measured, its values, the bound, and whether that is one from above."""


def table(goals: Iterable[Goal]) -> str:
    """Return a line a goal: the worst of its values, the bound, and whether it is reached."""
    lines = [f"{'goal, by the worst of its rows':56} {'measured':>9} {'goal':>9}"]
    for name, values, bound, from_above in goals:
        goal = f"{'<=' if from_above else '>='} {bound:g}"
        if not values:
            lines.append(f"{name:56} {'-':>9} {goal:>9}  not run")
            continue
        worst = max(values) if from_above else min(values)
        reached = worst <= bound if from_above else worst >= bound
        lines.append(f"{name:56} {worst:9.2f} {goal:>9}  {'reached' if reached else 'not reached'}")
    return "\n".join(lines)
