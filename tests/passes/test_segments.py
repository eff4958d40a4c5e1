"""Layers that are alike are compiled once, and no others; what comes out is what the whole graph gives."""

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.testing._internal.two_tensor import TwoTensor

from tolerances import FLOAT32, relative_error
from treewy import ops
from treewy.passes._segments import compile_segments

pytestmark = pytest.mark.usefixtures("nothing_compiled_is_kept")


class Layer(nn.Module):
    """A layer that adds what its modules return to the residual stream."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, eps=eps)
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(self.norm(x))


class Model(nn.Module):
    """Layers between an embedding and a head."""

    def __init__(self, *eps: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Layer(x) for x in eps)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def compiled(model: Model, tokens: Tensor) -> tuple[Tensor, list[GraphModule], int]:
    """The logits, what was compiled, and how many segments there are."""
    graphs: list[GraphModule] = []
    number = []

    def compile_one(graph_module: GraphModule, _: list[Any]) -> Callable[..., Any]:
        graphs.append(graph_module)
        return graph_module.forward

    def backend(graph_module: GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        whole = compile_segments(graph_module, [f"layers.{i}" for i in range(len(model.layers))], compile_one)
        number.append(len(whole.graph.find_nodes(op="call_module")))
        return whole.forward

    logits = torch.compile(model, backend=backend, fullgraph=True)(tokens)
    return logits, graphs, number[0]


@pytest.mark.parametrize(
    ("eps", "number"),
    [((1e-5,), 2), ((1e-5,) * 2, 3), ((1e-5,) * 6, 3), ((1e-5, 1e-6, 1e-5, 1e-6, 1e-5), 4)],
    ids=["one layer", "two layers", "six layers", "of two kinds"],
)
def test_layers_alike_are_compiled_once(eps: tuple[float, ...], number: int) -> None:
    """Beside the first layer, which has the embedding with it, and the head."""
    torch.manual_seed(0)
    model, tokens = Model(*eps), torch.arange(11)[None]
    logits, graphs, num_segments = compiled(model, tokens)
    assert torch.equal(logits, model(tokens))
    assert (len(graphs), num_segments) == (number, len(eps) + 1)


def test_a_layers_sum_is_compiled_with_what_follows() -> None:
    _, (first, *others), _ = compiled(Model(1e-5, 1e-5), torch.arange(11)[None])
    sums = [len(graph.graph.find_nodes(op="call_function", target=operator.add)) for graph in (first, *others)]
    assert sums == [0, 1, 1]


class Moving(nn.Module):
    """A layer that moves one buffer and reads another."""

    def __init__(self, moved: Tensor, read: Tensor) -> None:
        super().__init__()
        self.register_buffer("moved", moved)
        self.register_buffer("read", read)
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.moved.add_(1)
        return x + self.project(x * self.read)


def other_layers(what: str) -> Model:
    """Three layers, the last of which differs from the one before it."""
    model = Model(1e-5, 1e-5, 1e-5)
    last = model.layers[2]
    if what == "requires grad":
        last.norm.bias.requires_grad_(False)
    elif what == "strides":
        last.project.weight = nn.Parameter(last.project.weight.detach().T.contiguous().T)
    elif what == "memory":
        buffers = [torch.ones(8) for _ in range(5)]
        pairs = ((buffers[0], buffers[1]), (buffers[2], buffers[3]), (buffers[4], buffers[4][:]))
        model.layers = nn.ModuleList(Moving(*pair) for pair in pairs)
    return model


@pytest.mark.parametrize("what", ["requires grad", "strides", "memory"])
def test_inputs_that_differ_make_layers_differ(what: str) -> None:
    model, tokens = other_layers(what), torch.arange(11)[None]
    expected = copy.deepcopy(model)(tokens)
    logits, graphs, _ = compiled(model, tokens)
    assert relative_error(logits, expected) <= FLOAT32
    assert len(graphs) == 4


class Attending(nn.Module):
    """A layer that attends within a window."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads, none = x.unflatten(-1, (2, 4)), torch.zeros(1, dtype=torch.int64)
        parents, empty = torch.arange(-1, x.shape[1] - 1)[None], x.new_zeros(1, 2, 0, 4)
        attended = ops.tree_attention(heads, heads, heads, empty, empty, none, none, parents, 0.5, self.window)
        return x + self.project(attended.flatten(2))


@pytest.mark.parametrize(("windows", "number"), [((3, 3, 3), 3), ((3, 5, 3), 4), ((3, 3, 0), 4)])
def test_windows_that_differ_make_layers_differ(windows: tuple[int, ...], number: int) -> None:
    torch.manual_seed(0)
    model, tokens = Model(*(1e-5,) * len(windows)), torch.arange(11)[None]
    model.layers = nn.ModuleList(Attending(window) for window in windows)
    with torch.no_grad():
        logits, graphs, _ = compiled(model, tokens)
        assert torch.equal(logits, model(tokens))
    assert len(graphs) == number


def test_what_a_wrapped_tensor_keeps_beside_its_tensors_makes_layers_differ() -> None:
    model, tokens = Model(1e-5, 1e-5, 1e-5), torch.arange(11)[None]
    for number, layer in enumerate(model.layers):
        layer.project.weight = nn.Parameter(TwoTensor(layer.project.weight.detach(), torch.full((8, 8), float(number))))
    _, graphs, _ = compiled(model, tokens)
    assert len(graphs) == 4
