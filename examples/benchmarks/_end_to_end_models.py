"""The models of `end_to_end.py`, what they continue, and how often the pair's drafts are accepted."""

import copy
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from _forced import acceptance_by_depth, make_it_count
from _round_models import random_model
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

TINY_GDN = Path(__file__).parents[1] / "tiny_gdn"
sys.path.insert(0, str(TINY_GDN))  # before this folder, which has an acceptance.py too

from evaluate import continuations, load, ranks  # noqa: E402

NEW_TOKENS, QUICK_NEW_TOKENS = 64, 16
_PROMPT, _QUICK_PROMPT = 64, 7
_ALONE = 4  # prompts of the pair at batch 1, one after the other: one alone says little of acceptance
_MOST_ROWS = 32
_QUICK_NOISE = 0.08  # between a tiny target and its draft, relative to the weights: some drafts are accepted


@dataclass(frozen=True)
class Work:
    """A model and what it continues.

    Args:
        target: The model.
        draft: Returns its draft model.
        prompts: Batches of token ids [B, T], padded on the left.
        masks: 1 for tokens, 0 for pads.
        new_tokens: Most tokens to generate.
    """

    target: PreTrainedModel
    draft: Callable[[], PreTrainedModel]
    prompts: list[Tensor]
    masks: list[Tensor]
    new_tokens: int


def work(kind: str, batch: int, *, quick: bool) -> Work:
    """Return what is to be done.

    Args:
        kind: "pair", the one that is shipped, in float32, where equal means equal; or "large", the model of 4.35
            billion random weights in bfloat16, made to count, whose draft counts too.
        batch: Rows.
        quick: Tiny models with random weights on the CPU instead.
    """
    device = "cpu" if quick else "cuda"
    new_tokens = QUICK_NEW_TOKENS if quick else NEW_TOKENS
    if kind == "pair":
        target, draft, rows = _pair(quick)
        batches = [[row] for row in rows[:_ALONE]] if batch == 1 else [rows[:batch]]
        prompts, masks = zip(*(_padded(rows, device) for rows in batches), strict=True)
        return Work(target, lambda: draft, list(prompts), list(masks), new_tokens)
    target = make_it_count(random_model("dense", device))
    size = batch, _QUICK_PROMPT if quick else _PROMPT
    prompt = torch.randint(0, target.config.vocab_size, size, generator=torch.Generator().manual_seed(0)).to(device)
    return Work(
        target,
        lambda: make_it_count(random_model("draft", device)),
        [prompt],
        [torch.ones_like(prompt)],
        new_tokens,
    )


def forced_rates(trees: Sequence[tuple[int, ...]], *, quick: bool) -> dict[tuple[int, ...], tuple[float, ...]]:
    """Return how often drafts of the pair are accepted, by tree and depth, over all its prompts."""
    target, draft, prompts = _pair(quick)
    new_tokens = QUICK_NEW_TOKENS if quick else NEW_TOKENS
    texts = continuations(target, prompts, new_tokens=new_tokens)
    rated = ranks(draft, prompts, texts)
    return {tree: acceptance_by_depth(rated, tree, new_tokens)[0] for tree in trees}


def _pair(quick: bool) -> tuple[PreTrainedModel, PreTrainedModel, list[list[int]]]:
    """Return target, draft and prompts."""
    if quick:
        generator = torch.Generator().manual_seed(0)
        target = random_model("dense", "cpu")
        draft = copy.deepcopy(target)
        for weight in draft.parameters():
            weight.data += _QUICK_NOISE * weight.std() * torch.randn(weight.shape, generator=generator)
        prompts = torch.randint(0, target.config.vocab_size, (_MOST_ROWS, _QUICK_PROMPT), generator=generator)
        return target, draft, prompts.tolist()
    target, draft = (load(TINY_GDN / name, torch.device("cuda")) for name in ("target", "draft"))
    tokenizer = AutoTokenizer.from_pretrained(TINY_GDN / "target")
    snippets = map(json.loads, (TINY_GDN / "held_out.jsonl").read_text().splitlines())
    calm = [snippet["prompt"] for snippet in snippets if not snippet["loops"]]  # a loop flatters every drafter
    return target, draft, [tokenizer(prompt).input_ids for prompt in calm[:_MOST_ROWS]]


def _padded(rows: list[list[int]], device: str) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    tokens = [[0] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)
