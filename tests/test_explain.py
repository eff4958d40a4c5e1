"""`treewy.explain`: every layer, what becomes of it or why not, and what is compiled; and the log of compiling."""

import logging
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import treewy
from api_models import model_snapshot, modeling_globals, process_state
from models import fresh_model, hide_attention, plain_model, random_tokens
from test_refused_families import MAKERS
from treewy import _compiled_forward
from treewy._compiled_forward import CompiledForward
from treewy._compiled_session import CompiledTarget
from treewy.passes import GdnLayerInfo

pytestmark = pytest.mark.usefixtures("nothing_compiled_is_kept")

GDN, ATTENTION = ("tree_conv", "tree_wy_verify_"), ("tree_attention",)


def compiled_quickly(family: str = "qwen3_next") -> PreTrainedModel:
    """A compiled model whose rewritten graphs run as they are."""
    model = treewy.compile(fresh_model(family), backend="aot_eager", commit="fused")
    model.generate.target = CompiledTarget(model, "eager", "fused")
    return model


def generate(model: PreTrainedModel, rows: int = 2, **options: Any) -> None:
    options = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 14, "do_sample": False} | options
    model.generate(random_tokens(rows, 6, seed=1), **options)


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_are_matched_and_nothing_changes(compiled: bool) -> None:
    model = fresh_model("qwen3_5_vision")
    if compiled:
        treewy.compile(model, commit="snapshots")
    before = model_snapshot(model), modeling_globals(model), process_state()
    explanation = treewy.explain(model)
    assert (model_snapshot(model), modeling_globals(model), process_state()) == before
    assert (explanation.backend, explanation.commit) == (("eager", "snapshots") if compiled else (None, None))
    assert explanation.refused is explanation.not_compilable is None
    assert [(x.layer_idx, x.kind, x.rewritten) for x in explanation.layers] == [
        (0, "Gated DeltaNet", GDN),
        (1, "attention", ATTENTION),
        (2, "Gated DeltaNet", GDN),
        (3, "attention", ATTENTION),
    ]
    assert [x.redirected for x in explanation.layers] == [GdnLayerInfo.anchors, ()] * 2
    assert [x.left_alone for x in explanation.layers] == ["", "takes the tree as a mask"] * 2
    for layer in explanation.layers:
        assert model.get_submodule(layer.module).layer_idx == layer.layer_idx


def test_what_is_compiled_is_listed_with_the_operators_of_its_graph() -> None:
    model = compiled_quickly("qwen3_next short")
    assert treewy.explain(model).compiled == ()
    generate(model)
    generate(model, rows=1, max_new_tokens=2, prompt_lookup_num_tokens=20)
    explanation = treewy.explain(model)
    assert {(size.rows, size.nodes) for size in explanation.compiled} == {(2, 1), (2, 16), (1, 1)}
    promised = [operator for layer in explanation.layers for operator in layer.rewritten]
    for size in explanation.compiled:
        assert not size.captured
        assert size.operators == {name: promised.count(name) for name in (*GDN, *ATTENTION)}
    treewy.restore(model)
    assert treewy.explain(model).compiled == ()


def test_a_table_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("FORCE_COLOR", "1")  # a string has no colours
    model = compiled_quickly()
    generate(model)
    lines = [" ".join(line.split()) for line in str(treewy.explain(model)).splitlines()]
    assert lines[0] == "treewy on Qwen3NextForCausalLM: backend='aot_eager', commit='fused'"
    assert "0 model.layers.0.linear_attn Gated DeltaNet redirected tree_conv, tree_wy_verify_" in lines
    assert "3 model.layers.3.self_attn attention takes the tree as a mask tree_attention" in lines
    assert lines[-1] == "2 16 no 2 tree_conv, 2 tree_wy_verify_, 2 tree_attention"
    assert f"redirected: while nodes are computed, {', '.join(GdnLayerInfo.anchors)}" in lines


def test_a_notebook_gets_the_text_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rich would show a table itself, and write nothing."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert "Gated DeltaNet" in str(treewy.explain(plain_model("qwen3_next")))


