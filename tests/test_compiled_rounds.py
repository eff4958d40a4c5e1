"""Rounds of compiled forwards: the same texts and, after every round, the same stores as token by token.

`aot_eager` has the same graphs and passes as `inductor`, which takes minutes on a CPU and runs once here; on a GPU see
`test_compiled_rounds_gpu.py`. What is around the graphs is looked at with a model of two layers, and graphs that run as
they are; so are the stores of most families.
"""

import copy
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

import treewy
from knowing_drafter import KnowingDrafter
from models import (
    FAMILIES,
    fresh_model,
    greedy,
    hide_attention,
    left_padded,
    plain_model,
    random_tokens,
    set_window,
)
from scripted_stores import MIXED, StoresFollow, play_script
from test_generate_equality import speculative
from tolerances import STORES_FLOAT32, relative_error
from treewy import _static_stores
from treewy._compiled_session import RING_ROWS, CompiledSession, CompiledTarget, Place
from treewy._rounds import Rounds
from treewy._session import Session
from treewy.testing import EquivalenceError, check_equivalence
from treewy.testing._report import ATTENTION_STORES, GDN_STORES

pytestmark = pytest.mark.usefixtures("nothing_compiled_is_kept")

SMALL = "qwen3_next short"

GRAPHS = 3
"""Of a number of nodes: the forward, what it accepts, and the commit."""


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.fixture
def model(graphs_run_as_they_are: None) -> PreTrainedModel:
    return treewy.compile(fresh_model(SMALL), backend="aot_eager")


class CompiledStoresFollow(StoresFollow):
    """Looks at the stores of a compiled session, folded into its cache, and lets it go on from its own.

    The next verification may fold what an ended row accepted last: the same sum in another order, so not the same bits.
    """

    def __call__(self, rounds: Rounds) -> None:
        self.at_end.clear()
        session = rounds.session
        assert isinstance(session, CompiledSession)
        if session.has_begun:
            session.stores.unload(session.cache)
        super().__call__(rounds)


@pytest.mark.parametrize(
    ("family", "commit"),
    [(family, "deferred") for family in FAMILIES] + [("qwen3_next", "fused"), ("olmo_hybrid", "fused")],
)
def test_stores_equal_a_token_by_token_run_after_every_round(
    family: str, commit: str, request: pytest.FixtureRequest
) -> None:
    """Of rows that accept everything, nothing and parts in the same round, and of rows that have ended."""
    if family not in ("qwen3_next", "lara_mini"):
        request.getfixturevalue("graphs_run_as_they_are")
    model = fresh_model(family)
    after_round = CompiledStoresFollow(plain_model(family), MIXED.lengths, num_pads=2)
    session = CompiledSession(CompiledTarget(model, "aot_eager", commit))
    play_script(model, MIXED, after_round, num_pads=2, max_new_tokens=40, session=session)
    assert graphs() <= 2 * GRAPHS  # with and without drafts


@pytest.mark.usefixtures("graphs_run_as_they_are")
@pytest.mark.parametrize("commit", RING_ROWS)
def test_tokens_rounds_and_the_cache_are_those_of_the_eager_engine(commit: str) -> None:
    """Also in a second call of another length, for which nothing is compiled again."""
    model = fresh_model("qwen3_5")
    treewy.compile(model, backend="aot_eager", commit=commit)
    compiled_once = None
    for length, seed in ((7, 3), (11, 4)):
        prompt, mask = left_padded([length], seed=seed)
        plain = greedy(plain_model("qwen3_5"), prompt, mask, 40)
        output = speculative(model, prompt, mask, max_new_tokens=30, prompt_lookup_num_tokens=3)
        assert output.sequences.tolist() == plain[:, :-10].tolist()
        cache = output.get("past_key_values", output.get("cache"))
        seen = {"attention_mask": torch.ones_like(output.sequences), Session(model).cache_keyword: cache}
        again = plain_model("qwen3_5").generate(
            output.sequences, max_new_tokens=10, do_sample=False, pad_token_id=0, **seen
        )
        assert again.tolist() == plain.tolist()
        compiled_once = graphs() if compiled_once is None else compiled_once
        assert graphs() == compiled_once


def test_nothing_is_compiled_again_when_keys_and_values_grow(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treewy._static_stores._COLUMNS", 64)
    prompt, mask = left_padded([5, 3], seed=1)
    plain = greedy(plain_model(SMALL), prompt, mask, 90)
    output = speculative(model, prompt, mask, max_new_tokens=90, prompt_lookup_num_tokens=3)
    assert output.sequences.tolist() == plain.tolist()
    assert graphs() <= 2 * GRAPHS


def test_what_a_round_returns_is_the_same_with_a_decoding_on_the_host(model: PreTrainedModel) -> None:
    """A processor that changes nothing keeps the choice from the device."""
    prompt, mask = left_padded([6, 4], seed=2)
    drafting = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 20}
    on_device = speculative(model, prompt, mask, **drafting)
    on_host = speculative(model, prompt, mask, repetition_penalty=1.0 + 1e-9, **drafting)
    assert on_host.sequences.tolist() == on_device.sequences.tolist()
    assert on_host.speculation == on_device.speculation


