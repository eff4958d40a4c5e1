"""Compiled rounds over nodes: the forward, what it accepts, and the commit, on CUDA each captured as a graph.

A graph has a number of rows and of nodes, and memory of its own. All else is data: tokens, parents, which node is
accepted, how long each row is. So one graph serves every tree of its size, and rows that have ended are padding.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from traceback import FrameSummary
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from transformers import PreTrainedModel

from treewy._decoding import cut
from treewy._device_choice import DeviceChoice
from treewy._progress import compiling
from treewy._static_stores import HandedOut, StaticStores
from treewy._whole_draft import Levels, WholeDraft
from treewy.ops import PADDING, depths
from treewy.passes import AttentionLayerInfo, GdnLayerInfo, LayerInfo, TreeBackend, redirect_layers

_log = logging.getLogger(__name__)

_KEPT_ROUNDS = 4
"""Ways of choosing, and shapes of drafts, whose graphs are kept; each has memory for a round."""


class CompiledForward:
    """A model's rounds over a number of nodes, behind some stores.

    The first call compiles, and runs what was compiled: it changes the stores, so that it cannot be repeated for a
    capture. The second call captures.

    Args:
        model: The target, or a draft model.
        cache_keyword: Name under which the model takes its cache.
        gdn_layers: Its Gated DeltaNet layers.
        attention_layers: Its attention layers.
        stores: Where everything lies; another place needs another object.
        inner: Backend behind ours.
        num_nodes: N.
    """

    @torch.inference_mode(False)  # or nothing could be written outside of it
    def __init__(
        self,
        model: PreTrainedModel,
        cache_keyword: str,
        gdn_layers: list[GdnLayerInfo],
        attention_layers: list[AttentionLayerInfo],
        stores: StaticStores,
        inner: str,
        num_nodes: int,
    ) -> None:
        self.num_nodes = num_nodes
        self._stores = stores
        self._layers: list[LayerInfo] = [*gdn_layers, *attention_layers]
        lengths = stores.lengths
        self._size = f"{num_nodes} nodes x {len(lengths)} rows"
        self.token_ids = lengths.new_zeros(len(lengths), num_nodes)
        self.parents = torch.full_like(self.token_ids, PADDING)
        self.accepted_node, self._room = torch.zeros_like(lengths), torch.zeros_like(lengths)
        self._inner = inner
        self._rounds: dict[Hashable, _Round] = {}  # last used last
        self._drafts: dict[Hashable, WholeDraft] = {}
        # A mask with four dimensions is taken as it is; passes leave nothing that would read it.
        mask = torch.ones(len(lengths), 1, num_nodes, 1, dtype=torch.bool, device=lengths.device)
        more: dict[str, Any] = {cache_keyword: stores.cache}
        if getattr(model.config.get_text_config(decoder=True), "output_router_logits", False):
            more["output_router_logits"] = False  # a training loss over the experts, which reads a mask of tokens

        def forward(token_ids: Tensor, parents: Tensor, next_position: Tensor, prefix: Any) -> Tensor:
            logits: Tensor = model(
                input_ids=token_ids,
                attention_mask=mask,
                position_ids=next_position[..., None] + depths(parents).clamp(min=0),
                use_cache=True,
                return_dict=True,
                treewy_parents=parents,
                treewy_prefix=prefix,
                **more,
            ).logits
            return logits

        self._backend = backend = TreeBackend(gdn_layers, attention_layers, stores.of_layers, inner)
        of_dynamo = weakref.ref(backend)  # which never lets go of a backend, nor of what hangs on it

        def rewrite(graph_module: GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
            living = of_dynamo()
            assert living is not None
            return living(graph_module, example_inputs)

        self._forward = self.compiled(forward, "rewriting and compiling", rewrite)
        self._commit: Callable[..., None] = self.compiled(StaticStores.commit, "compiling the commit of")
        self._vocab_size = model.config.get_text_config(decoder=True).vocab_size
        self.handed_out: HandedOut = {}
        """By the verification that is to be committed; each has places of its own."""
        self.logits: Tensor | None = None
        """Of the nodes that were verified last [B, N, V]; the next call overwrites them."""
        self.forget_graphs()

    def forget_graphs(self) -> None:
        """Capture again: something has moved that graphs do not look up."""
        self._verified = self.captured(self.run_verify, "a verification")
        self._committed = self.captured(self.run_commit, "a commit")
        for of_choice in self._rounds.values():
            self._capture_round(of_choice)
        for draft in self._drafts.values():
            draft.forget_graphs()

    def compiled(
        self, function: Callable[..., Any], what: str, backend: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Compile a function once it is called, with a backend of ours or with the inner one; "eager" needs none."""
        if backend is None and self._inner == "eager":
            return function
        chosen = torch._dynamo.lookup_backend(self._inner) if backend is None else backend
        doing = f"{what} {self._size} with {self._inner}"  # not `self`: Dynamo never lets go of a backend

        def compile_graph(graph_module: GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
            with compiling(_log, doing):
                result: Callable[..., Any] = chosen(graph_module, example_inputs)
                return result

        return torch.compile(_with_own_code(function), fullgraph=True, dynamic=False, backend=compile_graph)

    def whole_draft(self, levels: Levels, vocab_size: int, draft_vocab_size: int) -> WholeDraft:
        """Return what drafts trees of a shape with this model; see :class:`WholeDraft`."""
        key = str(levels), vocab_size, draft_vocab_size
        draft = self._drafts.pop(key, None) or WholeDraft(self, levels, vocab_size, draft_vocab_size)
        self._drafts = dict([*self._drafts.items(), (key, draft)][-_KEPT_ROUNDS:])
        return draft

    def captured(self, function: Callable[[], Any], what: str) -> Callable[[], Any]:
        """Return a function that is captured where there are CUDA graphs."""
        if not self.token_ids.is_cuda:
            return function
        return Captured(function, self.token_ids.device, f"{what} of {self._size}")

    @property
    def is_captured(self) -> bool:
        """Whether there is a graph of a round or of a part of one."""
        functions = [self._verified, self._committed, *(of_choice.run for of_choice in self._rounds.values())]
        functions += [function for draft in self._drafts.values() for function in draft.captured]
        return any(getattr(function, "graph", None) is not None for function in functions)

    @property
    def operators(self) -> dict[str, int]:
        """How often the rewritten forward calls each operator of ours; empty until it is compiled."""
        return dict(self._backend.operators)

    def verify(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Return the logits of nodes [B, N, V], or of more of them; they are overwritten by the next call."""
        self._take(token_ids, parents)
        logits: Tensor
        logits, self.handed_out = self._verified()
        self.logits = logits
        return logits

    def commit(self, accepted_node: Tensor) -> None:
        """Commit the path to a node [B] of those that were verified last."""
        self.accepted_node.copy_(accepted_node)
        self._committed()

    def _take(self, token_ids: Tensor, parents: Tensor) -> None:
        """Put nodes into their places, and padding behind them: of one token, which wakes few experts."""
        size = parents.shape[1]
        self.token_ids[:, :size].copy_(token_ids)
        self.parents[:, :size].copy_(parents)
        if size < self.num_nodes:
            self.token_ids[:, size:].fill_(0)
            self.parents[:, size:].fill_(PADDING)

    def round(self, token_ids: Tensor, parents: Tensor, room: Tensor, eos: Tensor, choice: DeviceChoice) -> Tensor:
        """Verify nodes, choose paths, commit.

        Args:
            token_ids: Of no more nodes than there are places [B, N].
            parents: [B, N].
            room: How many tokens each row may emit [B], on any device.
            eos: Tokens that end a row [E], on any device; the same tensor again has the same tokens.
            choice: Who chooses.

        Returns:
            A packed :class:`Emission`; it is overwritten by the next call.
        """
        of_choice = self._round_of(choice, len(eos))
        self._take(token_ids, parents)
        self._room.copy_(room, non_blocking=True)
        if of_choice.eos_given is not eos:
            of_choice.eos.copy_(eos)
            of_choice.eos_given = eos
        choice.fill(*of_choice.places)
        packed: Tensor
        packed, self.logits = of_choice.run()
        return packed

    def _round_of(self, choice: DeviceChoice, num_eos: int) -> "_Round":
        """Return what is compiled and captured of rounds with such a choice, of which a few are kept."""
        key = choice.key, num_eos
        of_choice = self._rounds.pop(key, None)
        if of_choice is None:
            of_choice = self._new_round(choice, num_eos)
        self._rounds = dict([*self._rounds.items(), (key, of_choice)][-_KEPT_ROUNDS:])
        return of_choice

    @torch.inference_mode(False)  # as above
    def _new_round(self, choice: DeviceChoice, num_eos: int) -> "_Round":
        device = self.token_ids.device
        choice = choice.to_compile(device)

        def accept(
            logits: Tensor, token_ids: Tensor, parents: Tensor, room: Tensor, eos: Tensor, *places: Tensor
        ) -> tuple[Tensor, Tensor]:
            node, token, sound = choice.paths(logits, token_ids, parents, *places)
            emission = cut(token_ids, parents, node, token, room, eos)
            return emission.node, emission.packed(sound)

        places = choice.places((*self.token_ids.shape, self._vocab_size), device)
        compiled = self.compiled(accept, "compiling the acceptance of")
        of_choice = _Round(compiled, self.token_ids.new_zeros(num_eos), places)
        self._capture_round(of_choice)
        return of_choice

    def _capture_round(self, of_choice: "_Round") -> None:
        of_choice.run = self.captured(lambda: self._round(of_choice), "a round")

    @property
    def round_graph(self) -> torch.cuda.CUDAGraph | None:
        """The graph of the last round, once it is captured."""
        return getattr([*self._rounds.values()][-1].run, "graph", None)

    def run_verify(self) -> tuple[Tensor, HandedOut]:
        """Verify, as a part of what is captured, the nodes in ``token_ids`` and ``parents``.

        Returns:
            Their logits, and what has to be in ``handed_out`` when they are committed, also behind a replay.
        """
        logits, handed_out = self._verify()
        self._stores.take_in(handed_out)
        return logits, handed_out

    def run_commit(self) -> None:
        """Commit, as a part of what is captured: the path to ``accepted_node``."""
        self._commit(self._stores, self.handed_out, self.parents, self.accepted_node)

    def _verify(self) -> tuple[Tensor, HandedOut]:
        place = self._stores.next_position, self._stores.prefix
        tracing = nullcontext() if self._backend.operators else compiling(_log, f"tracing and compiling {self._size}")
        try:
            with tracing, redirect_layers(self._layers):
                logits = self._forward(self.token_ids, self.parents, *place)
        except BackendCompilerFailed as failed:
            if isinstance(failed.inner_exception, ValueError):  # a pass has said what to do
                raise failed.inner_exception from failed
            raise
        except FailOnRecompileLimitHit as failed:
            raise ValueError(
                "torch.compile would compile this model again in every round, for its forward reads something that "
                "changes; remove hooks that count or collect, or compile it with backend='eager'"
            ) from failed
        except (TorchDynamoException, GuardOnDataDependentSymNode) as failed:
            why = (str(failed).strip().splitlines() or [type(failed).__name__])[0]
            where = "".join(f", in {frame.name} at {frame.filename}:{frame.lineno}" for frame in _innermost(failed))
            raise ValueError(
                f"torch.compile cannot trace this model{where} ({why}); compile it with backend='eager', or do without "
                "what stands there: a hook, or experts or kernels that it cannot trace"
            ) from failed
        return logits, self._backend.handed_out

    def _round(self, of_choice: "_Round") -> tuple[Tensor, Tensor]:
        logits, handed_out = self._verify()
        tree = self.token_ids, self.parents
        node, packed = of_choice.accept(logits, *tree, self._room, of_choice.eos, *of_choice.places)
        self._commit(self._stores, handed_out, self.parents, node)
        return packed, logits


@dataclass
class _Round:
    """What is compiled and captured of rounds that choose in one way.

    Args:
        accept: Chooses paths, and cuts them where texts end; returns the nodes to commit and a packed emission.
        eos: Tokens that end a row [E].
        places: What the choice fills before a round.
        eos_given: What ``eos`` is a copy of.
        run: Runs a round, or replays it.
    """

    accept: Callable[..., tuple[Tensor, Tensor]]
    eos: Tensor
    places: tuple[Tensor, ...]
    eos_given: Tensor | None = None
    run: Callable[[], Any] = field(init=False)


class Captured:
    """A function without arguments, captured as a CUDA graph at its second call and replayed from then on.

    The first call runs it: it may compile and make room for itself, which a capture must not. What a replay returns is
    overwritten by the next. Other threads may do as they like meanwhile, but not capture.
    """

    _one_at_a_time = threading.Lock()

    def __init__(self, function: Callable[[], Any], device: torch.device, what: str) -> None:
        self._function = function
        self._device = device
        self._what = what
        self.graph: torch.cuda.CUDAGraph | None = None
        self._results: Any = None
        self._has_run = False

    def __call__(self) -> Any:
        """Run, capture and replay, or replay."""
        with torch.cuda.device(self._device):  # a capture is of the current one
            if not self._has_run:
                results = self._function()
                self._has_run = True
                return results
            if self.graph is None:
                graph = torch.cuda.CUDAGraph()
                with (
                    compiling(_log, f"capturing {self._what}"),
                    self._one_at_a_time,
                    _own_workspace(),
                    torch.cuda.graph(graph, capture_error_mode="thread_local"),
                ):
                    self._results = self._function()
                self.graph = graph
            self.graph.replay()
            return self._results


@contextmanager
def _own_workspace() -> Iterator[None]:
    """Let what is captured have a workspace of cuBLAS in its own memory.

    PyTorch keeps one a stream, also one that was made in a capture, in the memory of that graph. The next graph would
    use it as well, and hang in the air once the first is gone and somebody, such as ``torch.compile`` with graphs of
    its own, has PyTorch forget its workspaces. To forget them, as is done here, is for all streams alike: a graph that
    somebody else captured over the workspace of a stream that was used before needs one of its own, as there.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def _innermost(failed: Exception) -> list[FrameSummary]:
    """Return the line of the traced program where Dynamo stopped, if it says so."""
    return list(getattr(failed, "real_stack", None) or [])[-1:]


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with a code object of its own.

    Dynamo keeps what it compiles by code object, and a limited number of it: forwards over other numbers of nodes and
    of other models would count as one function that is compiled again and again.
    """
    assert isinstance(function, FunctionType)
    code, closure = function.__code__.replace(), function.__closure__
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
