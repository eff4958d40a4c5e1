"""Compiled rounds on a CUDA device: captured as graphs they give the plain text, and the bits of what was captured."""

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

import treewy
from compiled_calls import cuda_calls
from distributions import p_value
from knowing_drafter import KnowingDrafter
from models import (
    FAMILIES,
    VOCAB_SIZE,
    draft_with_embeddings_of,
    fresh_model,
    left_padded,
    noisy_copy,
    plain_model,
)
from small_vocabulary import PROMPT, drawn_texts, eight_tokens, expected_texts
from tolerances import CHI_SQUARE_P_VALUE
from treewy import AssistantDrafter, DraftTree, _compiled_forward
from treewy._compiled_session import CompiledSession, CompiledTarget
from treewy._draft_tree import Sampling
from treewy._greedy import GreedyChoice
from treewy._sampling import SampledChoice
from treewy._scores import Scores
from treewy.testing import check_equivalence

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_compiled_is_kept")]

SCHEDULE = (3, 0, 1, 3, 2)


def plain_texts(model: Any, prompt: Tensor, mask: Tensor, num_tokens: int) -> tuple[Tensor, list[list[int]]]:
    """The output of plain generation, and its texts without pads."""
    plain = model.generate(prompt, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    pads = (mask == 0).sum(dim=1)
    return plain, [row[first:].tolist() for row, first in zip(plain, pads, strict=True)]


@pytest.mark.parametrize("commit", ["deferred", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_rounds_give_the_plain_text(family: str, commit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that accept everything, nothing and parts, also where keys and values grow; nothing is compiled again."""
    monkeypatch.setattr("treewy._static_stores._COLUMNS", 64)
    model = fresh_model(family).cuda()
    prompt, mask = (x.cuda() for x in left_padded([9, 4, 6], seed=2))
    plain, texts = plain_texts(model, prompt, mask, 130)
    treewy.compile(model, backend="inductor", commit=commit)
    options = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    compiled_once = None
    for num_tokens in (60, 120):
        drafter = KnowingDrafter(texts, SCHEDULE, depth=3)
        output = model.generate(prompt, max_new_tokens=num_tokens, drafter=drafter, **options)
        assert torch.equal(output.sequences, plain[:, : prompt.shape[1] + num_tokens])
        assert output.speculation.mean_accepted_length > 2
        compiled_once = counters["stats"]["unique_graphs"] if compiled_once is None else compiled_once
        assert counters["stats"]["unique_graphs"] == compiled_once
    assert any(size.captured for size in treewy.explain(model).compiled)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_captured_has_the_bits_of_what_is_not(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over random trees and acceptances, in logits and in what is committed in the end."""
    model = fresh_model("qwen3_5").to("cuda", dtype)
    prompt, mask = (x.cuda() for x in left_padded([9, 4], seed=2))

    def play() -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        session = CompiledSession(CompiledTarget(model, "inductor", "deferred"))
        seen = [session.prefill(prompt, mask)]
        for _ in range(20):
            size = int(torch.randint(2, 15, (), generator=generator))
            parents = torch.stack([torch.arange(-1, size - 1), torch.arange(size) // 2 - 1])
            tokens = torch.randint(0, VOCAB_SIZE, (2, size), generator=generator)
            seen.append(session.extend(tokens.cuda(), parents.cuda()).clone())
            session.commit(torch.randint(-1, size, (2,), generator=generator).cuda())
        session.stores.unload(session.cache)
        return [*seen, *(x for layer in session.cache.state_layers for x in (layer.state, layer.window))]

    captured = play()
    torch._dynamo.reset()
    monkeypatch.setattr(_compiled_forward, "Captured", lambda function, *_: function)
    for ours, plain in zip(captured, play(), strict=True):
        assert torch.equal(ours, plain)


WARPERS = LogitsProcessorList(
    [
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(20),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.01),
        TypicalLogitsWarper(0.95),
        EpsilonLogitsWarper(1e-4),
        EtaLogitsWarper(1e-4),
        SuppressTokensLogitsProcessor([3, 5]),
        InfNanRemoveLogitsProcessor(),
        LogitNormalization(),
    ]
)


def drafted(sampling: Sampling | None) -> DraftTree:
    """A tree of four nodes under a root, in one row; drawn from two distributions, or from none."""
    probs = torch.rand(1, 2, VOCAB_SIZE).softmax(dim=-1).cuda()
    tokens = torch.tensor([[7, 8, 9, 10]]).cuda()
    drawn = {} if sampling in (None, "top") else {"draft_probs": probs, "sampling": sampling}
    return DraftTree(tokens, torch.tensor([-1, -1, 0, 0]).cuda(), **drawn)


@pytest.mark.parametrize("processors", ["none", "all that can be captured"])
@pytest.mark.parametrize("sampling", [None, "top", "with_replacement", "without_replacement"])
def test_a_round_is_one_launch(sampling: Sampling | None, processors: str) -> None:
    """Of a graph, greedy or sampled; what is copied or drawn into its place before it is counted beside it."""
    model = fresh_model("qwen3_next").to("cuda", torch.bfloat16)
    session = CompiledSession(CompiledTarget(model, "inductor", "deferred"))
    prompt = torch.randint(0, VOCAB_SIZE, (1, 9)).cuda()
    session.prefill(prompt, torch.ones_like(prompt))
    draft = drafted(sampling)
    tokens = torch.nn.functional.pad(draft.token_ids, (1, 0))
    parents = torch.nn.functional.pad(draft.parents + 1, (1, 0), value=-1)
    forward, nodes = session.prepare(parents.shape[1]), (tokens, parents)
    limits = torch.tensor([50]).cuda(), torch.tensor([], dtype=torch.int64).cuda()
    scores = Scores(WARPERS if processors != "none" else LogitsProcessorList(), 1)
    choice = GreedyChoice(scores) if sampling is None else SampledChoice(scores, draft, None)
    for _ in range(3):
        forward.round(*nodes, *limits, choice)
    calls = cuda_calls(lambda: forward.round(*nodes, *limits, choice))
    assert calls["cudaGraphLaunch"] == 1
    # padding of tokens and parents, uniform and exponential numbers; copies of dense tensors launch no kernel, those
    # of parts of them do
    assert calls.get("cudaLaunchKernel", 0) <= (2 if sampling is None else 8)


@pytest.mark.parametrize("sampling", ["top", "with_replacement", "without_replacement"])
def test_captured_rounds_draw_from_the_distribution_of_plain_sampling(sampling: Sampling) -> None:
    """And a generator gives the same texts again, be it on the GPU or not."""

    def drafting() -> dict[str, Any]:
        return {"drafter": AssistantDrafter(other, (3, 2), sampling=sampling)}

    other = copy.deepcopy(eight_tokens(1)).cuda()
    model = treewy.compile(copy.deepcopy(eight_tokens(0)).cuda(), backend="inductor")
    texts, accepted = drawn_texts(drafting, model=model)
    assert p_value(texts, expected_texts()) > CHI_SQUARE_P_VALUE
    assert accepted > 0.1
    options = {
        "max_new_tokens": 30,
        "do_sample": True,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(PROMPT).cuda(),
    }
    for device in ("cpu", "cuda"):
        again = [
            model.generate(PROMPT.cuda(), **options, **drafting(), generator=torch.Generator(device).manual_seed(seed))
            for seed in (1, 1, 2)
        ]
        assert again[0].tolist() == again[1].tolist() != again[2].tolist()


@pytest.mark.parametrize("kind", ["gdn", "attention"])
def test_captured_drafts_are_those_of_the_eager_engine(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where keys and values grow. A round is three launches: drafts, the target, and what drafts learn."""
    monkeypatch.setattr("treewy._static_stores._COLUMNS", 64)
    model = fresh_model("qwen3_5").cuda()
    plain_target = plain_model("qwen3_5")
    draft = noisy_copy(plain_target, 0.2) if kind == "gdn" else draft_with_embeddings_of(plain_target)
    draft = copy.deepcopy(draft).cuda()
    prompt, mask = (x.cuda() for x in left_padded([9, 4, 6], seed=2))
    plain, _ = plain_texts(model, prompt, mask, 120)
    options = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    options |= {"assistant_model": draft, "draft_tree": (3, 2, 1)}
    stats = []
    for backend in ("eager", "inductor", "inductor"):
        if backend == "eager" or len(stats) == 1:
            treewy.compile(model, backend=backend)
        output = model.generate(prompt, max_new_tokens=120, **options)
        assert torch.equal(output.sequences, plain)
        stats.append(output.speculation)
    assert stats[1].acceptance_by_depth == stats[2].acceptance_by_depth == stats[0].acceptance_by_depth
    calls = cuda_calls(lambda: model.generate(prompt, max_new_tokens=60, **options))
    rounds = model.generate(prompt, max_new_tokens=60, **options).speculation.rounds
    assert calls["cudaGraphLaunch"] == 3 * rounds


def test_a_commit_is_captured_with_what_its_own_verification_hands_out() -> None:
    """Drawn drafts run level by level, and others in one graph, on the same forward of a draft model."""
    model = fresh_model("qwen3_next").cuda()
    treewy.compile(model, backend="inductor")
    prompt = torch.randint(2, VOCAB_SIZE, (1, 7)).cuda()
    options = {"assistant_model": copy.deepcopy(plain_model("qwen3_next")).cuda(), "draft_tree": (1, 1, 1)}
    options |= {"pad_token_id": 0, "return_dict_in_generate": True}
    for do_sample, number in ((True, 5), (False, 20), (True, 60), (True, 60)):
        output = model.generate(prompt, do_sample=do_sample, max_new_tokens=number, **options)
        assert min(output.speculation.acceptance_by_depth) > 0.99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_graph_needs_nothing_of_one_that_is_gone(dtype: torch.dtype) -> None:
    """Not even the workspace of cuBLAS, once somebody has PyTorch forget those."""
    left, right = (torch.randn(rows, 4096, device="cuda", dtype=dtype) for rows in (16, 4096))
    graphs = [_compiled_forward.Captured(lambda: left @ right, left.device, "a product") for _ in range(2)]
    for graph in graphs:
        for _ in range(2):
            graph()
    del graphs[0], graph
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    taken = [torch.full((2**22,), float("nan"), device="cuda") for _ in range(64)]  # where memory has become free
    product = graphs[0]().clone()
    torch.cuda.synchronize()
    assert torch.equal(product, left @ right)
    assert all(bool(x.isnan().all()) for x in taken)


def test_a_check_of_captured_rounds_passes() -> None:
    model = treewy.compile(fresh_model("qwen3_5").cuda(), backend="inductor")
    assert check_equivalence(model, max_new_tokens=8).passed
