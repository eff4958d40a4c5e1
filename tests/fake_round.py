"""Whole rounds on a GPU, without one: would a CUDA graph hold them? For a process of its own, as `fake_inductor.py`.

    python tests/fake_round.py NAMES

compiles the round of a tiny model of each of these families (verify, greedy choice, commit) for tensors that only claim
to be on a GPU, and prints how many graphs that makes and what is in the way of a capture, mostly in PyTorch's own
opinion. With "qwen3_next" go rounds of that model which choose otherwise, and with "what no capture allows" comes a
round that does what no capture allows.
"""

import copy
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import is_cudagraph_unsafe_fx_node
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from fake_cuda import fake_cuda, obstacle
from fake_inductor import SETTINGS, h200
from models import BITWISE_EXPERTS, MIXTURES, plain_model, random_tokens
from treewy._compiled_forward import CompiledForward
from treewy._device_choice import DeviceChoice
from treewy._draft_tree import Sampling
from treewy._greedy import GreedyChoice
from treewy._sampling import SampledChoice
from treewy._scores import Scores
from treewy._session import Session
from treewy._static_stores import StaticStores
from treewy.passes import _backend, find_attention_layers, find_gdn_layers

NUM_NODES = 6
DTYPES = {"qwen3_5": torch.float32}
"""By family; the others in bfloat16. Its vision model has the same layers."""
SCHEDULED = "qwen3_next_moe"
"""The family whose graphs go through Inductor as well, which takes long: layers of every kind, dense and experts."""
CHOOSING = "qwen3_next"
"""The family whose rounds choose in every way."""
FORBIDDEN = "what no capture allows"
WARPERS = LogitsProcessorList(
    [
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(7),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.1),
        TypicalLogitsWarper(0.9),
        EpsilonLogitsWarper(0.01),
        InfNanRemoveLogitsProcessor(),
        LogitNormalization(),
    ]
)
NOT_FOR_GRAPHS = "a mask that decides where scores are set"
"""In the head filter of transformers, which is left to rounds of two graphs."""
CHOICES: dict[str, tuple[list[Any], Sampling | None]] = {
    "greedy, behind processors": (WARPERS, None),
    "sampled, top": (WARPERS, "top"),
    "sampled, with_replacement": ([], "with_replacement"),
    "sampled, without_replacement": (WARPERS, "without_replacement"),
    NOT_FOR_GRAPHS: ([TopHLogitsWarper(0.5)], "top"),
}
"""Ways of choosing, with processors and kinds of siblings; None is greedy."""


def choice_of(name: str) -> DeviceChoice:
    """Return who chooses in a round of that name."""
    processors, sampling = CHOICES.get(name, ([], None))
    scores = Scores(LogitsProcessorList(processors), 2)
    if sampling is None:
        return GreedyChoice(scores)
    choice = SampledChoice(scores, None, None)
    choice.sampling = sampling
    return choice


def do_what_is_forbidden(module: torch.nn.Module, args: Any, output: Tensor) -> Tensor:
    """Wait for a number and for a shape, write where a mask is true, read from the CPU, and go there and back."""
    output = output * output.argmax().item()
    output = output + output.nonzero().sum()
    output[output > 0] = output.flatten()[0]
    output = output + torch.ones(())
    return output.cpu().to(output.device)


