"""Cut a graph between the layers of a model, so that layers alike are compiled once.

    segment 0       what comes before the layers, and the first of them
    segment i       what layer i - 1 does behind the last of its modules, and layer i
    last segment    the same of the last layer, the norm and the head

A compiler that is shown 32 layers as one graph does the work 32 times, though they are of two kinds. The cuts cost a
call each, which a captured graph does not have, and no fusion: behind its last module a layer adds the result to what
came in, and there the next one begins with its norm.
"""

import logging
import re
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.fx.passes.split_module import split_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_log = logging.getLogger(__name__)

Compiler = Callable[[GraphModule, list[Any]], Callable[..., Any]]


def compile_segments(graph_module: GraphModule, layer_names: Sequence[str], compile_one: Compiler) -> GraphModule:
    """Compile a graph segment by segment, and those that are alike once.

    Args:
        graph_module: What Dynamo traced; not used any more afterwards.
        layer_names: Qualified names of the model's layers.
        compile_one: Compiles a graph that returns a tuple, given its example inputs.

    Returns:
        The compiled segments, one after the other.
    """
    _forget_offsets(graph_module.graph)
    segment_of = _segments(graph_module.graph, layer_names)
    whole: GraphModule = split_module(graph_module, None, segment_of.__getitem__, keep_original_order=True)  # type: ignore[arg-type]
    compiled: dict[str, Callable[..., Any]] = {}
    number = 0
    for call in whole.graph.find_nodes(op="call_module"):
        segment = whole.get_submodule(call.target)
        assert isinstance(segment, GraphModule)
        structure = _structure(segment)
        if structure not in compiled:
            compiled[structure] = _compile_alone(segment, compile_one)
        delattr(whole, call.target)
        object.__setattr__(whole, call.target, compiled[structure])  # which is no module
        number += 1
    _log.debug("%d segments, of which %d differ and are compiled", number, len(compiled))
    return whole


def _forget_offsets(graph: Graph) -> None:
    """Let inputs begin where their storage does, for example.

    Layers keep their keys one behind the other, where the number of columns decides: offsets by which they would
    differ, and that nobody who compiles them needs.
    """
    for node in graph.find_nodes(op="placeholder"):
        example = node.meta["example_value"]
        if isinstance(example, FakeTensor) and not isinstance(example.storage_offset(), int):
            with example.fake_mode:
                node.meta["example_value"] = torch.empty_strided(
                    example.shape, example.stride(), dtype=example.dtype, device=example.device
                )


def _segments(graph: Graph, layer_names: Sequence[str]) -> dict[Node, int]:
    """Number the nodes by the segment they belong to: the cuts are behind the last module of each layer."""
    last: dict[str, Node] = {}
    for node in graph.nodes:
        paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
        for name in layer_names:
            if any(path.endswith("." + name) for path in paths[:-1]):
                last[name] = node
    cuts, segment, found = set(last.values()), 0, {}
    for node in graph.nodes:
        found[node] = segment
        segment += node in cuts
    return found


def _structure(segment: GraphModule) -> str:
    """Describe all that a compiler looks at, in the same words for segments that it would compile alike."""
    numbers: dict[Node, int] = {}
    storages: dict[StorageWeakRef, int] = {}
    lines = []
    for node in segment.graph.nodes:
        place: Any = node.target
        if node.op == "placeholder":
            example = node.meta["example_value"]
            place = _describe(example)
            if isinstance(example, Tensor) and not is_traceable_wrapper_subclass(example):
                # Which inputs share memory, by what compares equal for one storage.
                storage = StorageWeakRef(example.untyped_storage())  # type: ignore[no-untyped-call]
                place = *place, storages.setdefault(storage, len(storages))
        elif node.op == "get_attr":
            place = id(attrgetter(node.target)(segment))  # a constant of its own
        elif node.op == "call_function":
            place = id(node.target)
        arguments = map_arg((node.args, node.kwargs), lambda x: ("node", numbers[x]))
        lines.append(f"{node.op} {place} {arguments}")
        numbers[node] = len(numbers)
    symbols: dict[str, str] = {}
    return re.sub(r"\b[su]\d+\b", lambda found: symbols.setdefault(found[0], f"s{len(symbols)}"), "\n".join(lines))


def _describe(example: Any) -> Any:
    if isinstance(example, torch.SymInt):  # its value too: what is assumed of one symbol is then true of all
        return example, example.node.hint
    if not isinstance(example, Tensor):
        return type(example), example
    if is_traceable_wrapper_subclass(example):  # which may keep anything beside its tensors
        return type(example), id(example)
    aligned = example.storage_offset() * example.element_size() % 16 == 0
    shape = [_describe(size) for size in (*example.shape, *example.stride())]
    return shape, aligned, example.dtype, example.device, example.requires_grad, type(example)


def _compile_alone(segment: GraphModule, compile_one: Compiler) -> Callable[..., Any]:
    examples = [node.meta["example_value"] for node in segment.graph.find_nodes(op="placeholder")]
    (output,) = segment.graph.find_nodes(op="output")
    if isinstance(output.args[0], tuple):
        return compile_one(segment, examples)
    output.args = ((output.args[0],),)
    segment.recompile()
    of_one = compile_one(segment, examples)
    return lambda *args: of_one(*args)[0]
