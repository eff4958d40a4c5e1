"""A compiled forward over the nodes of a tree: every layer is rewritten, and numbers are those of the eager engine."""

import dataclasses
import operator
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch.fx import Graph, GraphModule
from transformers import DynamicCache

from models import FAMILIES, fresh_model, random_tokens, set_window
from tolerances import LOGITS_FLOAT32, STORES_FLOAT32, relative_error
from treewy import _compiled_forward
from treewy._compiled_forward import CompiledForward
from treewy._session import Session
from treewy._static_stores import StaticStores, _StaticState
from treewy.passes import TreeBackend, find_attention_layers, find_gdn_layers, redirect_layers
from treewy.passes import _backend as treewy_backend
from treewy.passes._graph import refuse_waiting

PROMPT = 7
TREES = (
    torch.tensor([[-1, 0, 0, 1, 2, 2], [-1, 0, 1, 1, 0, 4]]),
    torch.tensor([[-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 0, 0]]),
)


class SeenBackend(TreeBackend):
    """Keeps the calls of functions and methods in the graph, before and after."""

    before: Counter[Any]
    after: Counter[Any]
    repeats_heads: bool  # after

    def __call__(self, graph_module: GraphModule, example_inputs: list[Tensor]) -> Any:
        self.before = targets(graph_module)
        return super().__call__(graph_module, example_inputs)


@pytest.fixture(autouse=True)
def _graphs_are_seen(monkeypatch: pytest.MonkeyPatch, nothing_compiled_is_kept: None) -> None:
    monkeypatch.setattr(_compiled_forward, "TreeBackend", SeenBackend)
    compile_rewritten = treewy_backend._compile

    def seen(inner: str, graph_module: GraphModule, layer_names: list[str]) -> Any:
        SeenBackend.after = targets(graph_module)
        repeats = graph_module.graph.find_nodes(op="call_method", target="repeat_interleave")
        SeenBackend.repeats_heads = any(node.kwargs == {"dim": 2} for node in repeats)
        return compile_rewritten(inner, graph_module, layer_names)

    monkeypatch.setattr(treewy_backend, "_compile", seen)


def targets(graph_module: GraphModule) -> Counter[Any]:
    return Counter(node.target for node in graph_module.graph.nodes if node.op.startswith("call"))


