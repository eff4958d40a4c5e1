"""Nothing in the process changes but the compiled model: other models, globals, settings, files, hooks and threads."""

import copy
import io
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import transformers
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

import treewy
from api_models import (
    BATCH,
    MIXED,
    PROMPT,
    FixedDrafter,
    cache_keyword,
    knowing,
    modeling_globals,
    plain_text,
)
from compiled_calls import NEW, speculate, stats_of
from models import INTERFACE_FAMILIES, fresh_model, plain_model
from treewy.passes import _anchors, find_gdn_layers, redirect_layers
from treewy.testing import perfect

# Other models, and the process.


def forward_outputs(model: PreTrainedModel) -> list[Tensor]:
    """Prefill, one token and several tokens with a cache: every path of a GDN layer."""
    cache = transformers.DynamicCache(config=model.config)
    steps = (PROMPT, PROMPT[:, :1], PROMPT[:, :3])
    logits = [model(step, use_cache=True, **{cache_keyword(model): cache}).logits for step in steps]
    states = [layer.recurrent_states[0] for layer in cache.layers if hasattr(layer, "recurrent_states")]
    return logits + [state.clone() for state in states]


@pytest.mark.parametrize("where", ["same thread", "other thread"])
@pytest.mark.parametrize("family", INTERFACE_FAMILIES)
def test_another_model_of_the_class_is_untouched_in_the_middle_of_a_tree_forward(family: str, where: str) -> None:
    other, model = plain_model(family), treewy.compile(fresh_model(family))
    expected = forward_outputs(other)
    results: list[list[Tensor]] = []

    def run_the_other(*_: Any) -> None:
        if where == "same thread":
            results.append(forward_outputs(other))
        else:
            with ThreadPoolExecutor(1) as pool:
                results.append(pool.submit(forward_outputs, other).result())

    gdn_layer = model.get_submodule(find_gdn_layers(model)[1].name)
    handle = gdn_layer.register_forward_pre_hook(run_the_other)
    speculate(model)
    handle.remove()
    assert len(results) > 2
    for result in results:
        assert all(torch.equal(*pair) for pair in zip(result, expected, strict=True))


def test_another_model_of_the_class_is_untouched_while_a_thread_speculates() -> None:
    other, model = plain_model("qwen3_next"), treewy.compile(fresh_model("qwen3_next"))
    expected = forward_outputs(other)
    done = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: [speculate(model, max_new_tokens=30) for _ in range(2)])
        running.add_done_callback(lambda _: done.set())
        while not done.is_set():
            result = forward_outputs(other)
            assert all(torch.equal(*pair) for pair in zip(result, expected, strict=True))
        running.result()


@pytest.mark.parametrize("family", INTERFACE_FAMILIES)
def test_the_globals_of_the_modeling_files_are_the_same_objects_after_every_call(family: str) -> None:
    """Case F33: Liger-Kernel#772. A patch leaked to other models."""
    model = fresh_model(family)
    before = modeling_globals(model)
    treewy.compile(model)
    assert modeling_globals(model) == before
    speculate(model)
    assert modeling_globals(model) == before
    with pytest.raises(RuntimeError, match="no idea"):
        model.generate(PROMPT, max_new_tokens=NEW, drafter=FixedDrafter(RuntimeError("no idea"), after=1))
    assert modeling_globals(model) == before

    def fail(module: torch.nn.Module, args: Any, output: Tensor) -> None:
        if output.shape[1] == 6:  # a draft tree and its root
            raise RuntimeError("inside a tree forward")

    handle = model.model.layers[2].register_forward_hook(fail)
    text = plain_text(plain_model(family), PROMPT, NEW)
    with pytest.raises(RuntimeError, match="inside a tree forward"):
        model.generate(PROMPT, max_new_tokens=NEW, drafter=knowing(text, PROMPT))
    assert modeling_globals(model) == before
    handle.remove()
    assert torch.equal(model.generate(PROMPT, max_new_tokens=NEW, drafter=knowing(text, PROMPT)), text)
    treewy.restore(model)
    assert modeling_globals(model) == before


def test_redirections_that_overlap_put_the_originals_back_in_any_order() -> None:
    layers = find_gdn_layers(plain_model("qwen3_next"))
    before = modeling_globals(plain_model("qwen3_next"))
    expected = forward_outputs(plain_model("qwen3_next"))
    first, second = redirect_layers(layers), redirect_layers(layers)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    during = forward_outputs(plain_model("qwen3_next"))
    second.__exit__(None, None, None)
    assert modeling_globals(plain_model("qwen3_next")) == before
    assert all(torch.equal(*pair) for pair in zip(during, expected, strict=True))


