"""`treewy.compile` and `treewy.restore`: in place on one model, with options that can be replaced and undone."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import transformers
from transformers import PreTrainedModel, Qwen3NextForCausalLM

import treewy
from api_models import (
    BATCH,
    BATCH_MASK,
    PROMPT,
    FixedDrafter,
    model_snapshot,
    plain_text,
)
from compiled_calls import NEW, speculate, stats_of
from models import INTERFACE_FAMILIES, fresh_model, plain_model


@pytest.fixture(params=INTERFACE_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


# In place, as a call and as a decorator.


def test_compile_returns_the_model_it_was_given_and_it_speculates(family: str) -> None:
    model = fresh_model(family)
    assert treewy.compile(model) is model
    expected = plain_text(plain_model(family), PROMPT, NEW)
    assert torch.equal(speculate(model), expected)
    assert torch.equal(speculate(model, prompt_lookup_num_tokens=3, assistant_model=None, draft_tree=None), expected)


def test_compile_decorates_a_function_that_returns_a_model() -> None:
    @treewy.compile
    def load(family: str, *, seed: int) -> PreTrainedModel:
        """Load."""
        return fresh_model(family, seed)

    assert (load.__name__, load.__doc__) == ("load", "Load.")
    model = load("qwen3_next", seed=0)
    assert torch.equal(speculate(model), plain_text(plain_model("qwen3_next"), PROMPT, NEW))
    assert "generate" not in vars(fresh_model("qwen3_next"))


def test_compile_decorates_a_function_with_options() -> None:
    @treewy.compile(tree=(3, 1), commit="snapshots")
    def load() -> PreTrainedModel:
        return fresh_model("qwen3_next")

    stats = stats_of(load(), draft_tree=None)
    assert stats.nodes == 1 + 3 + 3
    assert stats.state_bytes == stats.snapshot_bytes


@pytest.mark.parametrize("options", [{}, {"tree": (3, 1)}])
def test_compile_decorates_a_model_class(options: dict[str, Any], tmp_path: Path) -> None:
    class Speculative(Qwen3NextForCausalLM):
        pass

    decorated = treewy.compile(**options)(Speculative) if options else treewy.compile(Speculative)
    assert decorated is Speculative
    plain = plain_model("qwen3_next")
    plain.save_pretrained(tmp_path)
    expected = plain_text(plain, PROMPT, NEW)
    for model in (Speculative(copy.deepcopy(plain.config)), Speculative.from_pretrained(tmp_path)):
        model.load_state_dict(plain.state_dict())
        model.eval()
        model.generation_config = copy.deepcopy(plain.generation_config)
        assert type(model) is Speculative
        assert torch.equal(speculate(model), expected)
        assert stats_of(model, draft_tree=None if options else (3, 1)).nodes == 1 + 3 + 3
    assert "generate" not in vars(Qwen3NextForCausalLM(copy.deepcopy(plain.config)))


def test_a_decorated_class_compiles_its_subclasses_too() -> None:
    @treewy.compile
    class Speculative(Qwen3NextForCausalLM):
        pass

    class Derived(Speculative):
        def __init__(self, config: transformers.Qwen3NextConfig) -> None:
            super().__init__(config)
            self.extra = torch.nn.Linear(1, 1)

    model = Derived(copy.deepcopy(plain_model("qwen3_next").config)).eval()
    expected = plain_text(treewy.restore(copy.deepcopy(model)), PROMPT, NEW)
    assert torch.equal(speculate(model), expected)


def test_a_decorated_function_that_returns_no_model_raises() -> None:
    with pytest.raises(TypeError, match="returned a int, not a transformers model"):
        treewy.compile(lambda: 3)()


@pytest.mark.parametrize("target", [3, "model", torch.nn.Linear(1, 1), dict])
def test_compile_of_something_else_names_it(target: Any) -> None:
    with pytest.raises(TypeError, match=r"takes a transformers model.*not (3|'model'|Linear|<class 'dict'>)"):
        treewy.compile(target)


# Options, and undoing.


def test_a_second_compile_replaces_the_options_of_the_first() -> None:
    model = treewy.compile(fresh_model("qwen3_next"), tree=(3, 1), commit="snapshots")
    treewy.compile(model, tree=(2, 1))
    stats = stats_of(model, draft_tree=None)
    assert stats.nodes == 1 + 2 + 2
    assert stats.state_bytes < stats.snapshot_bytes
    treewy.compile(model)
    assert stats_of(model, draft_tree=(1,)).nodes == 2
    treewy.restore(model)
    assert "generate" not in vars(model)


def test_a_refused_second_compile_leaves_the_first_in_place() -> None:
    model = treewy.compile(fresh_model("qwen3_next"), tree=(3, 1))
    with pytest.raises(ValueError, match="rollback"):
        treewy.compile(model, commit="rollback")
    assert stats_of(model, draft_tree=None).nodes == 1 + 3 + 3


def test_restore_puts_everything_back(family: str) -> None:
    model = fresh_model(family)
    plain_text(model, PROMPT, NEW)
    before = model_snapshot(model)
    treewy.compile(model)
    speculate(model)
    assert treewy.restore(model) is model
    assert model_snapshot(model) == before
    assert model.generate.__func__ is type(model).generate
    with pytest.raises(ValueError, match="stateful"):
        speculate(model, draft_tree=None)


def test_restore_puts_back_a_generate_of_the_users_own() -> None:
    # from_pretrained sets one too, for repositories with a custom generate
    model = fresh_model("qwen3_next")
    model.generate = own = lambda *args, **kwargs: "mine"
    treewy.compile(treewy.compile(model))
    treewy.restore(model)
    assert vars(model)["generate"] is own


def test_restore_of_a_model_that_is_not_compiled_raises() -> None:
    model = fresh_model("qwen3_next")
    with pytest.raises(ValueError, match=r"Qwen3NextForCausalLM is not compiled.*call treewy\.compile\(model\)"):
        treewy.restore(model)
    treewy.restore(treewy.compile(model))
    with pytest.raises(ValueError, match="not compiled"):
        treewy.restore(model)


@pytest.mark.parametrize("failing", [False, True])
def test_a_call_leaves_the_compiled_model_as_it_was(family: str, failing: bool) -> None:
    model = treewy.compile(fresh_model(family))
    model.model.layers[1].train()
    next(model.parameters()).requires_grad_(True)
    plain_text(model, PROMPT, NEW)
    before = model_snapshot(model)
    if failing:
        with pytest.raises(RuntimeError, match="no idea"):
            model.generate(PROMPT, max_new_tokens=NEW, drafter=FixedDrafter(RuntimeError("no idea"), after=2))
    else:
        speculate(model)
    assert model_snapshot(model) == before


# Plain use of a compiled model.


def test_generate_without_a_drafter_is_hugging_faces(family: str) -> None:
    plain, model = plain_model(family), treewy.compile(fresh_model(family), tree=(2, 2))
    calls: list[Callable[[PreTrainedModel], Any]] = [
        lambda m: m.generate(PROMPT, max_new_tokens=9),
        lambda m: m.generate(inputs=PROMPT, max_new_tokens=9, num_beams=2),
        lambda m: m.generate(PROMPT, transformers.GenerationConfig(max_new_tokens=9, repetition_penalty=1.3)),
        lambda m: m.generate(input_ids=BATCH, attention_mask=BATCH_MASK, max_length=20),
        lambda m: m.generate(PROMPT, max_new_tokens=9, do_sample=True, num_return_sequences=3, top_k=5),
    ]
    for number, call in enumerate(calls):
        outputs = []
        for candidate in (plain, model):
            torch.manual_seed(number)
            outputs.append(call(candidate))
        assert torch.equal(*outputs)


def test_plain_output_of_a_compiled_model_has_hugging_faces_fields_only() -> None:
    outputs = [
        m.generate(PROMPT, max_new_tokens=5, return_dict_in_generate=True, output_scores=True)
        for m in (plain_model("qwen3_next"), treewy.compile(fresh_model("qwen3_next")))
    ]
    assert type(outputs[0]) is type(outputs[1])
    assert outputs[0].keys() == outputs[1].keys()
    assert all(torch.equal(*scores) for scores in zip(*(output.scores for output in outputs), strict=True))


def test_forward_of_a_compiled_model_is_bit_equal_before_and_after_speculation(family: str) -> None:
    model = treewy.compile(fresh_model(family))
    expected = plain_model(family)(PROMPT).logits
    assert torch.equal(model(PROMPT).logits, expected)
    speculate(model)
    assert torch.equal(model(PROMPT).logits, expected)


def test_a_second_prompt_is_not_answered_with_the_first() -> None:
    """Case F12: transformers#30351. A cache that belonged to the first prompt answered the second."""
    model, plain = treewy.compile(fresh_model("qwen3_next")), plain_model("qwen3_next")
    for prompt, length in ((PROMPT, 6), (PROMPT.flip(1)[:, :5], 20), (BATCH[:, 6:], 12), (PROMPT, 6)):
        assert torch.equal(speculate(model, prompt, length), plain_text(plain, prompt, length))


def test_generate_describes_itself_as_hugging_faces() -> None:
    model = treewy.compile(fresh_model("qwen3_next"))
    assert model.generate.__doc__ == type(model).generate.__doc__
