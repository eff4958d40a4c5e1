"""What is compiled of a model serves one generation after another, beside another, and what has changed is seen."""

import copy
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import treewy
from compiled_calls import graphs
from compiled_texts import SMALL, compiled_short, compiled_text, plain_text
from models import greedy, plain_model, random_tokens
from treewy._compiled_session import Place

pytestmark = pytest.mark.usefixtures("nothing_compiled_is_kept", "graphs_run_as_they_are")


@pytest.fixture
def model(graphs_run_as_they_are: None) -> PreTrainedModel:
    return compiled_short()


def test_a_generation_within_another_has_stores_of_its_own(model: PreTrainedModel) -> None:
    plain = plain_model(SMALL)
    prompt, other = random_tokens(1, 6, seed=1), random_tokens(1, 9, seed=2)

    class Interrupts:
        texts: ClassVar[list[list[list[int]]]] = []
        puts = 0

        def put(self, tokens: Tensor) -> None:
            self.puts += 1
            if self.puts in (5, 9):  # behind the prompt and what prefill chose
                self.texts.append(compiled_text(model, other))

        def end(self) -> None:
            pass

    assert compiled_text(model, prompt) == plain_text(plain, prompt)  # leaves stores that either could take
    assert compiled_text(model, prompt, streamer=Interrupts()) == plain_text(plain, prompt)
    assert Interrupts.texts == [plain_text(plain, other)] * 2


def test_threads_may_share_a_compiled_model(model: PreTrainedModel) -> None:
    plain = plain_model(SMALL)
    prompts = [random_tokens(1, length, seed=length) for length in (4, 9)]
    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(lambda prompt: compiled_text(model, prompt), prompts * 2))
    assert texts == [plain_text(plain, prompt) for prompt in prompts] * 2


def test_other_numbers_of_rows_are_compiled_once(model: PreTrainedModel) -> None:
    seen = []
    for batch in (1, 2, 1, 2):
        compiled_text(model, random_tokens(batch, 6, seed=batch))
        seen.append(graphs())
    assert seen[0] < seen[1] == seen[2] == seen[3]


def test_a_text_ends_at_its_own_tokens(model: PreTrainedModel) -> None:
    """Not at those of the text before, where there were as many."""
    prompt = random_tokens(1, 6, seed=1)
    mask = torch.ones_like(prompt)
    tokens = greedy(plain_model(SMALL), prompt, mask, 16)[0, 6:].tolist()
    ends = [token for index, token in enumerate(tokens) if index > 3 and token not in tokens[:index]]
    for end in (ends[1], ends[0]):
        options = {"do_sample": False, "eos_token_id": end, "pad_token_id": 0, "prompt_lookup_num_tokens": 3}
        text = model.generate(prompt, attention_mask=mask, max_new_tokens=16, **options)
        assert text[0, 6:].tolist() == tokens[: tokens.index(end) + 1]


def test_nothing_of_an_earlier_text_is_left_behind(model: PreTrainedModel) -> None:
    """Not even what is no number."""
    plain = plain_model(SMALL)
    prompt = random_tokens(1, 6, seed=1)
    embedding = model.get_input_embeddings().weight
    kept = embedding.detach().clone()
    with torch.no_grad():
        embedding[int(plain_text(plain, prompt)[0][8])] = float("nan")
        compiled_text(model, prompt)
        embedding.copy_(kept)
    other = random_tokens(1, 5, seed=3)
    assert compiled_text(model, other) == plain_text(plain, other)


def test_what_is_made_in_inference_mode_serves_outside_of_it(model: PreTrainedModel) -> None:
    plain = plain_model(SMALL)
    prompt = random_tokens(1, 6, seed=1)
    with torch.inference_mode():
        inside = compiled_text(model, prompt)
    assert inside == compiled_text(model, prompt) == plain_text(plain, prompt)


def test_a_copy_computes_with_its_own_weights_and_a_model_with_those_of_now(model: PreTrainedModel) -> None:
    prompt = random_tokens(1, 6, seed=1)
    before = compiled_text(model, prompt)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.get_output_embeddings().weight.neg_()
    assert compiled_text(model, prompt) == before
    changed = compiled_text(copied, prompt)
    assert changed == copied.generate(prompt, max_new_tokens=14, do_sample=False, pad_token_id=0).tolist() != before
    wide = model.to(torch.float64)
    assert compiled_text(wide, prompt) == plain_text(wide, prompt)


def test_a_restored_model_holds_no_stores(model: PreTrainedModel) -> None:
    compiled_text(model, random_tokens(1, 6, seed=1))
    (place,) = model.generate.target._free
    stores = weakref.ref(place.stores)
    del place
    treewy.restore(model)
    gc.collect()
    assert stores() is None


def test_graphs_are_captured_again_where_they_would_not_see_a_change(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of weights that lie elsewhere, and compiled again for hooks; not for weights that change where they are."""
    forgotten = []
    monkeypatch.setattr(Place, "forget_graphs", lambda place, why: forgotten.append(why))
    prompt = random_tokens(1, 6, seed=1)
    weight = model.get_output_embeddings().weight

    def forgets(change: Callable[[], object]) -> bool:
        forgotten.clear()
        change()
        assert compiled_text(model, prompt) == plain_text(model, prompt)
        return bool(forgotten)

    assert forgets(lambda: None)  # the first stores
    assert not forgets(lambda: None)
    assert not forgets(lambda: weight.data.neg_())
    assert forgets(lambda: setattr(weight, "data", weight.data.clone()))
    assert forgets(lambda: model.get_output_embeddings().register_forward_hook(lambda module, args, logits: -logits))