def test_redirections_are_counted_under_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two threads that begin and end at the same moment could put the originals back too early, or never."""

    class Guarded(dict[tuple[str, str], int]):
        def __setitem__(self, place: tuple[str, str], count: int) -> None:
            assert _anchors._lock.locked()
            super().__setitem__(place, count)

        def __delitem__(self, place: tuple[str, str]) -> None:
            assert _anchors._lock.locked()
            super().__delitem__(place)

    monkeypatch.setattr(_anchors, "_active", Guarded())
    layers = find_gdn_layers(plain_model("qwen3_next"))
    with redirect_layers(layers), redirect_layers(layers):
        assert set(_anchors._active.values()) == {2}
    assert not _anchors._active


def global_state() -> dict[str, Any]:
    """Settings and registries of torch and transformers."""
    return {
        "attention": dict(AttentionInterface._global_mapping),
        "attention masks": dict(AttentionMaskInterface._global_mapping),
        "dynamo": torch._dynamo.config.get_config_copy(),
        "inductor": torch._inductor.config.get_config_copy(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "random": torch.get_rng_state().tolist(),
        "precision": torch.get_float32_matmul_precision(),
        "verbosity": transformers.logging.get_verbosity(),
        "hooks": [len(hooks) for hooks in global_module_hooks()],
    }


def global_module_hooks() -> Iterator[dict[int, Any]]:
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks"):
        yield getattr(torch.nn.modules.module, name)


@pytest.mark.parametrize("failing", [False, True])
def test_global_settings_and_registries_are_untouched(failing: bool) -> None:
    model = fresh_model("qwen3_next")
    before = global_state()
    treewy.compile(model, tree=(2, 1))
    if failing:
        with pytest.raises(RuntimeError, match="no idea"):
            model.generate(PROMPT, max_new_tokens=NEW, drafter=FixedDrafter(RuntimeError("no idea"), after=1))
    else:
        speculate(model)
    assert global_state() == before
    treewy.restore(model)
    assert global_state() == before


# Copies and files.


def through_torch_save(model: PreTrainedModel) -> PreTrainedModel:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: PreTrainedModel = torch.load(buffer, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), through_torch_save],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_copy_of_a_compiled_model_speculates_with_its_own_weights(
    duplicate: Callable[[PreTrainedModel], PreTrainedModel],
) -> None:
    shape = treewy.DraftTree(torch.zeros(1, 3).long(), torch.tensor([-1, -1, 0]))
    model = treewy.compile(fresh_model("qwen3_next"), tree=shape)
    twin = duplicate(model)
    with torch.no_grad():
        twin.lm_head.weight.copy_(twin.lm_head.weight.flip(0))
    theirs, ours = (plain_text(m, PROMPT, NEW) for m in (twin, plain_model("qwen3_next")))
    assert not torch.equal(theirs, ours)
    assert torch.equal(speculate(twin), theirs)
    assert torch.equal(speculate(model), ours)
    assert stats_of(twin, draft_tree=None).nodes == 4
    treewy.restore(twin)
    assert torch.equal(speculate(model), ours)


@pytest.mark.parametrize("family", INTERFACE_FAMILIES)
def test_what_a_compiled_model_saves_is_what_the_plain_one_saves(family: str, tmp_path: Path) -> None:
    plain, model = plain_model(family), treewy.compile(fresh_model(family), tree=(2, 2))
    speculate(model)
    plain.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "compiled")
    names = [sorted(path.name for path in (tmp_path / kind).iterdir()) for kind in ("plain", "compiled")]
    assert names[0] == names[1]
    for name in names[0]:
        if name.endswith(".json"):
            files = [json.loads((tmp_path / kind / name).read_text()) for kind in ("plain", "compiled")]
            assert files[0] == files[1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "compiled").eval()
    assert "generate" not in vars(loaded)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    expected = plain_text(plain, PROMPT, NEW)
    assert torch.equal(plain_text(loaded, PROMPT, NEW), expected)
    assert torch.equal(speculate(treewy.compile(loaded)), expected)


# Hooks and threads of the user.


def test_a_hook_on_the_model_runs_once_a_forward_of_the_target() -> None:
    model = treewy.compile(fresh_model("qwen3_next"))
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    stats = stats_of(model)
    assert len(calls) == stats.target_forwards == stats.rounds + 1


@pytest.mark.parametrize("where", ["lm_head", "model.layers.2.linear_attn", "model.layers.1", "model.embed_tokens"])
@pytest.mark.parametrize("family", INTERFACE_FAMILIES)
def test_hooks_that_change_what_a_layer_computes_change_the_text_as_in_plain_generation(
    family: str, where: str
) -> None:
    plain, model = fresh_model(family), treewy.compile(fresh_model(family))

    def change(module: torch.nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(module, args, output[0]), *output[1:])
        return output * torch.linspace(0.2, 2.0, output.shape[-1])

    for m in (plain, model):
        m.get_submodule(where).register_forward_hook(change)
    expected = plain_text(plain, PROMPT, NEW)
    assert not torch.equal(expected, plain_text(plain_model(family), PROMPT, NEW))
    assert torch.equal(speculate(model), expected)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=NEW, drafter=knowing(expected, PROMPT)), expected)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("family", INTERFACE_FAMILIES)
def test_two_threads_generate_what_one_thread_does(family: str, shared: bool) -> None:
    """Case F29: pytorch#118260, pytorch#126024. State of a compiler was global."""
    first = treewy.compile(fresh_model(family), tree=(2, 1))
    second = first if shared else treewy.compile(fresh_model(family, seed=1))
    prompts = (PROMPT, BATCH)
    plain = (plain_model(family), plain_model(family, seed=0 if shared else 1))
    expected = [plain_text(m, p, NEW) for m, p in zip(plain, prompts, strict=True)]
    start = threading.Barrier(2)

    def work(model: PreTrainedModel, prompt: Tensor, text: Tensor) -> list[Tensor]:
        start.wait()
        drafters = (knowing(text, prompt, MIXED), knowing(text, prompt, (perfect(3),)))
        texts = [model.generate(prompt, max_new_tokens=NEW, drafter=drafter) for drafter in drafters]
        return [*texts, speculate(model, prompt), plain_text(model, prompt, NEW)]

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(work, *job) for job in zip((first, second), prompts, expected, strict=True)]
        for job, text in zip(running, expected, strict=True):
            assert all(torch.equal(result, text) for result in job.result())
