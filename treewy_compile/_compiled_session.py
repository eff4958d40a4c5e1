"""A session whose tree forwards are compiled, on CUDA captured as graphs; prefill stays the model's own."""

import inspect
import logging
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from treewy._compiled_forward import CompiledForward
from treewy._decoding import Decoding, Emission
from treewy._draft_tree import DraftTree
from treewy._nodes import DeferredNodes
from treewy._sampling import refuse_unsound
from treewy._session import Session
from treewy._static_stores import StaticStores
from treewy._texts import Texts
from treewy.ops import PADDING
from treewy.passes import find_attention_layers, find_gdn_layers

_log = logging.getLogger(__name__)

RING_ROWS = {"deferred": 16, "fused": 0}
"""Rows of the ring, by commit policy; the first is the default."""

_LEAST_NODES = 32
_BUCKET = 16
_KEPT_PLACES = 4
_GROWN = "keys and values have grown"


@dataclass(frozen=True)
class CompiledSize:
    """A number of rows and nodes that is compiled.

    Args:
        rows: Rows of the batch.
        nodes: Nodes of each row's tree, padding among them.
        captured: Whether a CUDA graph of it is captured.
        operators: How often the rewritten forward calls each operator of ours, by name.
    """

    rows: int
    nodes: int
    captured: bool
    operators: dict[str, int]


class Place:
    """Stores of some rows, and the forwards that are compiled for them.

    Args:
        target: Whose place it is.
        session: After its prefill.
        num_nodes: Most nodes of a tree.
    """

    def __init__(self, target: "CompiledTarget", session: Session, num_nodes: int) -> None:
        layers = find_gdn_layers(target.model), find_attention_layers(target.model)
        self.stores = StaticStores(session.cache, *layers, num_nodes, RING_ROWS[target.commit])
        self._of_all_forwards = (target.model, session.cache_keyword, *layers, self.stores, target.inner)
        self._forwards: dict[int, CompiledForward] = {}
        self._traced = _traced_of(target.model)
        self._captured: dict[str, object] = {}

    def fits(self, session: Session, num_nodes: int) -> bool:
        """Tell whether these are stores for a session and so many nodes, and forwards of its model as it is now."""
        return self.stores.fits(session.cache, num_nodes) and self._traced == _traced_of(session.model)

    def load(self, session: Session) -> None:
        """Take over what a session has committed."""
        moved = self.stores.load(session.cache)
        captured = _captured_of(session.model)
        why = [change for change, value in captured.items() if value != self._captured.get(change)]
        if moved:
            why.append(_GROWN)
        if why:
            self.forget_graphs(why)
        self._captured = captured

    def reserve(self, columns: int) -> None:
        """Make room for so many columns of keys and values."""
        if self.stores.reserve(columns):
            self.forget_graphs([_GROWN])

    def forget_graphs(self, why: list[str]) -> None:
        """Capture again what is used next; what is compiled checks by itself whether it still holds."""
        if any(forward.is_captured for forward in self._forwards.values()):
            _log.info("what is captured for %d rows is captured again: %s", len(self.stores.lengths), ", ".join(why))
        for forward in self._forwards.values():
            forward.forget_graphs()

    def forward(self, num_nodes: int, used: int = 0) -> CompiledForward:
        """Return a forward over at least so many nodes: one that is compiled, if it is not much larger.

        Or one as large as has been ``used`` in the same text: the trees at its end are small, and not worth compiling.
        """
        size = 1 if num_nodes == 1 else num_nodes + -num_nodes % _BUCKET
        size = min((x for x in self._forwards if size <= x <= max(_LEAST_NODES, 2 * size, used)), default=size)
        if size not in self._forwards:
            self._forwards[size] = CompiledForward(*self._of_all_forwards, size)
        return self._forwards[size]

    def sizes(self) -> list[CompiledSize]:
        """List what is compiled."""
        rows = len(self.stores.lengths)
        return [
            CompiledSize(rows, nodes, forward.is_captured, forward.operators)
            for nodes, forward in sorted(self._forwards.items())
            if forward.operators
        ]


