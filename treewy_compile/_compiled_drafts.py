"""Draft models behind the backend of the target that they draft for."""

import threading
import warnings

from transformers import PreTrainedModel

from treewy._compiled_session import CompiledTarget, refuse_uncompilable
from treewy._session import Session

_KEPT = 2  # draft models, the last used ones: what is compiled keeps its model


class CompiledDrafts:
    """What is compiled of the draft models of one target.

    A draft model that has been given to ``treewy.compile`` itself runs behind the backend that it was given there.

    Args:
        backend: Of the target.
        commit: Commit policy of the target.
    """

    def __init__(self, backend: str, commit: str) -> None:
        self._backend, self._commit = backend, commit
        self._lock = threading.Lock()
        self._targets: dict[int, tuple[PreTrainedModel, CompiledTarget | None]] = {}  # None: it runs in eager

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        """Copy without what is compiled."""
        return CompiledDrafts, (self._backend, self._commit)

    def open(self, model: PreTrainedModel, num_nodes: int) -> Session:
        """Make the stores of a draft model that will be given so many nodes."""
        target = self._target_of(model)
        return Session(model) if target is None or target.has_failed else target.open(num_nodes=num_nodes)

    def _target_of(self, model: PreTrainedModel) -> CompiledTarget | None:
        own = vars(model).get("generate")
        if hasattr(own, "target"):
            told: CompiledTarget | None = own.target
            return told
        if self._backend == "eager":
            return None
        with self._lock:
            kept = self._targets.pop(id(model)) if id(model) in self._targets else (model, self._new_target(model))
            self._targets[id(model)] = kept
            for oldest in list(self._targets)[:-_KEPT]:
                del self._targets[oldest]
        return kept[1]

    def _new_target(self, model: PreTrainedModel) -> CompiledTarget | None:
        """Return None, with a warning, for a model that cannot be compiled: how it drafts changes no text."""
        try:
            refuse_uncompilable(model, self._backend)
        except ValueError as error:
            warnings.warn(f"the draft model {type(model).__name__} drafts with backend 'eager': {error}", stacklevel=2)
            return None
        return CompiledTarget(model, self._backend, self._commit)