def test_inductor_gives_the_same_tokens() -> None:
    model = fresh_model(SMALL)
    prompt, mask = left_padded([6, 4], seed=2)
    plain = greedy(model, prompt, mask, 24)
    texts = [row[pads:].tolist() for row, pads in zip(plain, (mask == 0).sum(dim=1), strict=True)]
    treewy.compile(model, backend="inductor")
    output = speculative(model, prompt, mask, max_new_tokens=19, drafter=KnowingDrafter(texts, (2, 0, 1), depth=2))
    assert output.sequences.tolist() == plain[:, :-5].tolist()
    assert output.speculation.mean_accepted_length > 1.8


@pytest.mark.usefixtures("graphs_run_as_they_are")
@pytest.mark.parametrize("window", [3, 2**62])
def test_the_text_of_a_model_with_sliding_windows_is_its_plain_one(window: int) -> None:
    """Of rows that accept differently, behind pads, with windows that end within a tree and before all."""
    if "lara_mini" not in FAMILIES:
        pytest.skip("LARA came to transformers behind the oldest version that is supported")
    model = fresh_model("lara_mini")
    set_window(model, window)
    prompt, mask = left_padded([9, 4, 6], seed=2)
    plain = greedy(model, prompt, mask, 40)
    texts = [row[pads:].tolist() for row, pads in zip(plain, (mask == 0).sum(dim=1), strict=True)]
    treewy.compile(model, backend="aot_eager")
    drafter = KnowingDrafter(texts, (5, 0, 2), depth=5)
    output = speculative(model, prompt, mask, max_new_tokens=34, drafter=drafter)
    assert output.sequences.tolist() == plain[:, :-6].tolist()
    assert output.speculation.mean_accepted_length > 2


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


def test_a_check_watches_compiled_rounds(model: PreTrainedModel) -> None:
    kept = model.generate
    report = check_equivalence(model, max_new_tokens=6)
    seen = {(line.check, line.subject): line.compared for line in report.comparisons}
    for check, policy in (("stores", ""), ("commit policies", "fused: ")):
        assert all(seen[check, policy + store] > 10 for store in (*GDN_STORES, *ATTENTION_STORES))
    assert model.generate is kept


def test_a_check_finds_what_a_compiled_round_leaves_wrong(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_static_stores, "tree_conv_commit_", lambda *args: None)
    with pytest.raises(EquivalenceError, match=rf"after round \d, layer 0, {GDN_STORES[1]}"):
        check_equivalence(model, max_new_tokens=4)


def compiled_text(model: PreTrainedModel, prompt: Tensor, **more: Any) -> list[list[int]]:
    text: list[list[int]] = speculative(
        model, prompt, torch.ones_like(prompt), max_new_tokens=14, prompt_lookup_num_tokens=3, **more
    ).sequences.tolist()
    return text


def plain_text(model: PreTrainedModel, prompt: Tensor) -> list[list[int]]:
    text: list[list[int]] = greedy(model, prompt, torch.ones_like(prompt), 14).tolist()
    return text


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


@pytest.mark.usefixtures("graphs_run_as_they_are")
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


@pytest.mark.usefixtures("graphs_run_as_they_are")
def test_what_depends_on_the_host_is_refused_where_it_stands() -> None:
    model = fresh_model(SMALL)
    model.model.layers[1].mlp.register_forward_hook(lambda _, __, output: output.max().item() and None)
    treewy.compile(model, backend="aot_eager")
    with pytest.raises(ValueError, match=r"cannot trace this model.*backend='eager'.*a hook"):
        compiled_text(model, random_tokens(1, 6, seed=1))


@pytest.mark.usefixtures("graphs_run_as_they_are")
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


@pytest.mark.usefixtures("graphs_run_as_they_are")
def test_the_largest_tree_is_handed_over_whole() -> None:
    """Rows of ring and tree together are more than a kernel takes in one go."""
    model = fresh_model(SMALL)
    session = CompiledSession(CompiledTarget(model, "aot_eager", "deferred"))
    follow = Session(model)
    prompt, tokens = random_tokens(1, 6, seed=1), random_tokens(1, 128, seed=2)
    chain = torch.arange(-1, 127)[None]
    for each in (session, follow):
        each.prefill(prompt, torch.ones_like(prompt))
        for accepted in (9, 120):
            each.extend(tokens, chain)
            each.commit(torch.tensor([accepted]))
    session.stores.unload(session.cache)
    follow.cache.materialize()
    for ours, theirs in zip(session.cache.state_layers, follow.cache.state_layers, strict=True):
        assert relative_error(ours.state, theirs.state) <= STORES_FLOAT32
        assert relative_error(ours.window, theirs.window) <= STORES_FLOAT32


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
