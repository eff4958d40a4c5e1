"""Speculative decoding for Gated DeltaNet models: chains and draft trees without state snapshots.

``treewy.compile(model)`` makes ``model.generate(assistant_model=...)`` work on Hugging Face hybrids such as Qwen3.5 and
Qwen3-Next. Names are imported on first use, so that ``treewy.ops`` can be used without transformers.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treewy._assistant import AssistantDrafter
    from treewy._compile import compile, restore
    from treewy._compiled_session import CompiledSize
    from treewy._draft_tree import DraftTree
    from treewy._drafters import Drafter, DraftingContext, PromptLookupDrafter
    from treewy._explain import ExplainedLayer, Explanation, explain
    from treewy._stats import SpeculationStats

__version__ = version("treewy")

__all__ = [
    "AssistantDrafter",
    "CompiledSize",
    "DraftTree",
    "Drafter",
    "DraftingContext",
    "ExplainedLayer",
    "Explanation",
    "PromptLookupDrafter",
    "SpeculationStats",
    "compile",
    "explain",
    "restore",
]

_HOMES = {
    "AssistantDrafter": "treewy._assistant",
    "CompiledSize": "treewy._compiled_session",
    "DraftTree": "treewy._draft_tree",
    "Drafter": "treewy._drafters",
    "DraftingContext": "treewy._drafters",
    "ExplainedLayer": "treewy._explain",
    "Explanation": "treewy._explain",
    "PromptLookupDrafter": "treewy._drafters",
    "SpeculationStats": "treewy._stats",
    "compile": "treewy._compile",
    "explain": "treewy._explain",
    "restore": "treewy._compile",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
