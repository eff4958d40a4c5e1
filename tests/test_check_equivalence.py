"""`check_equivalence` passes a right engine, refuses what treewy refuses, and gives the model back as it was."""

import copy
import itertools
import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import treewy
from api_models import model_snapshot, modeling_globals
from models import FAMILIES, MIXTURES, VOCAB_SIZE, fresh_model, noisy_copy, plain_model, random_tokens
from treewy._generate import COMMIT_POLICIES
from treewy._snapshots import SnapshotNodes
from treewy.testing import EquivalenceError, check_equivalence

NEW = 8


# In half precision rounding turns routers of experts, which no bound on rounding covers.
DENSE = [family for family in FAMILIES if family not in MIXTURES]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *itertools.product(FAMILIES, [torch.float32]),
        *itertools.product(DENSE, [torch.bfloat16, torch.float16]),
    ],
    ids=str,
)
def test_a_tiny_model_of_each_family_passes(family: str, dtype: torch.dtype) -> None:
    model = fresh_model(family).to(dtype)
    draft = copy.deepcopy(noisy_copy(plain_model(family), 0.05)).to(dtype)
    report = check_equivalence(model, assistant_model=draft, max_new_tokens=NEW)
    assert report.passed
    assert str(dtype).removeprefix("torch.") in report.model
    assert {line.check for line in report.comparisons} == {
        "tokens", "ties", "acceptance", "stores", "node logits", "commit policies"
    }  # fmt: skip
    assert all(line.compared > 0 for line in report.comparisons)
    assert len({(line.check, line.subject) for line in report.comparisons}) == len(report.comparisons)


def test_every_commit_policy_is_compared() -> None:
    report = check_equivalence(treewy.compile(fresh_model("qwen3_5"), commit="snapshots"), max_new_tokens=4)
    others = {line.subject.split(":")[0] for line in report.comparisons if line.check == "commit policies"}
    assert others == set(COMMIT_POLICIES) - {"snapshots"}


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_prompts_of_the_user_are_taken_as_a_batch_or_as_rows(batch: int) -> None:
    model = fresh_model("qwen3_next")
    tokens = random_tokens(batch, 5, seed=1)
    reports = [check_equivalence(model, prompts=prompts, max_new_tokens=6) for prompts in (tokens, list(tokens))]
    assert reports[0] == reports[1]
    rows = max(batch, 6)  # each prompt and each script takes part
    assert (
        next(line.compared for line in reports[0].comparisons if line.subject == f"scripts, batch {rows}") == 6 * rows
    )


def test_the_seed_repeats_a_check_and_another_seed_makes_another(capsys: pytest.CaptureFixture[str]) -> None:
    model = fresh_model("qwen3_5")
    reports = [check_equivalence(model, max_new_tokens=6, seed=seed) for seed in (3, 3, 4)]
    assert reports[0] == reports[1] != reports[2]
    printed = capsys.readouterr().out
    for line in reports[0].comparisons:
        assert printed.count(f"{line.check} ") >= 3


# --- The model afterwards


def hooks_of(model: PreTrainedModel) -> list[Any]:
    names = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs")
    return [dict(getattr(module, name)) for module in model.modules() for name in names]


def everything(*models: PreTrainedModel) -> list[Any]:
    return [
        [(model_snapshot(model), hooks_of(model), id(model.generation_config)) for model in models],
        modeling_globals(*models),
        torch.get_rng_state().tolist(),
        random.getstate(),
        torch.is_grad_enabled(),
    ]


def as_it_came(family: str) -> PreTrainedModel:
    return fresh_model(family)


def compiled_with_options(family: str) -> PreTrainedModel:
    return treewy.compile(fresh_model(family), tree=(2, 1), commit="snapshots", max_cache_len=80)


def in_training_with_a_generation_config(family: str) -> PreTrainedModel:
    model = fresh_model(family).train()
    model.model.layers[1].eval()
    model.generation_config.update(do_sample=True, temperature=0.7, eos_token_id=[3, 5], repetition_penalty=1.3)
    return model


