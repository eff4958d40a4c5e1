"""Draft models behind a compiled backend: what they propose, and that a tree may grow level by level.

Models have two layers but where a tree grows, and graphs run as they are but for one case of each of these two.
"""

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, LogitsProcessorList, PreTrainedModel

import treewy
from compiled_calls import graphs
from models import (
    draft_with_embeddings_of,
    fresh_model,
    greedy,
    left_padded,
    noisy_copy,
    plain_model,
)
from test_generate_equality import speculative
from tolerances import LOGITS_FLOAT32, relative_error
from treewy._compiled_drafts import CompiledDrafts
from treewy._compiled_session import CompiledSession, CompiledTarget
from treewy._drafters import DraftingContext
from treewy._scores import Scores
from treewy._session import Session
from treewy.ops import depths

pytestmark = pytest.mark.usefixtures("nothing_compiled_is_kept")

SMALL = "qwen3_next short"
PROMPT, MASK = left_padded([7, 4], seed=3)


def committed(session: Session, tokens: Tensor, parents: Tensor, accepted: Tensor) -> Tensor:
    """Verify a tree in two levels, commit a node, and return the logits."""
    known = 3
    first = session.extend(tokens[:, :known], parents[:, :known]).clone()
    logits = torch.cat([first, session.extend(tokens[:, known:], parents[:, known:])], dim=1).clone()
    session.commit(accepted)
    return logits


@pytest.mark.parametrize(
    ("family", "commit"),
    [("qwen3_next", "deferred"), ("qwen3_next", "fused"), ("olmo_hybrid", "deferred"), ("qwen3", "deferred")],
)
def test_a_tree_grows_by_levels_as_in_the_eager_engine(
    family: str, commit: str, request: pytest.FixtureRequest
) -> None:
    """Over more rounds than a ring has room for, with rows that commit nothing, and with rows in another order."""
    if family != "qwen3_next":
        request.getfixturevalue("graphs_run_as_they_are")
    model = fresh_model(family)
    compiled, eager = CompiledSession(CompiledTarget(model, "aot_eager", commit), num_nodes=9), Session(model)
    for session in (compiled, eager):
        session.prefill(PROMPT, MASK)
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 3], [-1, 0, 0, 2, 2, -2, -2]])
    for number in range(8):
        tokens = torch.randint(2, 30, parents.shape, generator=torch.Generator().manual_seed(number))
        accepted = torch.tensor([[6, 4], [3, -1], [-1, 1], [0, 3]][number % 4])
        ours, theirs = (committed(session, tokens, parents, accepted) for session in (compiled, eager))
        real = parents != -2
        assert relative_error(ours[real], theirs[real]) <= LOGITS_FLOAT32
        if number == 5:
            for session in (compiled, eager):
                session.reorder(torch.tensor([1, 0]))
    assert compiled.cache.lengths.tolist() == eager.cache.lengths.tolist()
    assert graphs() == 2  # the forward and the commit: all levels are of one size