class Verification:
    """A model's compiled forward over six nodes of two rows behind a prompt."""

    def __init__(self, family: str, inner: str = "eager", *, more_layers: tuple[Any, ...] = ()) -> None:
        self.model = fresh_model(family)
        self.gdn_layers, self.attention_layers = find_gdn_layers(self.model), find_attention_layers(self.model)
        self.eager = self.prefilled()
        session = self.prefilled()
        layers = self.gdn_layers, self.attention_layers
        self.stores = StaticStores(session.cache, *layers, num_nodes=6, ring_rows=4)
        self.stores.load(session.cache)
        gdn_layers = [*self.gdn_layers, *more_layers]
        self.forward = CompiledForward(
            self.model, session.cache_keyword, gdn_layers, self.attention_layers, self.stores, inner, 6
        )
        self.backend: Any = self.forward._backend

    def prefilled(self) -> Session:
        session = Session(self.model)
        prompt = random_tokens(2, PROMPT, seed=1)
        session.prefill(prompt, torch.ones_like(prompt))
        return session

    @property
    def committed(self) -> list[Tensor]:
        return [*self.stores._states, self.stores._windows, self.stores._keys, self.stores._values]

    def assert_equals_the_eager_engine(self, token_ids: Tensor, parents: Tensor) -> None:
        logits = self.forward.verify(token_ids, parents)
        assert relative_error(logits, self.eager.extend(token_ids, parents)) <= LOGITS_FLOAT32
        handed_out, kept = self.backend.handed_out, self.stores.of_layers
        for layer, store in zip(self.gdn_layers, self.eager.cache.state_layers, strict=True):
            nodes: Any = store.nodes
            pseudo_value, key_as_used, log_decay = nodes._on_trial.tensors
            key = handed_out[layer.name, "key"]
            # Pseudo-values are kept for keys as given, so only the outer products agree.
            ratio = pseudo_value.shape[2] // key.shape[2]
            for heads in range(ratio):
                ours = torch.einsum("bnhk,bnhv->bnhkv", key, kept[layer.name, "pseudo_value"][:, :, heads::ratio])
                theirs = torch.einsum("bnhk,bnhv->bnhkv", key_as_used, pseudo_value[:, :, heads::ratio])
                assert relative_error(ours, theirs) <= STORES_FLOAT32
            assert relative_error(handed_out[layer.name, "log_decay"], log_decay) <= STORES_FLOAT32
            assert relative_error(handed_out[layer.name, "columns"], nodes._columns) <= STORES_FLOAT32
        for layer, store in zip(self.attention_layers, self.eager.cache.key_value_layers, strict=True):
            for name, right in (("key", store.keys), ("value", store.values)):
                assert relative_error(handed_out[layer.name, name], right[:, :, PROMPT : PROMPT + 6]) <= STORES_FLOAT32
        none = torch.full((2,), -1)
        self.eager.commit(none)
        self.forward.commit(none)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_rewritten_and_nothing_that_is_committed_is_written(family: str) -> None:
    verification = Verification(family)
    before = [store.clone() for store in verification.committed]
    verification.assert_equals_the_eager_engine(random_tokens(2, 6, seed=2), TREES[0])
    states, windows = before[:-3], before[-3]
    for store, old in zip(verification.stores._states, states, strict=True):
        assert torch.equal(store, old)
    assert torch.equal(verification.stores._windows, windows)
    num_gdn, num_attention, seen = len(verification.gdn_layers), len(verification.attention_layers), SeenBackend
    for marker, op, number in (
        ("delta_rule_marker", "tree_wy_verify_", num_gdn),
        ("convolution_marker", "tree_conv", num_gdn),
        ("attention_marker", "tree_attention", num_attention),
    ):
        marker, op = (getattr(torch.ops.treewy, name).default for name in (marker, op))
        assert (verification.backend.before[marker], verification.backend.before[op]) == (number, 0)
        assert (seen.after[marker], seen.after[op]) == (0, number)
    seen_before = verification.backend.before
    assert (seen_before["copy_"], seen.after["copy_"]) == (2 * num_gdn, 0)
    assert not seen.repeats_heads
    touched = operator.getitem, torch.cat, "new_empty", "transpose", "repeat_interleave"
    untouched = set(seen_before) & set(seen.after) - set(touched)
    assert all(seen_before[target] == seen.after[target] for target in untouched)


def test_a_copy_to_another_device_is_refused() -> None:
    graph = Graph()
    given = graph.placeholder("given")
    copied = graph.call_method("cpu", (given,))
    graph.output(copied)
    given.meta["example_value"], copied.meta["example_value"] = torch.empty(2, device="meta"), torch.empty(2)
    with pytest.raises(ValueError, match="cpu copies values of a tensor to the host"):
        refuse_waiting(graph)
    copied.meta["example_value"] = torch.empty(2, device="meta")
    refuse_waiting(graph)


def test_one_graph_serves_every_tree_of_a_size() -> None:
    verification = Verification("qwen3_next", "aot_eager")
    for number, parents in enumerate(TREES):
        verification.assert_equals_the_eager_engine(random_tokens(2, 6, seed=3 + number), parents)
    assert counters["stats"]["unique_graphs"] == 2  # with the commit


def test_a_forward_over_tokens_is_traced_as_without_us() -> None:
    """Also while another forward is redirected."""
    graphs = []

    def backend(graph_module: GraphModule, example_inputs: list[Tensor]) -> Any:
        graphs.append(targets(graph_module))
        return graph_module.forward

    model = fresh_model("qwen3_next")
    layers = find_gdn_layers(model)
    cache, keyword = DynamicCache(config=model.config), Session(model).cache_keyword
    with torch.no_grad(), redirect_layers([*layers, *find_attention_layers(model)]):
        for _ in range(2):  # a prefill, and tokens behind it
            graphs.clear()
            torch._dynamo.reset()
            torch.compile(model.forward, backend=backend)(
                input_ids=random_tokens(2, 6, seed=2), use_cache=True, **{keyword: cache}
            )
    seen = sum(graphs, Counter())
    assert seen["copy_"] == 2 * len(layers)
    assert not any("treewy" in str(target) for target in seen)