@pytest.mark.parametrize("make", [as_it_came, compiled_with_options, in_training_with_a_generation_config])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_it_was_after_a_check_that_passes_or_fails(
    make: Any, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, draft = make("qwen3_5"), copy.deepcopy(noisy_copy(plain_model("qwen3_5"), 0.05)).train()
    if fails:
        commit = SnapshotNodes.commit_
        monkeypatch.setattr(SnapshotNodes, "commit_", lambda self, state, *args: commit(self, state.clone(), *args))
    before = everything(model, draft)
    if fails:
        with pytest.raises(EquivalenceError):
            check_equivalence(model, assistant_model=draft, max_new_tokens=4)
    else:
        check_equivalence(model, assistant_model=draft, max_new_tokens=4)
    assert everything(model, draft) == before


def test_the_model_is_as_it_was_after_an_exception_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("out of memory")

    model = treewy.compile(fresh_model("qwen3_next"), commit="immediate")
    before = everything(model)
    monkeypatch.setattr(SnapshotNodes, "commit_", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        check_equivalence(model, max_new_tokens=4)
    assert everything(model) == before


# --- Refusals


def test_a_model_that_compile_refuses_raises_the_same() -> None:
    model = fresh_model("qwen3")
    messages = []
    for refuse in (treewy.compile, check_equivalence):
        with pytest.raises(ValueError, match="no Gated DeltaNet rule") as caught:
            refuse(model)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "generate" not in vars(model)


@pytest.mark.parametrize("target", [torch.nn.Linear(1, 1), None, fresh_model])
def test_what_is_no_model_is_a_type_error(target: Any) -> None:
    with pytest.raises(TypeError, match="check_equivalence takes a transformers model"):
        check_equivalence(target)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 1}, "max_new_tokens is 1; it must be at least 2"),
        ({"max_new_tokens": 4.0}, "max_new_tokens is 4.0"),
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": torch.tensor([[1, VOCAB_SIZE]])}, f"prompt 0 has the token {VOCAB_SIZE}, but the vocabulary"),
        ({"prompts": [torch.tensor([1]), torch.tensor([-1])]}, "prompt 1 has the token -1"),
        ({"prompts": [torch.tensor([[1]])]}, r"prompt 0 is torch.int64 \[1, 1\]; pass token ids"),
        ({"prompts": [torch.tensor([1.0])]}, "prompt 0 is torch.float32"),
        ({"prompts": [torch.tensor([1])[:0]]}, r"prompt 0 is torch.int64 \[0\]"),
        ({"prompts": [[1, 2]]}, "prompt 0 is list"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    model = fresh_model("qwen3_5")
    before = everything(model)
    with pytest.raises(ValueError, match=message):
        check_equivalence(model, **options)
    assert everything(model) == before


def test_an_assistant_of_another_vocabulary_raises_as_in_generate() -> None:
    model, draft = fresh_model("qwen3_5"), fresh_model("qwen3_5")
    draft.config.vocab_size = VOCAB_SIZE + 10
    with pytest.raises(ValueError, match="the assistant_model has a vocabulary of 71, the model one of 61"):
        check_equivalence(model, assistant_model=draft, max_new_tokens=4)
    assert "generate" not in vars(model)


@pytest.mark.parametrize("assistant", ["gpt2", torch.nn.Linear(2, 2)], ids=["a name", "a module"])
def test_an_assistant_that_is_no_model_is_refused_before_anything_is_generated(assistant: object) -> None:
    model = fresh_model("qwen3_5")
    model.register_forward_hook(lambda *args: pytest.fail("the model ran"))
    with pytest.raises(TypeError, match=r"assistant_model is .*pass a transformers model"):
        check_equivalence(model, assistant_model=assistant)
    with pytest.raises(TypeError, match=r"draft_model is a .*; pass a transformers model"):
        treewy.AssistantDrafter(assistant)
    with pytest.raises(TypeError, match="drafter is a Qwen3_5ForCausalLM; pass a model as assistant_model="):
        treewy.compile(model).generate(torch.ones(1, 2).long(), drafter=fresh_model("qwen3_5"))