class Round:
    """The graphs of a round, as Inductor gets them, and what is in their way.

    Args:
        scheduled: Whether to ask Inductor as well.
    """

    def __init__(self, scheduled: bool) -> None:
        self.graphs = 0
        self._scheduled = scheduled
        self.obstacles: list[str] = []

    def compile(self, graph_module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Compile up to what Inductor would launch, and return what computes shapes alone."""
        self.graphs += 1

        def look(graph_module: GraphModule, example_inputs: list[Any], **more: Any) -> Callable[..., Any]:
            self.obstacles += in_graph(graph_module)
            if self._scheduled:
                self.obstacles += in_schedule(copy.deepcopy(graph_module), example_inputs, more)
            results: list[Any] = []

            def run(args: list[Any]) -> Any:
                if not results:
                    results.append(graph_module(*args))
                return results[0]

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        compiled: Callable[..., Any] = compile_fx(graph_module, example_inputs, inner_compile=look)
        return compiled


class Beside(TorchDispatchMode):
    """Notes what runs beside the graphs of a round."""

    def __init__(self, seen: Round) -> None:
        super().__init__()
        self._seen = seen

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo steps aside for any other mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.prim.device.default:
            self._seen.obstacles.append(f"beside the graphs: {func}")
        return func(*args, **(kwargs or {}))


def in_graph(graph_module: GraphModule) -> list[str]:
    """Return the operators that wait for the host, have shapes that depend on numbers, or are not on the GPU alone."""
    found = []
    for node in graph_module.graph.nodes:
        values = [x for x in tree_leaves(node.meta.get("val")) if isinstance(x, Tensor | torch.SymInt | torch.SymFloat)]
        if is_cudagraph_unsafe_fx_node(node) or any(map(free_unbacked_symbols, values)):
            found.append(f"unsafe: {node.target}")
        if node.op == "get_attr" or node.target is torch.ops.aten.lift_fresh_copy.default:
            values = [x for x in values if x.ndim > 0]  # a number of the program, which Inductor writes into its code
        if any(isinstance(x, Tensor) and x.device.type != "cuda" for x in values):
            found.append(f"not on the GPU: {node.target}")
    return found


class _ScheduledError(Exception):
    pass


def in_schedule(graph_module: GraphModule, example_inputs: list[Any], more: dict[str, Any]) -> list[str]:
    """Return why Inductor would leave parts of a graph out of a CUDA graph."""
    reasons: list[list[str]] = []

    def stop(graph: GraphLowering) -> None:
        graph.init_wrapper_code()
        graph._update_scheduler()
        why = (graph.scheduler.should_partition(node) for node in graph.scheduler.nodes)
        reasons.append(sorted({f"left out by Inductor: {reason}" for reason in why if reason is not None}))
        raise _ScheduledError

    with mock.patch.object(GraphLowering, "compile_to_module", stop), config.patch({"triton.cudagraphs": True}):
        try:
            compile_fx_inner(graph_module, example_inputs, **more)
        except (TorchDynamoException, _ScheduledError):
            if not reasons:
                raise
    return reasons[0]


def tiny_model(family: str) -> PreTrainedModel:
    """One layer of each kind; numbers do not matter."""
    plain = plain_model(family)
    model_config = copy.deepcopy(plain.config)
    text_config = model_config.get_text_config(decoder=True)
    text_config.num_hidden_layers, text_config.layer_types = 2, text_config.layer_types[:2]
    model = type(plain)(model_config).eval().requires_grad_(False)
    if family in MIXTURES:
        model.set_experts_implementation(BITWISE_EXPERTS)
    return model


def look_at_rounds(name: str, choices: list[str], model: PreTrainedModel) -> dict[str, Any]:
    """Compile a model's round behind a prompt of two rows; of the name FORBIDDEN one that no capture would take.

    Then what is accepted by other choices, behind the same forward.
    """
    session, prompt = Session(model), random_tokens(2, 7, seed=1)
    session.prefill(prompt, torch.ones_like(prompt))
    layers = find_gdn_layers(model), find_attention_layers(model)
    seen, mode = Round(scheduled=name in (SCHEDULED, FORBIDDEN)), FakeTensorMode(shape_env=ShapeEnv())

    def on_gpu(thing: Any, *names: str) -> SimpleNamespace:
        return SimpleNamespace(**{name: fake_cuda((getattr(thing, name),), mode)[0] for name in names})

    cache: Any = on_gpu(session.cache, "lengths", "next_position")
    cache.layers, cache.windows = session.cache.layers, session.cache.windows
    cache.state_layers = [on_gpu(layer, "state", "window") for layer in session.cache.state_layers]
    cache.key_value_layers = [on_gpu(layer, "keys", "values") for layer in session.cache.key_value_layers]
    model._apply(lambda tensor: fake_cuda((tensor,), mode)[0])
    torch._dynamo.reset()
    torch._dynamo.register_backend(lambda *graph: seen.compile(*graph), name=name)
    inner_backends = mock.patch.object(_backend, "INNER_BACKENDS", (name,))
    if name == FORBIDDEN:
        _backend.refuse_waiting = lambda graph: None  # or it would not come so far
        model.model.layers[1].mlp.register_forward_hook(do_what_is_forbidden)
    with h200(), mode, config.patch(SETTINGS), inner_backends:
        stores = StaticStores(cache, *layers, NUM_NODES, ring_rows=4)
        stores.reserve(50)
        forward = CompiledForward(model, session.cache_keyword, *layers, stores, name, NUM_NODES)
        if name == FORBIDDEN:
            commit = forward._commit
            forward._commit = lambda *args: commit(*args[:-1], args[-1] + 0)
        results = {}
        for choice in (name, *choices):
            seen.graphs, seen.obstacles = 0, []
            of_choice = forward._round_of(choice_of(choice), 0)
            forward._round(of_choice)
            with Beside(seen):
                forward._round(of_choice)
            results[choice] = {"graphs": seen.graphs, "obstacles": seen.obstacles}
    return results


def _main() -> None:
    if reason := obstacle():
        print(json.dumps({"skip": reason}))
        return
    results = {}
    for name in sys.argv[1:]:
        family = CHOOSING if name == FORBIDDEN else name
        model = tiny_model(family).to(DTYPES.get(family, torch.bfloat16))
        results |= look_at_rounds(name, [*CHOICES] if name == CHOOSING else [], model)
    print(json.dumps(results))


if __name__ == "__main__":
    _main()
