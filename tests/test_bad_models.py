"""Models, layers and options that compile refuses, and failures inside a forward."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    PreTrainedModel,
)

import treewy
from api_models import (
    PROMPT,
    modeling_globals,
)
from models import fresh_model, plain_model
from refusals import (
    FAMILY,
    NEW,
    Case,
    OwnError,
    assert_works,
    generate,
    parameters,
    right,
    shape,
)

# What `compile` refuses.


def compile_with(change: Callable[[PreTrainedModel], None] = lambda model: None, **options: Any) -> Callable[[], Any]:
    def call() -> Any:
        model = fresh_model(FAMILY)
        change(model)
        try:
            return treewy.compile(model, **options)
        finally:
            assert "generate" not in vars(model)

    return call


def sliding_target() -> Any:
    config = copy.deepcopy(plain_model(FAMILY).config)
    config.layer_types = ["linear_attention", "full_attention", "linear_attention", "sliding_attention"]
    config.sliding_window = 8
    with torch.random.fork_rng():
        model = type(plain_model(FAMILY))(config)
    return treewy.compile(model)


def use_attention(name: str) -> Callable[[PreTrainedModel], None]:
    def change(model: PreTrainedModel) -> None:
        model.config._attn_implementation = name

    return change


class KimiLayer(nn.Module):
    """Stands for a layer of Kimi Linear."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return chunk_kimi_delta_attention(hidden_states)  # type: ignore[name-defined]  # noqa: F821


def add_kimi_layer(model: PreTrainedModel) -> None:
    model.model.layers[1].kimi = KimiLayer()


def replace_forward(model: PreTrainedModel) -> None:
    layer = model.model.layers[2].linear_attn
    original = layer.forward
    layer.forward = lambda *args, **kwargs: original(*args, **kwargs)


def dynamic_rope() -> None:
    model = fresh_model(FAMILY)
    model.config.rope_parameters["rope_type"] = "dynamic"
    treewy.compile(model)


COMPILES: list[tuple[str, Callable[[], Any], str, type[Exception]]] = [
    (
        "an unknown backend",
        compile_with(backend="nvfuser"),
        "backend 'nvfuser' is not available; .*eager",
        ValueError,
    ),
    (
        "an unknown commit policy",
        compile_with(commit="rollback"),
        "commit policy 'rollback' is not available with backend 'eager'; choose one of immediate, fused, deferred,",
        ValueError,
    ),
    ("no cache", compile_with(max_cache_len=0), "max_cache_len is 0; it must be positive, or None", ValueError),
    ("too many nodes", compile_with(tree=(50,) * 3), "make 127550 nodes, more than 1024; draft a smaller", ValueError),
    ("a dynamic rope", dynamic_rope, "rope_type 'dynamic' rotates by.*generate without a drafter", ValueError),
    ("a width of 0", compile_with(tree=(3, 0)), r"widths \(3, 0\) must be positive integers", ValueError),
    ("a number for widths", compile_with(tree=3), "widths 3 must be a sequence", TypeError),
    (
        "a shape that no row could follow",
        compile_with(tree=shape([[-1, 0], [-1, -1]])),
        "same full topology in every row",
        ValueError,
    ),
    (
        "a model without GDN layers",
        functools.partial(treewy.compile, fresh_model("qwen3")),  # made now: making a model draws random numbers
        r"no Gated DeltaNet rule.*Qwen3ForCausalLM \(model type 'qwen3'\); it supports hybrids such as Qwen3\.5",
        ValueError,
    ),
    (
        "a sliding window in a model that has none",
        sliding_target,
        "layer 3 of Qwen3NextForCausalLM is to have a sliding window.*set that layer's kind in config.layer_types",
        ValueError,
    ),
    *(
        (
            name,
            compile_with(use_attention(name)),
            rf"{name!r} cannot take a tree's mask; call model\.set_attn_implementation\('sdpa'\)",
            ValueError,
        )
        for name in ("flash_attention_2", "flash_attention_3", "flex_attention")
    ),
    (
        "a Kimi layer",
        compile_with(add_kimi_layer),
        r"'model\.layers\.1\.kimi' \(KimiLayer\) uses Kimi delta attention.*supports the Gated DeltaNet rule only",
        ValueError,
    ),
    (
        "a replaced forward",
        compile_with(replace_forward),
        r"forward of layer 'model\.layers\.2\.linear_attn' was replaced.*load the model with use_kernels=False",
        ValueError,
    ),
]


@pytest.mark.parametrize("case", parameters([Case(n, lambda _, c=c: c(), m, e) for n, c, m, e in COMPILES]))
def test_what_cannot_be_compiled_is_refused(model: PreTrainedModel, case: Case) -> None:
    with pytest.raises(case.error, match=case.message):
        case.call(model)


@pytest.mark.parametrize(
    ("change", "undo", "message"),
    [
        (use_attention("flash_attention_2"), use_attention("sdpa"), "'flash_attention_2' cannot take a tree's mask"),
        (replace_forward, lambda m: delattr(m.model.layers[2].linear_attn, "forward"), "use_kernels=False"),
        (add_kimi_layer, lambda m: delattr(m.model.layers[1], "kimi"), "Kimi delta attention"),
    ],
)
def test_what_changes_after_compile_is_refused_by_generate(
    change: Callable[[PreTrainedModel], None], undo: Callable[[PreTrainedModel], None], message: str
) -> None:
    own = treewy.compile(fresh_model(FAMILY))
    change(own)
    modules = modeling_globals(own)
    with pytest.raises(ValueError, match=message):
        generate(own, **right())
    assert modeling_globals(own) == modules
    undo(own)
    assert_works(own)


def test_a_failing_forward_leaves_nothing_behind(model: PreTrainedModel) -> None:
    """In prefill, and inside a tree forward, where the functions of the modeling file are replaced."""

    def fail_at(width: int) -> Callable[..., None]:
        def fail(module: nn.Module, args: Any, output: Tensor) -> None:
            if output.shape[1] == width:
                raise OwnError

        return fail

    for width in (PROMPT.shape[1], 6):
        handle = model.model.layers[2].register_forward_hook(fail_at(width))
        with pytest.raises(OwnError):
            generate(model, **right())
        handle.remove()


def test_assisted_decoding_of_a_configuration_object_is_refused(model: PreTrainedModel) -> None:
    config = GenerationConfig(max_new_tokens=NEW, assistant_early_exit=1)
    with pytest.raises(ValueError, match=r"generation_config\.assistant_early_exit is set.*pass assistant_model"):
        model.generate(PROMPT, config, **right())