@pytest.mark.parametrize(("kind", "tree"), [("gdn", (3, 2, 1)), ("attention", (1, 1, 1))])
def test_compiled_drafts_are_those_of_the_eager_engine(
    kind: str, tree: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    if kind != "gdn":
        request.getfixturevalue("graphs_run_as_they_are")
    model = fresh_model("qwen3_5 short")
    draft = noisy_copy(plain_model("qwen3_5 short"), 0.3) if kind == "gdn" else draft_with_embeddings_of(model)
    plain = greedy(model, PROMPT, MASK, 20).tolist()
    seen = []
    for backend in ("eager", "aot_eager"):
        treewy.compile(model, backend=backend)
        output = speculative(model, PROMPT, MASK, max_new_tokens=20, assistant_model=draft, draft_tree=tree)
        assert output.sequences.tolist() == plain
        seen.append(output.speculation)
    eager, compiled = seen
    assert compiled.acceptance_by_depth == eager.acceptance_by_depth
    assert compiled.rounds == eager.rounds
    before = graphs()
    speculative(model, PROMPT, MASK, max_new_tokens=20, assistant_model=draft, draft_tree=tree)
    assert graphs() == before


@pytest.mark.usefixtures("graphs_run_as_they_are")
@pytest.mark.parametrize("family", ["qwen3_5 short", "olmo_hybrid short"])
def test_a_model_drafts_for_itself(family: str) -> None:
    """And agrees with itself: whatever its stores hold wrong would be a draft that is rejected."""
    model = fresh_model(family)
    treewy.compile(model, backend="aot_eager")
    output = speculative(
        model, PROMPT, MASK, max_new_tokens=17, assistant_model=copy.deepcopy(plain_model(family)), draft_tree=(2, 1, 1)
    )
    assert output.sequences.tolist() == greedy(plain_model(family), PROMPT, MASK, 17).tolist()
    assert output.speculation.mean_accepted_length == 4


@pytest.mark.usefixtures("graphs_run_as_they_are")
def test_stores_of_a_draft_model_are_given_up_with_the_text() -> None:
    """Not once Python looks for cycles, for it does not see how large they are."""
    model, draft = fresh_model(SMALL), fresh_model(SMALL, seed=1)
    treewy.compile(model, backend="aot_eager")
    sessions = []
    opened = CompiledDrafts.open

    def noted(self: CompiledDrafts, *args: Any) -> Session:
        session = opened(self, *args)
        sessions.append(weakref.ref(session))
        return session

    with mock.patch.object(CompiledDrafts, "open", noted):
        speculative(model, PROMPT, MASK, max_new_tokens=5, assistant_model=draft, draft_tree=(1, 1))  # compiles
        gc.collect()
        gc.disable()
        try:
            speculative(model, PROMPT, MASK, max_new_tokens=5, assistant_model=draft, draft_tree=(1, 1))
            assert [session() for session in sessions] == [None, None]
        finally:
            gc.enable()


@pytest.mark.usefixtures("graphs_run_as_they_are")
def test_a_draft_model_that_was_compiled_itself_runs_as_it_was_told() -> None:
    model, draft = fresh_model(SMALL), fresh_model(SMALL, seed=1)
    treewy.compile(draft, backend="eager")
    treewy.compile(model, backend="aot_eager")
    speculative(model, PROMPT, MASK, max_new_tokens=5, assistant_model=draft, draft_tree=(1, 1))
    of_target_alone = graphs()
    treewy.compile(draft, backend="aot_eager")
    speculative(model, PROMPT, MASK, max_new_tokens=5, assistant_model=draft, draft_tree=(1, 1))
    assert graphs() == of_target_alone + 3  # forward, commit, and what drafts learn
    assert [size.rows for size in draft.generate.compiled_sizes()] == [2]


@pytest.mark.usefixtures("graphs_run_as_they_are")
def test_a_draft_model_that_cannot_be_compiled_drafts_in_eager_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = fresh_model(SMALL), fresh_model("qwen3", seed=1)
    forward = type(draft).forward

    def without_more(
        self: PreTrainedModel,
        input_ids=None,
        attention_mask=None,
        position_ids=None,  # type: ignore
        past_key_values=None,
        use_cache=None,
        return_dict=None,
        logits_to_keep=0,
    ):  # type: ignore
        return forward(
            self,
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
        )

    monkeypatch.setattr(type(draft), "forward", without_more)
    treewy.compile(model, backend="aot_eager")
    with pytest.warns(UserWarning, match=r"draft model Qwen3ForCausalLM drafts with backend 'eager': .*keyword"):
        first = speculative(model, PROMPT, MASK, max_new_tokens=9, assistant_model=draft, draft_tree=(1, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        again = speculative(model, PROMPT, MASK, max_new_tokens=9, assistant_model=draft, draft_tree=(1, 1))
    assert first.sequences.tolist() == again.sequences.tolist() == greedy(model, PROMPT, MASK, 9).tolist()


def drafter_of(draft: PreTrainedModel, levels: tuple[int, ...], backend: str, rows: int) -> treewy.AssistantDrafter:
    """A drafter as `generate` would have prepared it."""
    drafter = treewy.AssistantDrafter(draft, levels)
    scores, opened = Scores(LogitsProcessorList(), rows), CompiledDrafts(backend, "deferred").open
    pads = [PROMPT[0, :0]] * rows
    drafter.prepare(DraftingContext(scores, False, None, pads, 10_000, draft.config.vocab_size, opened))
    return drafter


@pytest.mark.usefixtures("graphs_run_as_they_are")
@pytest.mark.parametrize("levels", [(2, 2), (1,)])
def test_drafts_follow_any_text(levels: tuple[int, ...]) -> None:
    """Texts that take all of a draft, a part, none of it, that stand still, or go on for longer than a draft could."""
    draft, rows = plain_model(SMALL), 3
    drafters = [drafter_of(draft, levels, backend, rows) for backend in ("eager", "aot_eager")]
    random = torch.Generator().manual_seed(5)
    texts = [torch.randint(2, 30, (length,), generator=random) for length in (9, 5, 7)]
    order = torch.tensor([2, 0, 1])
    for number in range(14):
        lengths = torch.tensor([len(text) for text in texts])
        tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        ours, theirs = (drafter.propose(tokens, lengths) for drafter in drafters)
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.parents.tolist() == theirs.parents.tolist()
        emitted = []
        for row in range(rows):
            path = drafted_path(theirs, row, int(torch.randint(0, len(levels) + 1, (), generator=random)))
            own = torch.randint(2, 30, (1,), generator=random)
            nothing = number > 8 and row == 1  # this one has ended
            emitted.append(path[:0] if nothing else torch.cat([path, own]))
        if number == 11:
            emitted[0] = torch.randint(2, 30, (len(levels) + 3,), generator=random)
        counts = torch.tensor([len(row) for row in emitted])
        texts = [torch.cat(pair) for pair in zip(texts, emitted, strict=True)]
        for drafter in drafters:
            drafter.update(torch.nn.utils.rnn.pad_sequence(emitted, batch_first=True), counts)
            if number == 4:
                drafter.reorder(order)
        if number == 4:
            texts = [texts[row] for row in order]


class Mixed(treewy.Drafter):
    """Leave every third round to nobody, or do not tell how it ended."""

    def __init__(self, drafter: treewy.AssistantDrafter, left_out: str) -> None:
        self._drafter, self._left_out, self._rounds = drafter, left_out, 0

    def prepare(self, context: DraftingContext) -> None:
        self._drafter.prepare(context)

    def propose(self, input_ids: Tensor, lengths: Tensor) -> treewy.DraftTree:
        self._rounds += 1
        if self._rounds % 3 == 0 and self._left_out == "propose":
            return treewy.DraftTree(input_ids[:, :0], input_ids[:, :0])
        return self._drafter.propose(input_ids, lengths)

    def update(self, token_ids: Tensor, num_tokens: Tensor) -> None:
        if self._rounds % 3 or self._left_out != "update":
            self._drafter.update(token_ids, num_tokens)

    def reset(self) -> None:
        self._drafter.reset()


@pytest.mark.usefixtures("graphs_run_as_they_are")
@pytest.mark.parametrize("left_out", ["propose", "update"])
def test_drafts_may_be_mixed_with_those_of_others(left_out: str) -> None:
    model, same = fresh_model(SMALL), plain_model(SMALL)
    seen = []
    for backend in ("eager", "aot_eager"):
        treewy.compile(model, backend=backend)
        drafter = Mixed(treewy.AssistantDrafter(same, (1, 1, 1)), left_out)
        seen.append(speculative(model, PROMPT, MASK, max_new_tokens=30, drafter=drafter).speculation)
    assert seen[0].acceptance_by_depth == seen[1].acceptance_by_depth
    assert seen[0].rounds == seen[1].rounds


@pytest.mark.usefixtures("graphs_run_as_they_are")
def test_trees_become_shallower_where_a_text_ends_and_drafters_can_be_pickled() -> None:
    model = treewy.compile(fresh_model(SMALL), backend="aot_eager", max_cache_len=16)
    prompt = PROMPT[:1, :6]
    drafter = treewy.AssistantDrafter(plain_model(SMALL), (1,) * 5)
    output = speculative(model, prompt, torch.ones_like(prompt), max_new_tokens=10, drafter=drafter)
    assert output.sequences.shape == (1, 16)
    assert pickle.loads(pickle.dumps(drafter)).__dict__.keys() == vars(drafter).keys()


@pytest.mark.usefixtures("graphs_run_as_they_are")
def test_a_draft_model_that_cannot_be_traced_drafts_in_eager_and_says_so_once() -> None:
    """Here because of its soft cap, which only its attention tells."""
    model = fresh_model(SMALL)
    size = model.config.vocab_size
    config = Gemma2Config(
        vocab_size=size, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, pad_token_id=0,
    )  # fmt: skip
    draft = Gemma2ForCausalLM(config).eval().requires_grad_(False)
    draft.set_attn_implementation("eager")
    treewy.compile(model, backend="aot_eager")
    options = {"assistant_model": draft, "draft_tree": (2, 1), "max_new_tokens": 9}
    with pytest.warns(UserWarning, match=r"draft model Gemma2ForCausalLM drafts with backend 'eager'.*softcap"):
        first = speculative(model, PROMPT, MASK, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        again = speculative(model, PROMPT, MASK, **options)
    assert first.sequences.tolist() == again.sequences.tolist() == greedy(model, PROMPT, MASK, 9).tolist()


def drafted_path(tree: treewy.DraftTree, row: int, depth: int) -> Tensor:
    """The tokens down to the last node of a depth."""
    path: list[int] = []
    node = int((depths(tree.parents)[row] == depth - 1).nonzero()[-1]) if depth else -1
    while node >= 0:
        path.insert(0, int(tree.token_ids[row, node]))
        node = int(tree.parents[row, node])
    return torch.tensor(path, dtype=torch.int64)


@pytest.mark.usefixtures("graphs_run_as_they_are")
def test_a_draft_model_whose_logits_are_nan_is_refused_by_name() -> None:
    model, draft = fresh_model(SMALL), fresh_model(SMALL, seed=1)
    draft.get_output_embeddings().weight.fill_(float("nan"))
    treewy.compile(model, backend="aot_eager")
    with pytest.raises(ValueError, match="draft model Qwen3NextForCausalLM gave logits that are NaN"):
        speculative(model, PROMPT, MASK, max_new_tokens=9, assistant_model=draft, draft_tree=(1, 1))


def test_what_is_compiled_of_draft_models_is_kept_for_the_last_of_them() -> None:
    drafts = CompiledDrafts("aot_eager", "deferred")
    models = [fresh_model("qwen3_next", seed=seed) for seed in range(3)]
    first = drafts.open(models[0], 4)._target  # type: ignore[attr-defined]
    assert drafts.open(models[0], 4)._target is first  # type: ignore[attr-defined]
    for model in models[1:]:
        drafts.open(model, 4)
    assert drafts.open(models[0], 4)._target is not first  # type: ignore[attr-defined]
    assert copy.deepcopy(drafts).open(models[2], 4).model is models[2]
