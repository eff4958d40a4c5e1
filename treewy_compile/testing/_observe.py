"""Watch a generation from outside: after every round, the stores and the logits against the plain model."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from treewy._cache import TreeCache
from treewy._compiled_session import CompiledSession, CompiledTarget
from treewy._decoding import Emission
from treewy._draft_tree import DraftTree
from treewy._drafters import Drafter, DraftingContext
from treewy.testing._bounds import Noise, relative_error
from treewy.testing._plain import PlainRun, Stores, committed_stores, logits_at_once, stores_at_once


@dataclass(frozen=True)
class StoreError:
    """The error of one store of one row after one round; round 0 is the prefill."""

    row: int
    round: int
    layer: int
    store: str
    error: float  # relative
    tokens: str = ""  # what is wrong with the number of committed tokens, if anything


@dataclass(frozen=True)
class NodeError:
    """The error of the logits of one verified node; node 0 is the root, the last emitted token."""

    row: int
    round: int
    node: int
    depth: int
    error: float  # relative


class ObservedDrafter(Drafter):
    """Pass on what another drafter proposes, and compare with the plain model whenever ``generate`` calls.

    Args:
        drafter: Who proposes.
        model: The target.
        pads: Pads on the left of each row.
        max_new_tokens: As ``generate`` is told.
        noise: Where to add the noise of the plain model, measured on the way; None to measure none.
    """

    def __init__(
        self, drafter: Drafter, model: PreTrainedModel, pads: Sequence[int], max_new_tokens: int, noise: Noise | None
    ) -> None:
        self._drafter = drafter
        self._model = model
        self._pads = pads
        self._max_new_tokens = max_new_tokens
        self._noise = noise
        self._plain = [PlainRun(model) for _ in pads]
        self._texts: list[list[int]] = []
        self._prompt_lengths: list[int] = []
        self._round = 0
        self._draft: DraftTree | None = None
        self._cache: TreeCache | None = None  # of the generation that is watched
        self._logits = torch.empty(0)  # of its last forward [B, N, V]
        self.store_errors: list[StoreError] = []
        self.node_errors: list[NodeError] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Let the model show its cache and logits while the context is open."""
        generate = vars(self._model)["generate"]
        if generate.target is None:
            with self._watching_forwards():
                yield
            return
        target = generate.target
        generate.target = watched = _WatchedTarget(target, self._see)
        try:
            yield
        finally:
            generate.target = target
            watched.leave_to(target)

    def _see(self, cache: TreeCache, logits: Tensor) -> None:
        self._cache, self._logits = cache, logits

    @contextmanager
    def _watching_forwards(self) -> Iterator[None]:
        def look(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            cache = kwargs.get("cache", kwargs.get("past_key_values"))
            if isinstance(cache, TreeCache):  # a forward of the engine, not one of ours
                self._see(cache, output.logits)

        hook = self._model.register_forward_hook(look, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
        """Pass a proposal on; before the first one, compare what prefill left."""
        if not self._texts:
            self._texts = [row[:length] for row, length in zip(input_ids.tolist(), lengths.tolist(), strict=True)]
            self._prompt_lengths = [len(text) - 1 for text in self._texts]
            self._compare_stores()
        self._draft = self._drafter.propose(input_ids, lengths)
        return self._draft

    def update(self, token_ids: Tensor, num_tokens: Tensor) -> None:
        """Compare what the round verified and what it committed."""
        self._drafter.update(token_ids, num_tokens)
        self._round += 1
        counts: list[int] = num_tokens.tolist()
        for row, count in enumerate(counts):
            if count > 0:
                self._compare_nodes(row)
        for row, count in enumerate(counts):
            self._texts[row] += token_ids[row, :count].tolist()
        self._compare_stores()

    def prepare(self, context: DraftingContext) -> None:
        """Pass on what the drafts are for."""
        if hasattr(self._drafter, "prepare"):
            self._drafter.prepare(context)

    def reset(self) -> None:
        """Reset the drafter; one of these watches a single generation."""
        self._drafter.reset()

    def reorder(self, index: Tensor) -> None:
        """Reorder the drafter; greedy generation never does."""
        self._drafter.reorder(index)

    def measure_logits(self) -> None:
        """Add the noise of the logits after each new token to the noise."""
        assert self._noise is not None
        for plain, text, start in zip(self._plain, self._texts, self._prompt_lengths, strict=True):
            together = logits_at_once(self._model, [text[:-1]], keep=len(text) - start)[0]
            for one_by_one, at_once in zip(plain.logits[start - 1 :], together, strict=True):
                self._noise.logits = max(self._noise.logits, relative_error(at_once, one_by_one))
                best = one_by_one.float().topk(2).indices
                (a, b), (c, d) = one_by_one[best].float().tolist(), at_once[best].float().tolist()
                self._noise.gaps.append((a - b, abs((c - d) - (a - b))))

    def _compare_stores(self) -> None:
        assert self._cache is not None
        lengths: list[int] = self._cache.lengths.tolist()
        for row, ours in enumerate(committed_stores(self._cache, self._pads)):
            committed = self._texts[row][:-1]  # the last token is the next root
            plain = self._plain[row]
            grown = plain.num_tokens < len(committed)
            plain.follow(committed)
            expected = plain.stores()
            for layer in plain.sliding_layers:  # ours keeps all columns and leaves the window to the mask
                ours[layer] = {
                    store: tensor[:, -expected[layer][store].shape[1] :] for store, tensor in ours[layer].items()
                }
            held = lengths[row] - self._pads[row]
            tokens = "" if held == len(committed) else f"holds {held} tokens, not {len(committed)}"
            self.store_errors += [
                StoreError(row, self._round, layer, store, error, tokens)
                for layer, store, error in _differences(ours, expected)
            ]
            if grown and self._noise is not None:
                for layer, store, error in _differences(stores_at_once(self._model, committed), expected):
                    self._noise.stores[layer, store] = max(self._noise.stores.get((layer, store), 0.0), error)

    def _compare_nodes(self, row: int) -> None:
        """Compare the logits of every verified node of a row with a plain forward over its own path."""
        assert self._draft is not None
        text = self._texts[row]
        room = self._max_new_tokens - (len(text) - self._prompt_lengths[row])  # deeper nodes are not verified
        size = int(self._draft.num_nodes[row])
        tokens: list[int] = self._draft.token_ids[row, :size].tolist()
        paths: list[list[int]] = [[]]  # tokens from the root, which is node 0, down to each node
        parent_of = [-1]
        kept = [0]
        for node, parent in enumerate(self._draft.parents[row, :size].tolist()):
            paths.append([*paths[parent + 1], tokens[node]])
            parent_of.append(parent + 1)
            if len(paths[-1]) < room:
                kept.append(node + 1)
        leaves = [node for node in kept if not any(parent_of[other] == node for other in kept)]
        deepest = max(len(paths[leaf]) for leaf in leaves)
        texts = [text + paths[leaf] for leaf in leaves]
        plain = logits_at_once(self._model, texts, keep=deepest + 1)
        for node in kept:
            depth = len(paths[node])
            leaf = next(i for i, leaf in enumerate(leaves) if paths[leaf][:depth] == paths[node])
            error = _finite(relative_error(self._logits[row, node], plain[leaf, depth]))
            self.node_errors.append(NodeError(row, self._round, node, depth, error))


class _WatchedTarget(CompiledTarget):
    """What is compiled of a model, showing what each round leaves: hooks would be compiled too.

    Args:
        target: What is compiled otherwise.
        see: Called with the stores of a generation and the logits of the nodes of its last round [B, N, V].
    """

    def __init__(self, target: CompiledTarget, see: Callable[[TreeCache, Tensor], None]) -> None:
        super().__init__(target.model, target.inner, target.commit)
        self.see = see

    def leave_to(self, target: CompiledTarget) -> None:
        """Let another one go on with what is compiled."""
        for place in self._free:
            target.give_back(place)

    def open(self, max_cache_len: int | None = None, num_nodes: int = 0) -> CompiledSession:
        session = _WatchedSession(self, max_cache_len, num_nodes)
        self.see(session.cache, torch.empty(0))
        return session


class _WatchedSession(CompiledSession):
    _target: _WatchedTarget

    def round(self, token_ids: Tensor, *args: Any) -> tuple[Emission, int]:
        emission = super().round(token_ids, *args)
        assert self._forward.logits is not None
        self.stores.unload(self.cache)
        self._target.see(self.cache, self._forward.logits[:, : token_ids.shape[1]])
        return emission


def _differences(ours: Stores, expected: Stores) -> Iterator[tuple[int, str, float]]:
    """Yield layer, store and relative error; infinity for a store of another size."""
    for layer, (mine, plain) in enumerate(zip(ours, expected, strict=True)):
        for store, tensor in plain.items():
            same_size = mine[store].shape == tensor.shape
            yield layer, store, _finite(relative_error(mine[store], tensor)) if same_size else math.inf


def _finite(error: float) -> float:
    """Return an error that compares as one: infinity for NaN."""
    return math.inf if math.isnan(error) else error