def test_a_model_that_compiled_backends_refuse_is_explained_with_their_reason() -> None:
    model = fresh_model("qwen3_next")
    hide_attention(model, 3)
    explanation = treewy.explain(model)
    with pytest.raises(ValueError, match=r"layer 3 .* cannot see it") as refusal:
        treewy.compile(model, backend="inductor")
    assert explanation.refused is None
    assert explanation.not_compilable == str(refusal.value)
    assert [bool(layer.redirected) for layer in explanation.layers] == [True, False] * 2
    assert not any(layer.rewritten for layer in explanation.layers)
    assert f"compiled backends refuse it: {refusal.value}" in str(explanation)


@pytest.mark.parametrize("family", ["BambaForCausalLM", "KimiLinearForCausalLM"])
def test_a_refused_model_is_explained_with_the_reason(family: str) -> None:
    if not hasattr(transformers, family):
        pytest.skip("came to transformers behind the oldest version that is supported")
    model = MAKERS[family]()
    explanation = treewy.explain(model)
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the two messages are compared
        treewy.compile(model)
    assert explanation.refused == explanation.not_compilable == str(refusal.value)
    assert len(explanation.layers) == 4
    assert {layer.kind for layer in explanation.layers} == {"other", "attention"}
    assert not any(layer.redirected or layer.rewritten for layer in explanation.layers)
    assert f"refused: {refusal.value}" in str(explanation)


@pytest.mark.parametrize("thing", [3, torch.nn.Linear(1, 1), PreTrainedModel])
def test_what_is_no_model_raises(thing: Any) -> None:
    with pytest.raises(TypeError, match=r"treewy\.explain takes a transformers model, not .*inner one"):
        treewy.explain(thing)


def test_compiling_is_logged_with_sizes_and_every_rewrite(caplog: pytest.LogCaptureFixture) -> None:
    model = compiled_quickly()
    with caplog.at_level(logging.DEBUG, "treewy"):
        generate(model)
        first = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
        caplog.clear()
        generate(model)
        assert not caplog.records  # nothing is compiled, and nothing said in each round
    texts = [text for name, level, text in first if level == "INFO" and name.startswith("treewy._compiled")]
    assert texts[0] == "new stores for 2 rows and up to 32 nodes: no others of these sizes and dtypes are free"
    for nodes in (1, 16):
        size = f"{nodes} nodes x 2 rows"
        for what in (f"rewriting and compiling {size} with eager: ", f"tracing and compiling {size}: "):
            (said,) = (text for text in texts if text.startswith(what))
            assert 0 <= float(said.removeprefix(what).removesuffix(" s")) < 1000
    rewrites = [text for name, level, text in first if (name, level) == ("treewy.passes._backend", "DEBUG")]
    assert len(rewrites) == 2 * (2 * 2 + 2)  # graphs, GDN layers with two passes, attention layers
    for number in range(1, 6):
        before, after = (int(rewrites[i].split(", ")[part].split()[0]) for i, part in ((number, 1), (number - 1, 2)))
        assert before == after > 0


class CapturedInName(_compiled_forward.Captured):
    """Says that it has captured at the second call, as on a GPU, and runs."""

    def __call__(self) -> Any:
        self.graph = self._has_run or None  # type: ignore[assignment]
        self._has_run = True
        return self._function()


def test_what_is_captured_again_is_logged_with_the_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        CompiledForward, "captured", lambda self, function, what: CapturedInName(function, torch.device("cpu"), what)
    )
    monkeypatch.setattr("treewy._static_stores._COLUMNS", 64)
    model = compiled_quickly("qwen3_next short")
    weight = model.get_output_embeddings().weight
    caplog.set_level(logging.INFO, "treewy._compiled_session")

    def said(**options: Any) -> list[str]:
        caplog.clear()
        generate(model, **options)
        return caplog.messages

    again = "what is captured for 2 rows is captured again: "
    assert len(said()) == 1  # new stores
    assert all(size.captured for size in treewy.explain(model).compiled if size.nodes > 1)
    assert said(max_new_tokens=15) == []
    weight.data = weight.data.clone()
    assert said() == [again + "weights have moved"]
    model.train()
    assert said() == [again + "modes have changed"]
    assert said(max_new_tokens=60) == [again + "keys and values have grown"]
    model.get_output_embeddings().register_forward_hook(lambda module, args, logits: -logits)
    assert said() == ["new stores for 2 rows and up to 32 nodes: hooks or adapters have changed"]
