"""Rounds of compiled forwards: the same texts and, after every round, the same stores as token by token.

`aot_eager` has the same graphs and passes as `inductor`, which takes minutes on a CPU and runs once here; on a GPU see
`test_compiled_rounds_gpu.py`.
"""

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

import treewy
from knowing_drafter import KnowingDrafter
from models import FAMILIES, fresh_model, greedy, left_padded, plain_model, random_tokens
from scripted_stores import MIXED, StoresFollow, play_script
from test_generate_equality import speculative
from treewy._compiled_session import RING_ROWS, CompiledSession, CompiledTarget
from treewy._rounds import Rounds
from treewy._session import Session
from treewy.testing import check_equivalence

COMPILED_FAMILIES = [family for family in FAMILIES if family != "lara_mini"]  # which has sliding windows

GRAPHS = 3
"""Of a number of nodes: the forward, what it accepts, and the commit."""


@pytest.fixture(autouse=True)
def _nothing_compiled_is_kept() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


class CompiledStoresFollow(StoresFollow):
    """Looks at the stores of a compiled session, folded into its cache, and lets it go on from its own."""

    def __call__(self, rounds: Rounds) -> None:
        rounds.session.plain_cache()
        super().__call__(rounds)


@pytest.mark.parametrize(
    ("family", "commit"),
    [(family, "deferred") for family in COMPILED_FAMILIES] + [("qwen3_next", "fused"), ("olmo_hybrid", "fused")],
)
def test_stores_equal_a_token_by_token_run_after_every_round(family: str, commit: str) -> None:
    """Of rows that accept everything, nothing and parts in the same round, and of rows that have ended."""
    model = fresh_model(family)
    after_round = CompiledStoresFollow(plain_model(family), MIXED.lengths, num_pads=2)
    session = CompiledSession(CompiledTarget(model, "aot_eager", commit))
    play_script(model, MIXED, after_round, num_pads=2, max_new_tokens=40, session=session)
    assert graphs() <= 2 * GRAPHS  # with and without drafts


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


def test_nothing_is_compiled_again_when_keys_and_values_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treewy._static_stores._COLUMNS", 64)
    model = fresh_model("qwen3_next")
    prompt, mask = left_padded([5, 3], seed=1)
    plain = greedy(model, prompt, mask, 90)
    treewy.compile(model, backend="aot_eager")
    output = speculative(model, prompt, mask, max_new_tokens=90, prompt_lookup_num_tokens=3)
    assert output.sequences.tolist() == plain.tolist()
    assert graphs() <= 2 * GRAPHS


def test_what_a_round_returns_is_the_same_with_a_decoding_on_the_host() -> None:
    """A processor that changes nothing keeps the choice from the device."""
    model = fresh_model("qwen3_next")
    treewy.compile(model, backend="aot_eager")
    prompt, mask = left_padded([6, 4], seed=2)
    drafting = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 20}
    on_device = speculative(model, prompt, mask, **drafting)
    on_host = speculative(model, prompt, mask, repetition_penalty=1.0 + 1e-9, **drafting)
    assert on_host.sequences.tolist() == on_device.sequences.tolist()
    assert on_host.speculation == on_device.speculation


def test_inductor_gives_the_same_tokens() -> None:
    model = fresh_model("qwen3_next")
    prompt, mask = left_padded([6, 4], seed=2)
    plain = greedy(model, prompt, mask, 24)
    texts = [row[pads:].tolist() for row, pads in zip(plain, (mask == 0).sum(dim=1), strict=True)]
    treewy.compile(model, backend="inductor")
    output = speculative(model, prompt, mask, max_new_tokens=19, drafter=KnowingDrafter(texts, (2, 0, 1), depth=2))
    assert output.sequences.tolist() == plain[:, :-5].tolist()
    assert output.speculation.mean_accepted_length > 1.8


def test_sliding_windows_are_refused_by_name() -> None:
    if "lara_mini" not in FAMILIES:
        pytest.skip("LARA came to transformers behind the oldest version that is supported")
    model = fresh_model("lara_mini")
    with pytest.raises(ValueError, match=r"layer \d .* sliding window.*backend='eager'"):
        treewy.compile(model, backend="aot_eager")
    treewy.compile(model)
    assert speculative(model, *left_padded([5], seed=1), max_new_tokens=5, prompt_lookup_num_tokens=2) is not None


@pytest.mark.parametrize("commit", ["immediate", "snapshots"])
def test_policies_that_are_not_compiled_are_refused_by_name(commit: str) -> None:
    with pytest.raises(ValueError, match=rf"'{commit}' is not available with backend 'inductor'.*deferred, fused"):
        treewy.compile(plain_model("qwen3_next"), backend="inductor", commit=commit)


def test_pads_behind_the_first_token_are_refused_and_the_model_stays_usable() -> None:
    model = fresh_model("qwen3_next")
    treewy.compile(model, backend="aot_eager")
    prompt = random_tokens(1, 6, seed=1)
    mask = torch.tensor([[1, 1, 0, 1, 1, 1]])
    with pytest.raises(ValueError, match="zeros behind the first token"):
        speculative(model, prompt, mask, max_new_tokens=5, prompt_lookup_num_tokens=2)
    whole = torch.ones_like(mask)
    output = speculative(model, prompt, whole, max_new_tokens=5, prompt_lookup_num_tokens=2)
    assert output.sequences.tolist() == greedy(plain_model("qwen3_next"), prompt, whole, 5).tolist()


def test_what_cannot_be_watched_is_not_checked() -> None:
    model = treewy.compile(fresh_model("qwen3_next"), backend="aot_eager")
    with pytest.raises(ValueError, match=r"backend='aot_eager', whose rounds cannot be watched.*backend='eager'"):
        check_equivalence(model)
