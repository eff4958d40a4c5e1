"""Train the tiny Gated DeltaNet pair: corpus, tokenizer, target, draft, evaluation, from one command.

    python examples/tiny_gdn/train.py                          # one H200, under 10 minutes
    python examples/tiny_gdn/train.py --smoke --out my_pair  # a few steps, to see that it runs

The corpus is the permissively licensed Python source installed beside this interpreter, so it differs between
environments; ``manifest.json`` records it. Seeds are fixed, step counts too; GPU arithmetic still varies in its last
digits.
"""

import argparse
import json
import math
import os
import platform
import random
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import bpe
import corpus
import evaluate
import manifest
import pair
import snippets
import split
import tokenizers
import torch
import training
import transformers

SEED = 0
CAP_BYTES = 20_000_000
HELD_OUT_PACKAGES = 6
EVALUATED_SNIPPETS = 512
SHIPPED_CALM = 48
SHIPPED_LOOPING = 16
HELD_OUT_WINDOWS = 2000

TARGET = training.Recipe(steps=1700, batch=128, learning_rate=3e-3)
DRAFT = training.Recipe(steps=400, batch=128, learning_rate=4e-3, final_fraction=0.5)
DISTIL = training.Recipe(steps=1100, batch=128, learning_rate=2e-3, warmup=20)


class Log:
    """Lines with elapsed seconds, on stdout and in ``training_log.txt``; numbers in ``training_log.json``."""

    def __init__(self, out: Path) -> None:
        """Start the clock."""
        self.start = time.perf_counter()
        self.numbers: dict[str, Any] = {}
        self._out = out
        self._lines: list[str] = []

    def say(self, line: str) -> None:
        """Print and keep a line."""
        self._lines.append(f"[{time.perf_counter() - self.start:6.1f} s] {line}")
        print(self._lines[-1], flush=True)

    def record(self, name: str, value: Any) -> None:
        """Keep a JSON-serialisable value with the time, and write both files."""
        self.numbers[name] = value
        self.numbers.setdefault("elapsed_seconds", {})[name] = round(time.perf_counter() - self.start, 1)
        (self._out / "training_log.json").write_text(json.dumps(self.numbers, indent=1) + "\n")
        (self._out / "training_log.txt").write_text("\n".join(self._lines) + "\n")