class CompiledTarget:
    """What is compiled of a model, kept from one generation to the next.

    Generations that run at the same time, in threads or one within another, have places of their own.

    Args:
        model: The target.
        inner: Backend that compiles the rewritten graphs.
        commit: Commit policy, "deferred" or "fused".
    """

    def __init__(self, model: PreTrainedModel, inner: str, commit: str) -> None:
        self.model, self.inner, self.commit = model, inner, commit
        self._lock = threading.Lock()
        self._free: list[Place] = []  # last used last
        self.has_failed = False  # to compile, which another session need not try again

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Copy as a target of the copied model, for which nothing is compiled yet."""
        return CompiledTarget, (self.model, self.inner, self.commit)

    def open(self, max_cache_len: int | None = None, num_nodes: int = 0) -> "CompiledSession":
        """Begin a generation; see :class:`CompiledSession`."""
        return CompiledSession(self, max_cache_len, num_nodes)

    def take(self, session: Session, num_nodes: int) -> Place:
        """Return a place for the rows of a session and so many nodes."""
        with self._lock:
            fitting = [place for place in self._free if place.fits(session, num_nodes)]
            if fitting:
                self._free.remove(fitting[-1])
                return fitting[-1]
            outdated = any(place.stores.fits(session.cache, num_nodes) for place in self._free)
        why = "hooks or adapters have changed" if outdated else "no others of these sizes and dtypes are free"
        num_nodes = max(_LEAST_NODES, num_nodes)
        _log.info("new stores for %d rows and up to %d nodes: %s", len(session.cache.lengths), num_nodes, why)
        return Place(self, session, num_nodes)

    def sizes(self) -> list[CompiledSize]:
        """List what is compiled and not in use now."""
        with self._lock:
            return [size for place in self._free for size in place.sizes()]

    def give_back(self, place: Place) -> None:
        """Keep a place for later generations; of many, those that were used last."""
        with self._lock:
            self._free = [*self._free, place][-_KEPT_PLACES:]


class CompiledSession(Session):
    """Run compiled tree forwards of one model over one batch.

    A tree is one forward. One that grows is run again as a whole: as long as reading the weights is what takes time, a
    level more costs what its nodes alone would, and all levels share what is compiled.

    Args:
        target: What is compiled of the model.
        max_cache_len: Most columns (tokens, pads and nodes) a row may take; None for no limit.
        num_nodes: How many nodes trees will grow to; smaller ones use the same forward.

    Raises:
        ValueError: If a layer or the attention implementation is not supported.
    """

    def __init__(self, target: CompiledTarget, max_cache_len: int | None = None, num_nodes: int = 0) -> None:
        super().__init__(target.model, DeferredNodes, max_cache_len)
        self._target = target
        self._least_nodes, self._used = num_nodes, 0
        self._place: Place | None = None
        self._token_ids = torch.empty(0, dtype=torch.int64)  # of the nodes on trial
        self._lengths: list[int] = []  # committed columns a row, of which the host need not ask

    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Add nodes to the tree on trial and return their logits, which the next call overwrites; see ``Session``."""
        known = self.num_nodes
        if self.parents is not None:
            token_ids = torch.cat([self._token_ids, token_ids], dim=1)
            parents = torch.cat([self.parents, parents], dim=1)
        self._forward = self.prepare(parents.shape[1])
        logits = self._forward.verify(token_ids, parents)
        self._token_ids, self.parents = token_ids, parents
        return logits[:, known : parents.shape[1]]

    def try_out(self) -> None:
        """Compile what trees will be run by; behind a prefill, with nothing on trial.

        Raises:
            ValueError: If the model cannot be compiled; the session is closed, and its target says ``has_failed``.
        """
        forward = self.reserve(self.cache.columns_used, max(1, self._least_nodes))
        if forward.operators:
            return
        try:
            forward.verify(torch.zeros_like(forward.token_ids), torch.full_like(forward.parents, PADDING))
        except ValueError:
            self._target.has_failed = True
            self._place = None  # nobody needs it
            raise

    def commit(self, accepted_node: Tensor) -> None:
        """Advance all stores along the path to ``accepted_node``; see ``Session.commit``."""
        assert self.parents is not None
        self._forward.commit(accepted_node)
        self.parents = None
        self.follow()

    def reorder(self, index: Tensor) -> None:
        """Let rows hold what others held; see ``Session.reorder``."""
        if self._place is not None:
            self.stores.unload(self.cache)
        super().reorder(index)
        if self._place is not None:
            self._place.load(self)
            self._lengths = self.cache.lengths.tolist()

    def round(
        self, token_ids: Tensor, parents: Tensor, decoding: Decoding, texts: Texts, draft: DraftTree
    ) -> tuple[Emission, int]:
        """Verify, choose and commit, in one launch where the logits decide all; see ``Session.round``."""
        limits = decoding.limits(texts)
        if limits is None or not decoding.scores.traceable:
            emission, _ = super().round(token_ids, parents, decoding, texts, draft)
        else:
            self._forward = self.prepare(parents.shape[1])
            packed = self._forward.round(token_ids, parents, *limits, decoding.device_choice(draft))
            emission, sound = Emission.unpacked(packed.clone())  # the next round overwrites it
            refuse_unsound(sound)
            self.cache.lengths = self.stores.lengths.clone()
            committed = [len(row.token_ids) for row in emission.on_host]
            self._lengths = [length + count for length, count in zip(self._lengths, committed, strict=True)]
            self.cache.columns_used = max(self._lengths)
        return emission, self.stores.num_bytes

    @property
    def has_begun(self) -> bool:
        """Whether there has been a tree."""
        return self._place is not None

    @property
    def stores(self) -> StaticStores:
        """Where everything lies since the first tree."""
        assert self._place is not None
        return self._place.stores

    def plain_cache(self) -> DynamicCache | None:
        """Return what is committed as a plain cache; see ``Session.plain_cache``."""
        if self.has_begun and self.one_length:
            self.stores.unload(self.cache)
        return super().plain_cache()

    def close(self) -> None:
        """Let another session have the place."""
        if self._place is not None:
            self._target.give_back(self._place)
            self._place = None

    def prepare(self, num_nodes: int) -> CompiledForward:
        """Make room for a tree of so many nodes, and return a forward over at least as many."""
        self._check_room(num_nodes)
        return self.reserve(self.cache.columns_used, num_nodes)

    def reserve(self, columns: int, num_nodes: int) -> CompiledForward:
        """Make room for so many nodes behind so many columns, and return a forward over them."""
        most_nodes = max(num_nodes, self._least_nodes)
        if self._place is None or self._place.stores.num_nodes < num_nodes:
            larger = most_nodes + -most_nodes % _BUCKET
            if self._place is not None:
                self._place.stores.unload(self.cache)
                self.close()
            self._place = self._target.take(self, larger)
            self._place.load(self)  # may refuse; `close` gives back what is taken
            self._lengths = self.cache.lengths.tolist()
        forward = self._place.forward(most_nodes, self._used)
        self._used = max(self._used, forward.num_nodes)
        self._place.reserve(columns + forward.num_nodes)
        return forward

    def follow(self) -> None:
        """Let the lengths of the cache follow those of the stores."""
        self.cache.lengths = self.stores.lengths.clone()
        self._lengths = self.cache.lengths.tolist()
        self.cache.columns_used = max(self._lengths)


