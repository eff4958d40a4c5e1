"""Evaluate the pair: held-out loss, and mean accepted length on greedy continuations of held-out prompts.

    python examples/tiny_gdn/evaluate.py                # the shipped prompts, on CPU

Weights are the saved bf16 ones, computed with in fp32.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from acceptance import Replay, loops, replay
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

CHAIN = (1, 1, 1, 1)
TREE = (3, 2, 1, 1)
OTHER_SHAPES = ((1, 1, 1), (3, 3, 3))
NEW_TOKENS = 96


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, windows: torch.Tensor, *, batch: int = 64) -> float:
    """Return the mean next-token loss in nats over windows of text.

    Args:
        model: the model.
        windows: ``[N, T + 1]`` integer ids on the model's device.
        batch: windows at a time.
    """
    total = 0.0
    for i in range(0, len(windows), batch):
        group = windows[i : i + batch].long()
        logits = model(group[:, :-1], use_cache=False).logits.float()
        total += F.cross_entropy(logits.flatten(0, 1), group[:, 1:].flatten(), reduction="sum").item()
    return total / windows[:, 1:].numel()


@torch.no_grad()
def continuations(
    model: PreTrainedModel, prompts: Sequence[list[int]], *, new_tokens: int = NEW_TOKENS, batch: int = 64
) -> list[list[int]]:
    """Continue prompts greedily with plain ``generate``.

    Args:
        model: the target.
        prompts: token ids a prompt.
        new_tokens: most tokens a continuation; it ends early at the end-of-text token, which is kept.
        batch: prompts at a time, padded on the left.

    Returns:
        The new tokens of each prompt.
    """
    pad, eos = model.config.pad_token_id, model.config.eos_token_id
    found: list[list[int]] = []
    for i in range(0, len(prompts), batch):
        group = prompts[i : i + batch]
        width = max(map(len, group))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in group], device=model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in group], device=model.device)
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
        found.extend(row[: row.index(eos) + 1] if eos in row else row for row in out[:, width:].tolist())
    return found


@torch.no_grad()
def ranks(
    draft: PreTrainedModel, prompts: Sequence[list[int]], continued: Sequence[list[int]], *, batch: int = 64
) -> list[list[int]]:
    """Rank each token of a continuation under the teacher-forced draft.

    Args:
        draft: the draft model.
        prompts: token ids a prompt.
        continued: the target's continuations.
        batch: sequences at a time, padded on the right (a causal model does not see that).

    Returns:
        For each token the number of tokens that the draft rates higher.
    """
    found: list[list[int]] = []
    for i in range(0, len(prompts), batch):
        pairs = list(zip(prompts[i : i + batch], continued[i : i + batch], strict=True))
        width = max(len(p) + len(c) for p, c in pairs)
        ids = torch.tensor([p + c + [draft.config.pad_token_id] * (width - len(p) - len(c)) for p, c in pairs])
        ids = ids.to(draft.device)
        logits = draft(ids[:, :-1], use_cache=False).logits.float()
        better = (logits > logits.gather(-1, ids[:, 1:, None])).sum(-1).tolist()
        found += [row[len(p) - 1 : len(p) - 1 + len(c)] for row, (p, c) in zip(better, pairs, strict=True)]
    return found


def accepted_length(
    target: PreTrainedModel, draft: PreTrainedModel, prompts: Sequence[list[int]], *, batch: int = 64
) -> dict[str, Any]:
    """Measure mean accepted length (tokens a round, the bonus one included), with and without looping continuations.

    Args:
        target: the target.
        draft: the draft.
        prompts: token ids a prompt.
        batch: prompts at a time.

    Returns:
        A JSON-serialisable summary by draft shape, and one entry a prompt.
    """
    continued = continuations(target, prompts, batch=batch)
    ranked = ranks(draft, prompts, continued, batch=batch)
    looping = [loops(c) for c in continued]
    shapes: dict[str, Any] = {}
    for widths in (CHAIN, TREE, *OTHER_SHAPES):
        replays = [replay(r, widths) for r in ranked]
        calm = [r for r, loop in zip(replays, looping, strict=True) if not loop]
        without = sum(calm, Replay(0, 0))
        shapes[str(widths)] = {
            "mean_accepted": number(without.mean_accepted),
            "standard_error": number(standard_error(calm)),
            "rounds": without.rounds,
            "tokens": without.tokens,
            "mean_accepted_with_loops": number(sum(replays, Replay(0, 0)).mean_accepted),
        }
    flat = [r for row, loop in zip(ranked, looping, strict=True) if not loop for r in row[1:]]
    return {
        "prompts": len(prompts),
        "looping": sum(looping),
        "new_tokens": NEW_TOKENS,
        "top1_agreement": round(sum(r == 0 for r in flat) / max(1, len(flat)), 4),
        "top3_agreement": round(sum(r < 3 for r in flat) / max(1, len(flat)), 4),
        "shapes": shapes,
        "each": [
            {"tokens": len(c), "loops": loop, "chain": replay(r, CHAIN).rounds, "tree": replay(r, TREE).rounds}
            for c, r, loop in zip(continued, ranked, looping, strict=True)
        ],
    }


def number(value: float) -> float | None:
    """Round to four digits; None, which JSON can hold, for NaN."""
    return None if math.isnan(value) else round(value, 4)


def standard_error(replays: Sequence[Replay]) -> float:
    """Return the standard error of tokens a round, the continuations being the sample (ratio estimator)."""
    total = sum(replays, Replay(0, 0))
    if len(replays) < 2:
        return float("nan")
    residuals = [(r.tokens - total.mean_accepted * r.rounds) ** 2 for r in replays]
    return math.sqrt(len(replays) / (len(replays) - 1) * sum(residuals)) / total.rounds


def load(directory: Path, device: torch.device) -> PreTrainedModel:
    """Load a saved model in fp32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.to(device).eval()


def report(result: dict[str, Any]) -> list[str]:
    """Format a summary of :func:`accepted_length` as lines."""
    lines = [f"{result['prompts']} prompts, {result['looping']} of them continued by a loop"]
    for widths, found in result["shapes"].items():
        lines.append(
            f"{widths:>14}: {found['mean_accepted']} +- {found['standard_error']} tokens a round without loops, "
            f"{found['mean_accepted_with_loops']} with"
        )
    return lines


def main() -> None:
    """Evaluate the saved pair on the shipped prompts."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=here, help="directory with target/, draft/ and held_out.jsonl")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    device = torch.device(args.device)
    target, draft = load(args.models / "target", device), load(args.models / "draft", device)
    tokenizer = AutoTokenizer.from_pretrained(args.models / "target")
    snippets = [json.loads(line) for line in (args.models / "held_out.jsonl").read_text().splitlines()]
    result = accepted_length(target, draft, [tokenizer(s["prompt"]).input_ids for s in snippets])
    print(json.dumps(result) if args.json else "\n".join(report(result)))


if __name__ == "__main__":
    main()
