"""Rounds of compiled forwards: the same texts and, after every round, the same stores as token by token.

`aot_eager` has the same graphs and passes as `inductor`, which takes minutes on a CPU and runs once here; on a GPU see
`test_compiled_rounds_gpu.py`. What is around the graphs is looked at with a model of two layers, and graphs that run as
they are; so are the stores of most families.
"""

import pytest
import torch
from transformers import PreTrainedModel

import treewy
from compiled_calls import graphs
from compiled_texts import SMALL, compiled_short
from knowing_drafter import KnowingDrafter
from models import (
    FAMILIES,
    fresh_model,
    greedy,
    left_padded,
    plain_model,
    random_tokens,
    set_window,
)
from scripted_stores import MIXED, StoresFollow, play_script
from test_generate_equality import speculative
from tolerances import STORES_FLOAT32, relative_error
from treewy import _static_stores
from treewy._compiled_session import RING_ROWS, CompiledSession, CompiledTarget
from treewy._rounds import Rounds
from treewy._session import Session
from treewy.testing import EquivalenceError, check_equivalence
from treewy.testing._report import ATTENTION_STORES, GDN_STORES

pytestmark = pytest.mark.usefixtures("nothing_compiled_is_kept")

GRAPHS = 3
"""Of a number of nodes: the forward, what it accepts, and the commit."""


@pytest.fixture
def model(graphs_run_as_they_are: None) -> PreTrainedModel:
    return compiled_short()


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
