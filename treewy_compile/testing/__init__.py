"""Check a model of your own, and build tests of an engine of your own.

``check_equivalence(model)`` tells whether speculative decoding of a model gives the tokens of plain generation.
``ScriptedDrafter`` accepts and rejects by a script, and the strategies draw trees, scripts and inputs of the operators
for Hypothesis, which they alone need. Names are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treewy.testing._equivalence import check_equivalence
    from treewy.testing._op_cases import AttentionInputs, ConvInputs, OpCase, SolveInputs
    from treewy.testing._proposals import NOTHING, Proposal, always_wrong, chain, perfect, tree
    from treewy.testing._report import Comparison, EquivalenceError, EquivalenceReport, Tie
    from treewy.testing._scripted import ScriptedDrafter
    from treewy.testing._strategies import draft_trees, op_cases, proposals, scripts, topologies

__all__ = [
    "NOTHING",
    "AttentionInputs",
    "Comparison",
    "ConvInputs",
    "EquivalenceError",
    "EquivalenceReport",
    "OpCase",
    "Proposal",
    "ScriptedDrafter",
    "SolveInputs",
    "Tie",
    "always_wrong",
    "chain",
    "check_equivalence",
    "draft_trees",
    "op_cases",
    "perfect",
    "proposals",
    "scripts",
    "topologies",
    "tree",
]

_HOMES = {
    "_equivalence": ("check_equivalence",),
    "_op_cases": ("AttentionInputs", "ConvInputs", "OpCase", "SolveInputs"),
    "_proposals": ("NOTHING", "Proposal", "always_wrong", "chain", "perfect", "tree"),
    "_report": ("Comparison", "EquivalenceError", "EquivalenceReport", "Tie"),
    "_scripted": ("ScriptedDrafter",),
    "_strategies": ("draft_trees", "op_cases", "proposals", "scripts", "topologies"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"{__name__}.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
