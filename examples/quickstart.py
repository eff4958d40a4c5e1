"""Complete held-out Python with plain generation, a draft chain and a draft tree, and compare them.

Run ``python examples/quickstart.py``; the exit code is 1 if any token differs from plain generation.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.filesize import decimal
from rich.progress import Progress
from rich.syntax import Syntax
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

import treewy

MODELS = Path(__file__).parent / "tiny_gdn"
NUM_SNIPPETS = 12
NEW_TOKENS = 64
TREES = {"plain": None, "chain": (1, 1, 1, 1), "tree": (3, 2, 1, 1)}


@dataclass
class Result:
    """What one way of generating did, over all snippets."""

    forwards: int = 0
    tokens_per_forward: float = 0.0
    mean_accepted: float = 1.0
    seconds: float = 0.0
    state_bytes: int = 0
    snapshot_bytes: int = 0


def load(name: str, device: str) -> PreTrainedModel:
    """Load one of the two models in fp32, in which equal means equal."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32)
    return model.to(device).eval()


def complete(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: list[dict[str, torch.Tensor]],
    tree: tuple[int, ...] | None,
    advance: Callable[[], None],
) -> tuple[Result, list[list[int]]]:
    """Complete every prompt; return what it took and the new tokens."""
    result, completions = Result(), []
    rounds = accepted = 0.0
    counter = model.register_forward_pre_hook(lambda *_: setattr(result, "forwards", result.forwards + 1))
    speculation = {} if tree is None else {"assistant_model": draft, "draft_tree": tree}
    for prompt in prompts:
        start = time.perf_counter()
        output = model.generate(
            **prompt, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True, **speculation
        )
        result.seconds += time.perf_counter() - start
        completions.append(output.sequences[0, prompt["input_ids"].shape[1] :].tolist())
        if tree is not None:
            stats = output.speculation
            rounds += stats.rounds
            accepted += stats.mean_accepted_length * stats.rounds
            result.state_bytes = max(result.state_bytes, stats.state_bytes)
            result.snapshot_bytes = max(result.snapshot_bytes, stats.snapshot_bytes)
        advance()
    counter.remove()
    result.tokens_per_forward = sum(map(len, completions)) / result.forwards
    if rounds:
        result.mean_accepted = accepted / rounds
    return result, completions


def report(console: Console, results: dict[str, Result], equal: bool) -> None:
    """Print the table and the verdict."""
    table = Table(
        title=f"{NUM_SNIPPETS} held-out snippets, {NEW_TOKENS} new tokens each, fp32",
        box=SIMPLE,
        padding=0,
        collapse_padding=True,
    )
    for column in ("", "forwards", "tokens", "accepted", "seconds", "kept", "snapshots"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, result in results.items():
        tree = TREES[name]
        table.add_row(
            name if tree is None else f"{name} {'-'.join(map(str, tree))}",
            str(result.forwards),
            f"{result.tokens_per_forward:.2f}",
            f"{result.mean_accepted:.2f}",
            f"{result.seconds:.1f}",
            decimal(result.state_bytes),
            decimal(result.snapshot_bytes),
        )
    console.print(table)
    console.print(
        "forwards of the target · tokens a forward · accepted: mean accepted length, the target's own token included\n"
        "kept for one verification, over all GDN layers · snapshots: what a state and a window a node would take\n",
        soft_wrap=True,
    )
    console.print("[green]tokens equal plain generation[/]" if equal else "[red]tokens DIFFER from plain generation[/]")


def main() -> int:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--device", default="cpu", help="torch device to run on (default: %(default)s)")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if args.device == "cpu":
        torch.set_num_threads(
            1
        )  # the models are too small to gain from more, and would wait for them on a busy machine

    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    model, draft = treewy.compile(load("target", args.device)), load("draft", args.device)
    snippets = map(json.loads, (MODELS / "held_out.jsonl").read_text().splitlines())
    honest = [s["prompt"] for s in snippets if not s["loops"]][:NUM_SNIPPETS]  # a loop flatters every drafter
    prompts = [dict(tokenizer(prompt, return_tensors="pt").to(args.device).items()) for prompt in honest]

    results, completions = {}, {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for name, tree in TREES.items():
            task = progress.add_task(name, total=len(prompts))
            results[name], completions[name] = complete(
                model, draft, prompts, tree, lambda task=task: progress.advance(task)
            )
    equal = all(tokens == completions["plain"] for tokens in completions.values())

    if args.json:
        print(json.dumps({"tokens_equal": equal} | {name: asdict(result) for name, result in results.items()}))
    else:
        console = Console()
        for title, tokens in (
            ("the end of snippet 1", prompts[0]["input_ids"][0][-48:]),
            ("its completion", completions["tree"][0]),
        ):
            console.rule(title)
            console.print(Syntax(tokenizer.decode(tokens).strip("\n"), "python", background_color="default"))
        console.print()
        report(console, results, equal)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