def test_layers_that_are_not_in_the_graph_are_named() -> None:
    verification = Verification("qwen3_next")
    missing = dataclasses.replace(verification.gdn_layers[0], layer_idx=9, name="model.layers.9.linear_attn")
    other = Verification("qwen3_next")
    backend = SeenBackend([*other.gdn_layers, missing], other.attention_layers, other.stores.of_layers)
    other.forward._backend = backend
    other.forward._forward = torch.compile(other.forward._forward._torchdynamo_orig_callable, backend=backend)
    tokens = random_tokens(2, 6, seed=2)
    with pytest.raises(ValueError, match=r"2 of 3 .* not \['model.layers.9.linear_attn'\].*use_kernels=False"):
        other.forward.verify(tokens, TREES[0])
    verification.assert_equals_the_eager_engine(tokens, TREES[0])  # the model is usable


def test_a_forward_over_tokens_is_refused_with_what_it_lacks() -> None:
    model = fresh_model("qwen3_next")
    backend = TreeBackend(find_gdn_layers(model), find_attention_layers(model), {})
    with pytest.raises(BackendCompilerFailed, match=r"none of the 2 .* within redirect_layers"):
        torch.compile(model.forward, fullgraph=True, backend=backend)(input_ids=random_tokens(2, 6, seed=2))


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
    tokens = random_tokens(2, 6, seed=2)
    with monkeypatch.context() as patch:
        patch.setattr(_StaticState, method, replacement)
        with pytest.raises(ValueError, match=rf"model\.layers\.0\.linear_attn.*{message}.*without a drafter"):
            Verification("qwen3_next").forward.verify(tokens, TREES[0])
    torch._dynamo.reset()
    Verification("qwen3_next").assert_equals_the_eager_engine(tokens, TREES[0])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"softcap": 30.0}, "softcap=30.0"),
        ({"s_aux": 0.5}, "s_aux=0.5"),
        ({"sliding_window": 5}, "sliding_window=5 where its mask shows all tokens"),
        ({"sliding_window": (5, 0)}, r"sliding_window=\(5, 0\) where its mask shows all tokens"),
    ],
    ids=str,
)
def test_an_attention_that_a_tree_does_not_know_is_refused_by_name(asked: dict[str, Any], said: str) -> None:
    verification = Verification("qwen3_next")
    attention = verification.model.get_submodule(verification.attention_layers[0].name)
    original = type(attention).forward
    attention.forward = lambda *args, **kwargs: original(attention, *args, **asked, **kwargs)
    with pytest.raises(ValueError, match=rf"model.layers.1.self_attn. attends with {said}.*backend='eager'"):
        verification.forward.verify(random_tokens(2, 6, seed=2), TREES[0])


@pytest.mark.parametrize(("asked", "shown"), [(None, 7), (6, 7), (0, 0)])
def test_a_window_that_is_not_its_masks_is_refused_by_name(asked: int | None, shown: int) -> None:
    if "lara_mini" not in FAMILIES:
        pytest.skip("LARA came to transformers behind the oldest version that is supported")
    verification = Verification("lara_mini")
    attention = verification.attention_layers[0]
    verification.model.get_submodule(attention.name).sliding_window = asked
    verification.stores._shown[attention.layer_idx] = shown
    said = f"sliding_window={asked} where its mask shows {shown} tokens"
    with pytest.raises(ValueError, match=rf"model.layers.1.self_attn. attends with {said}.*backend='eager'"):
        verification.forward.verify(random_tokens(2, 6, seed=2), TREES[0])


def test_stores_do_not_serve_masks_that_show_another_number_of_tokens() -> None:
    if "lara_mini" not in FAMILIES:
        pytest.skip("LARA came to transformers behind the oldest version that is supported")
    verification = Verification("lara_mini")
    cache = verification.prefilled().cache
    assert verification.stores.fits(cache, 6)
    set_window(verification.model, 9)
    assert not verification.stores.fits(cache, 6)


def test_a_marker_that_no_pass_replaced_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SeenBackend, "__call__", lambda self, graph_module, example_inputs: graph_module.forward)
    with pytest.raises(RuntimeError, match="no pass of treewy has replaced it"):
        Verification("qwen3_next").forward.verify(random_tokens(2, 6, seed=2), TREES[0])