def environment(device: torch.device) -> dict[str, str]:
    """Describe what ran."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "processors": str(os.cpu_count()),
    }


def prepare(
    log: Log, out: Path, max_files: int | None
) -> tuple[tokenizers.Tokenizer, list[snippets.Snippet], Any, Any]:
    """Build corpus, split, tokenizer and snippets.

    Args:
        log: where numbers go.
        out: output directory.
        max_files: most files to read, for a smoke run.

    Returns:
        Tokenizer, snippets for evaluation, training tokens and held-out tokens (int16 arrays).
    """
    collected = corpus.build(cap_bytes=CAP_BYTES, seed=SEED, workers=os.cpu_count() or 1, max_files=max_files)
    division = split.split(collected, count=HELD_OUT_PACKAGES, seed=SEED)
    summary = manifest.write(collected, division, out)
    log.say(f"scanned {summary['scanned']}, train {summary['train']}, held out {summary['held_out']}")
    log.say(f"held-out packages: {', '.join(division.held_out_packages)}")
    log.record("corpus", {k: v for k, v in summary.items() if k != "packages"})

    texts = [f.text for f in division.train]
    random.Random(SEED).shuffle(texts)
    tokenizer = bpe.train(texts, seed=SEED)
    log.say(f"trained a tokenizer of {tokenizer.get_vocab_size()} tokens")
    train_ids = bpe.encode(tokenizer, texts)
    held_out_ids = bpe.encode(tokenizer, [f.text for f in division.held_out])
    train_bytes = sum(f.num_bytes for f in division.train)
    log.say(f"{len(train_ids):,} training tokens, {len(held_out_ids):,} held-out tokens")
    log.record(
        "tokens",
        {
            "train": len(train_ids),
            "held_out": len(held_out_ids),
            "bytes_per_token": round(train_bytes / len(train_ids), 4),
            "held_out_bytes_per_token": round(sum(f.num_bytes for f in division.held_out) / len(held_out_ids), 4),
        },
    )
    drawn = snippets.draw(division.held_out, collected, tokenizer, count=EVALUATED_SNIPPETS, seed=SEED)
    log.say(f"drew {len(drawn)} held-out prompts")
    return tokenizer, drawn, train_ids, held_out_ids


def assess(
    log: Log, out: Path, drawn: list[snippets.Snippet], prompts: list[list[int]], held_out: torch.Tensor
) -> None:
    """Evaluate the saved pair; write ``evaluation.json`` and ``held_out.jsonl``.

    Args:
        log: where numbers go.
        out: directory with the saved pair.
        drawn: held-out snippets.
        prompts: their token ids.
        held_out: ``[T]`` held-out stream on the device.
    """
    target, draft = (evaluate.load(out / name, held_out.device) for name in ("target", "draft"))
    # The stream goes package by package, so one slice of it would favour few: take evenly spaced windows.
    starts = torch.arange(0, len(held_out) - TARGET.context, TARGET.context)
    picked = starts[torch.linspace(0, len(starts) - 1, min(len(starts), HELD_OUT_WINDOWS)).long()]
    windows = held_out[picked[:, None].to(held_out.device) + torch.arange(TARGET.context + 1, device=held_out.device)]
    bits = 1 / (math.log(2) * log.numbers["tokens"]["held_out_bytes_per_token"])
    losses = {name: evaluate.held_out_loss(m, windows) for name, m in (("target", target), ("draft", draft))}
    entries = {k: {"nats_per_token": round(v, 4), "bits_per_byte": round(v * bits, 4)} for k, v in losses.items()}
    log.record("held_out_loss", entries)
    log.say(f"held-out loss: {log.numbers['held_out_loss']}")
    every = evaluate.accepted_length(target, draft, prompts, batch=256)
    loops = [each["loops"] for each in every["each"]]
    chosen = snippets.choose(drawn, loops, calm=SHIPPED_CALM, looping=SHIPPED_LOOPING)
    (out / "held_out.jsonl").write_text(snippets.dump(drawn, loops, chosen))
    shipped = evaluate.accepted_length(target, draft, [prompts[i] for i in chosen])
    results = {"all_prompts": every, "shipped_prompts": shipped}
    for name, result in results.items():
        log.say(f"{name}:")
        for line in evaluate.report(result):
            log.say("  " + line)
    (out / "evaluation.json").write_text(json.dumps(results) + "\n")
    log.record("acceptance", {n: {k: v for k, v in r.items() if k != "each"} for n, r in results.items()})


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where the results go")
    parser.add_argument("--steps", type=int, nargs=3, metavar=("TARGET", "DRAFT", "DISTIL"), help="other step counts")
    parser.add_argument("--batch", type=int, help="another batch size")
    parser.add_argument("--smoke", action="store_true", help="a small corpus, few steps, a small batch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    steps = args.steps or ((6, 4, 4) if args.smoke else (TARGET.steps, DRAFT.steps, DISTIL.steps))
    batch = args.batch or (4 if args.smoke else TARGET.batch)
    recipes = [
        replace(r, steps=n, batch=batch, **({"context": 64, "log_every": 2} if args.smoke else {}))
        for r, n in zip((TARGET, DRAFT, DISTIL), steps, strict=True)
    ]
    device = torch.device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    transformers.utils.logging.disable_progress_bar()

    log = Log(args.out)
    tokenizer, drawn, train_ids, held_out_ids = prepare(log, args.out, 3000 if args.smoke else None)
    log.record("environment", environment(device))
    log.record("recipes", {n: asdict(r) for n, r in zip(("target", "draft", "distil"), recipes, strict=True)})
    tokens = torch.from_numpy(train_ids).to(device)
    held_out = torch.from_numpy(held_out_ids).to(device)

    target = pair.create(pair.target_config(), SEED, device)
    log.say(f"target: {pair.count_parameters(target):,} parameters")
    log.record("target", training.fit(target, tokens, recipes[0], training.next_token_loss, seed=SEED, say=log.say))
    pair.save(target, tokenizer, args.out / "target")

    draft = pair.create(pair.draft_config(), SEED + 1, device)
    log.say(f"draft: {pair.count_parameters(draft):,} parameters")
    log.record("parameters", {"target": pair.count_parameters(target), "draft": pair.count_parameters(draft)})
    log.record("draft", training.fit(draft, tokens, recipes[1], training.next_token_loss, seed=SEED + 1, say=log.say))
    pair.save(draft, tokenizer, args.out / "draft")
    distil = training.distillation_loss(target.eval())
    log.record("distil", training.fit(draft, tokens, recipes[2], distil, seed=SEED + 2, say=log.say))
    pair.save(draft, tokenizer, args.out / "draft")

    torch.backends.cuda.matmul.allow_tf32 = False
    if args.smoke:
        drawn, held_out = drawn[:4], held_out[:4000]
    assess(log, args.out, drawn, [tokenizer.encode(s.prompt).ids for s in drawn], held_out)
    saved = sum(f.stat().st_size for name in ("target", "draft") for f in (args.out / name).iterdir())
    log.say(f"saved pair: {saved / 1e6:.2f} MB; done")
    log.record("saved_bytes", saved)


if __name__ == "__main__":
    main()
