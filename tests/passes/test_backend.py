"""A compiled forward over the nodes of a tree: every layer is rewritten, and numbers are those of the eager engine."""

import dataclasses
import inspect
import operator
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch.fx import GraphModule
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from models import FAMILIES, SLIDING_WINDOW, fresh_model, random_tokens
from tolerances import LOGITS_FLOAT32, STORES_FLOAT32, relative_error
from treewy._session import Session
from treewy.ops import ancestor_mask, depths
from treewy.passes import TreeBackend, find_gdn_layers, redirect_gdn_layers

TEXT_FAMILIES = [family for family in FAMILIES if "vision" not in family]
PROMPT = SLIDING_WINDOW - 1  # a layer with a window keeps no more, so that all layers have the same columns
TREES = (
    torch.tensor([[-1, 0, 0, 1, 2, 2], [-1, 0, 1, 1, 0, 4]]),
    torch.tensor([[-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 0, 0]]),
)


class SeenBackend(TreeBackend):
    """Keeps the calls of functions and methods in the graph, before and after."""

    before: Counter[Any]
    after: Counter[Any]

    def __call__(self, graph_module: GraphModule, example_inputs: list[Tensor]) -> Any:
        self.before = targets(graph_module)
        run = super().__call__(graph_module, example_inputs)
        self.after = targets(graph_module)
        return run


def targets(graph_module: GraphModule) -> Counter[Any]:
    return Counter(node.target for node in graph_module.graph.nodes if node.op.startswith("call"))


class TreeForward:
    """A model and its forward over nodes behind a prompt, compiled."""

    def __init__(self, model: PreTrainedModel, backend: Any) -> None:
        self.layers = find_gdn_layers(model)
        self.model, self.backend = model, backend
        self.prompt = random_tokens(2, PROMPT, seed=1)
        self.cache = DynamicCache(config=model.config)
        self._cache_keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._forward = torch.compile(model.forward, fullgraph=True, backend=backend)

    @property
    def stores(self) -> list[Tensor]:
        gdn = [self.cache.layers[layer.layer_idx] for layer in self.layers]
        return [store for layer in gdn for store in (layer.recurrent_states[0], layer.conv_states[0])]

    def prefill(self) -> None:
        self.cache = DynamicCache(config=self.model.config)
        self.model(input_ids=self.prompt, use_cache=True, **{self._cache_keyword: self.cache})

    def __call__(self, token_ids: Tensor, parents: Tensor, **more: Any) -> Tensor:
        position = PROMPT + depths(parents)
        of_column = torch.cat([torch.arange(PROMPT).expand(len(parents), -1), position], dim=1)[:, None]
        mask = torch.cat([torch.ones(*parents.shape, PROMPT, dtype=torch.bool), ancestor_mask(parents)], dim=2)
        within_window = mask & (of_column > position[:, :, None] - SLIDING_WINDOW)
        masks = {"full_attention": mask[:, None], "sliding_attention": within_window[:, None], "linear_attention": None}
        with redirect_gdn_layers(self.layers):
            logits: Tensor = self._forward(
                input_ids=token_ids,
                attention_mask=masks,
                position_ids=position,
                use_cache=True,
                **{self._cache_keyword: self.cache},
                **more,
            ).logits
        return logits


def compiled(family: str, inner: str) -> TreeForward:
    torch._dynamo.reset()
    model = fresh_model(family)
    forward = TreeForward(model, SeenBackend(find_gdn_layers(model), inner))
    forward.prefill()
    return forward


