"""Build tests of an engine of your own: a drafter that accepts and rejects by a script."""

from treewy.testing._proposals import NOTHING, Proposal, always_wrong, chain, perfect, tree
from treewy.testing._scripted import ScriptedDrafter

__all__ = [
    "NOTHING",
    "Proposal",
    "ScriptedDrafter",
    "always_wrong",
    "chain",
    "perfect",
    "tree",
]