def _traced_of(model: PreTrainedModel) -> list[object]:
    """Return what a compiled forward does not look at again: hooks and adapters."""
    adapters = "_active_adapter", "_disable_adapters"
    return [
        (list(module._forward_hooks), list(module._forward_pre_hooks), *(str(vars(module).get(x)) for x in adapters))
        for module in model.modules()
    ]


def _captured_of(model: PreTrainedModel) -> dict[str, object]:
    """Return what a captured graph does not look at again, where weights are and modes, by what a change is called."""
    kind = model.device.type
    return {
        "weights have moved": [(x.data_ptr(), x.dtype, x.shape) for x in (*model.parameters(), *model.buffers())],
        "modes have changed": [module.training for module in model.modules()],
        "autocast has changed": (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
    }


def refuse_uncompilable(model: PreTrainedModel, backend: str) -> None:
    """Raise if a compiled forward cannot serve a model that the eager engine can."""
    number = len(DynamicCache(config=model.config.get_text_config(decoder=True)).layers)
    found = {layer.layer_idx for layer in find_gdn_layers(model)}
    found |= {layer.layer_idx for layer in find_attention_layers(model)}
    remedy = "compile it with backend='eager'"
    if not any(x.kind is x.VAR_KEYWORD for x in inspect.signature(model.forward).parameters.values()):
        raise ValueError(
            f"the forward of {type(model).__name__} hands no keyword arguments on to its layers, by which backend "
            f"{backend!r} tells them of a tree; {remedy}"
        )
    for index in range(number):
        if index not in found:
            raise ValueError(
                f"layer {index} of {type(model).__name__} does not ask transformers for its attention function, so "
                f"that backend {backend!r} cannot see it; compile it with backend='eager'"
            )