def assert_equals_the_eager_engine(forward: TreeForward, logits: Tensor, token_ids: Tensor, parents: Tensor) -> None:
    eager = Session(forward.model)
    eager.prefill(forward.prompt, torch.ones_like(forward.prompt))
    assert relative_error(logits, eager.extend(token_ids, parents)) <= LOGITS_FLOAT32
    for layer, store in zip(forward.layers, eager.cache.state_layers, strict=True):
        nodes: Any = store.nodes
        expected = (*nodes._on_trial.tensors, nodes._columns)
        for name, right in zip(("pseudo_value", "key", "log_decay", "columns"), expected, strict=True):
            assert relative_error(forward.backend.handed_out[layer.name, name], right) <= STORES_FLOAT32


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_every_layer_is_rewritten_and_nothing_that_is_committed_is_written(family: str) -> None:
    forward = compiled(family, "eager")
    before = [store.clone() for store in forward.stores]
    tokens = random_tokens(2, 6, seed=2)
    logits = forward(tokens, TREES[0], treewy_parents=TREES[0])
    assert_equals_the_eager_engine(forward, logits, tokens, TREES[0])
    for store, old in zip(forward.stores, before, strict=True):
        assert torch.equal(store, old)
    num_layers, seen = len(forward.layers), forward.backend
    for marker, op in (("delta_rule_marker", "tree_wy_solve"), ("convolution_marker", "tree_conv")):
        marker, op = (getattr(torch.ops.treewy, name).default for name in (marker, op))
        assert (seen.before[marker], seen.before[op]) == (num_layers, 0)
        assert (seen.after[marker], seen.after[op]) == (0, num_layers)
    assert (seen.before["copy_"], seen.after["copy_"]) == (2 * num_layers, 0)
    untouched = set(seen.before) & set(seen.after) - {operator.getitem, torch.cat, "new_empty", "transpose"}
    assert all(seen.before[target] == seen.after[target] for target in untouched)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_one_graph_serves_every_tree_of_a_size(inner: str) -> None:
    forward = compiled("qwen3_next", inner)
    counters.clear()
    for number, parents in enumerate(TREES):
        forward.prefill()
        tokens = random_tokens(2, 6, seed=3 + number)
        logits = forward(tokens, parents, treewy_parents=parents)
        assert_equals_the_eager_engine(forward, logits, tokens, parents)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_forward_over_tokens_is_traced_as_without_us() -> None:
    """Also while another forward is redirected."""
    graphs = []

    def backend(graph_module: GraphModule, example_inputs: list[Tensor]) -> Any:
        graphs.append(targets(graph_module))
        return graph_module.forward

    torch._dynamo.reset()
    forward = TreeForward(fresh_model("qwen3_next"), backend)
    forward.prefill()
    forward(random_tokens(2, 6, seed=2), TREES[1])
    (seen,) = graphs
    assert seen["copy_"] == 2 * len(forward.layers)
    assert not any("treewy" in str(target) for target in seen)


def test_layers_that_are_not_in_the_graph_are_named() -> None:
    forward = compiled("qwen3_next", "eager")
    missing = dataclasses.replace(forward.layers[0], layer_idx=9, name="model.layers.9.linear_attn")
    other = TreeForward(forward.model, TreeBackend([*forward.layers, missing]))
    other.prefill()
    with pytest.raises(
        BackendCompilerFailed, match=r"2 of 3 .* not \['model.layers.9.linear_attn'\].*use_kernels=False"
    ):
        other(random_tokens(2, 6, seed=2), TREES[0], treewy_parents=TREES[0])
    tokens = random_tokens(2, 6, seed=2)  # the model is usable
    assert_equals_the_eager_engine(forward, forward(tokens, TREES[0], treewy_parents=TREES[0]), tokens, TREES[0])


def test_a_forward_over_tokens_is_refused_with_what_it_lacks() -> None:
    forward = compiled("qwen3_next", "eager")
    with pytest.raises(BackendCompilerFailed, match=r"none of the 2 .* within redirect_gdn_layers"):
        forward(random_tokens(2, 6, seed=2), TREES[0])


@pytest.mark.parametrize(
    ("method", "replacement", "message"),
    [
        ("update_recurrent_state", lambda self, states, *args, **kwargs: states, "not in one copy_ alone"),
        (
            "update_conv_state",
            lambda self, x, *args, **kwargs: torch.cat([0 * x, x], -1),
            "does not put its convolution",
        ),
    ],
)
def test_a_layer_that_keeps_its_stores_in_another_way_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, method: str, replacement: Any, message: str
) -> None:
    forward = compiled("qwen3_next", "eager")
    tokens = random_tokens(2, 6, seed=2)
    with monkeypatch.context() as patch:
        patch.setattr(LinearAttentionLayer, method, replacement)
        with pytest.raises(
            BackendCompilerFailed, match=rf"model\.layers\.0\.linear_attn.*{message}.*without a drafter"
        ):
            forward(tokens, TREES[0], treewy_parents=TREES[0])
    torch._dynamo.reset()
    forward.prefill()  # the model is usable
    assert_equals_the_eager_engine(forward, forward(tokens, TREES[0], treewy_parents=TREES[0]), tokens, TREES[0])


def test_a_marker_that_no_pass_replaced_raises() -> None:
    forward = TreeForward(fresh_model("qwen3_next"), lambda graph_module, example_inputs: graph_module.forward)
    forward.prefill()
    with pytest.raises(RuntimeError, match="no pass of treewy has replaced it"):
        forward(random_tokens(2, 6, seed=2), TREES[0], treewy_parents=TREES[0])
