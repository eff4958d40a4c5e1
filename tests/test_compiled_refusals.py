"""What compiled rounds refuse, by name and with a remedy; the model stays usable."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import treewy
from compiled_calls import graphs
from compiled_texts import SMALL, compiled_short, compiled_text, plain_text
from models import fresh_model, hide_attention, plain_model, random_tokens
from test_generate_equality import speculative

pytestmark = pytest.mark.usefixtures("nothing_compiled_is_kept", "graphs_run_as_they_are")


@pytest.fixture
def model(graphs_run_as_they_are: None) -> PreTrainedModel:
    return compiled_short()


def test_a_layer_whose_attention_cannot_be_seen_is_refused_by_name() -> None:
    model = fresh_model("qwen3_next")
    hide_attention(model, 3)
    with pytest.raises(ValueError, match=r"layer 3 of Qwen3NextForCausalLM does not ask.*backend='eager'"):
        treewy.compile(model, backend="aot_eager")
    prompt = random_tokens(1, 6, seed=1)
    assert compiled_text(treewy.compile(model), prompt) == plain_text(plain_model("qwen3_next"), prompt)


@pytest.mark.parametrize("commit", ["immediate", "snapshots"])
def test_policies_that_are_not_compiled_are_refused_by_name(commit: str) -> None:
    with pytest.raises(ValueError, match=rf"'{commit}' is not available with backend 'inductor'.*deferred, fused"):
        treewy.compile(plain_model("qwen3_next"), backend="inductor", commit=commit)


def test_pads_behind_the_first_token_are_refused_and_the_model_stays_usable(model: PreTrainedModel) -> None:
    prompt = random_tokens(1, 6, seed=1)
    right = compiled_text(model, prompt)
    compiled_once = graphs()
    mask = torch.tensor([[1, 1, 0, 1, 1, 1]])
    with pytest.raises(ValueError, match="zeros behind the first token"):
        speculative(model, prompt, mask, max_new_tokens=5, prompt_lookup_num_tokens=2)
    (place,) = model.generate.target._free
    columns = place.stores.prefix.keys[1].shape[2]
    long = random_tokens(1, 300, seed=2)
    with pytest.raises(ValueError, match="zeros behind the first token"):
        speculative(model, long, (long != long[0, 9]).long(), max_new_tokens=5, prompt_lookup_num_tokens=2)
    assert place.stores.prefix.keys[1].shape[2] == columns  # or graphs would look where they lay before
    assert compiled_text(model, prompt) == right == plain_text(plain_model(SMALL), prompt)
    assert graphs() == compiled_once  # what was compiled is still there


def test_experts_that_cannot_be_traced_are_refused_with_a_remedy() -> None:
    model = fresh_model("qwen3_next_moe", experts="eager")
    treewy.compile(model, backend="aot_eager")
    prompt = random_tokens(1, 6, seed=1)
    with pytest.raises(ValueError, match=r"cannot trace this model, in \w+ at .*\.py:\d+ .*backend='eager'"):
        compiled_text(model, prompt)
    treewy.compile(model)
    assert compiled_text(model, prompt) == plain_text(model, prompt)


WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "nonzero": lambda x: (x > 0).nonzero().sum(),
    "getitem": lambda x: x[x > 0].sum(),
}


def test_what_waits_for_the_host_is_refused_by_name(model: PreTrainedModel) -> None:
    prompt, right = random_tokens(1, 6, seed=1), plain_text(plain_model(SMALL), random_tokens(1, 6, seed=1))
    for what, waits in WAITS.items():
        hook = model.model.layers[1].mlp.register_forward_hook(
            lambda _, __, output, waits=waits: output + 0 * waits(output)
        )
        with pytest.raises(ValueError, match=rf"{what}.* in model\.layers\.1\.mlp copies values.*backend='eager'"):
            compiled_text(model, prompt)
        assert compiled_text(treewy.compile(model), prompt) == right
        hook.remove()
        treewy.compile(model, backend="aot_eager")
    assert compiled_text(model, prompt) == right


def test_what_depends_on_the_host_is_refused_where_it_stands() -> None:
    model = fresh_model(SMALL)
    model.model.layers[1].mlp.register_forward_hook(lambda _, __, output: output.max().item() and None)
    treewy.compile(model, backend="aot_eager")
    with pytest.raises(ValueError, match=r"cannot trace this model.*backend='eager'.*a hook"):
        compiled_text(model, random_tokens(1, 6, seed=1))


@torch._dynamo.config.patch(recompile_limit=2)
def test_a_hook_that_counts_is_refused_once_it_has_been_compiled_too_often() -> None:
    model, calls = fresh_model(SMALL), [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    hook = model.register_forward_pre_hook(count)
    prompt, right = random_tokens(1, 6, seed=1), plain_text(plain_model(SMALL), random_tokens(1, 6, seed=1))
    treewy.compile(model, backend="aot_eager")
    with pytest.raises(ValueError, match=r"again in every round.*hooks that count.*backend='eager'"):
        compiled_text(model, prompt)
    hook.remove()
    assert compiled_text(model, prompt) == right
