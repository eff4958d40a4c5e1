"""Compiled rounds on a CUDA device: captured as graphs they give the plain text, and the bits of what was captured."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import LogitsProcessorList

import treewy
from compiled_calls import cuda_calls
from knowing_drafter import KnowingDrafter
from models import FAMILIES, VOCAB_SIZE, fresh_model, left_padded
from treewy import _compiled_forward
from treewy._compiled_session import CompiledSession, CompiledTarget
from treewy._greedy import GreedyChoice
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


def test_a_greedy_round_is_one_launch() -> None:
    """Of a graph; what is copied into its place before it is counted beside it."""
    model = fresh_model("qwen3_next").to("cuda", torch.bfloat16)
    session = CompiledSession(CompiledTarget(model, "inductor", "deferred"))
    prompt = torch.randint(0, VOCAB_SIZE, (1, 9)).cuda()
    session.prefill(prompt, torch.ones_like(prompt))
    tokens, parents = torch.randint(0, VOCAB_SIZE, (1, 5)).cuda(), torch.tensor([[-1, 0, 0, 1, 1]]).cuda()
    forward, nodes = session.prepare(tokens, parents)
    limits = torch.tensor([50]).cuda(), torch.tensor([], dtype=torch.int64).cuda()
    choice = GreedyChoice(Scores(LogitsProcessorList(), 1))
    for _ in range(3):
        forward.round(*nodes, *limits, choice)
    calls = cuda_calls(lambda: forward.round(*nodes, *limits, choice))
    assert calls["cudaGraphLaunch"] == 1
    assert calls.get("cudaLaunchKernel", 0) == 0


def test_a_check_of_captured_rounds_passes() -> None:
    model = treewy.compile(fresh_model("qwen3_5").cuda(), backend="inductor")
    assert check_equivalence(model, max_new_tokens=8).passed
