"""Train the tiny Gated DeltaNet pair: corpus, tokenizer, target, draft, evaluation, from one command.

    python examples/tiny_gdn/train.py                          # one H200, under 10 minutes
    python examples/tiny_gdn/train.py --smoke --out /tmp/tiny  # a few steps, to see that it runs

The corpus is the permissively licensed Python source installed beside this interpreter, so it differs between environments;
``manifest.json`` records it. Seeds are fixed, step counts too; GPU arithmetic still varies in its last digits.
"""

import argparse
import json
import os
import platform
import random
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import bpe
import corpus
import evaluate
import manifest
import models
import snippets
import split
import tokenizers
import torch
import training
import transformers

SEED = 0
CAP_BYTES = 20_000_000
HELD_OUT_PACKAGES = 6
SHIPPED_SNIPPETS = 64
EVALUATED_SNIPPETS = 512
HELD_OUT_TOKENS = 1_000_000

TARGET = training.Recipe(steps=2000, batch=128, learning_rate=3e-3)
DRAFT = training.Recipe(steps=800, batch=128, learning_rate=4e-3, final_fraction=0.5)
DISTIL = training.Recipe(steps=1200, batch=128, learning_rate=2e-3, warmup=20)


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


def prepare(log: Log, out: Path, max_files: int | None) -> tuple[bpe.Tokenizer, list[snippets.Snippet], Any, Any]:
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
    shipped = "".join(json.dumps(s.to_json()) + "\n" for s in drawn[:SHIPPED_SNIPPETS])
    (out / "held_out.jsonl").write_text(shipped)
    log.say(f"drew {len(drawn)} held-out prompts, {min(len(drawn), SHIPPED_SNIPPETS)} of them shipped")
    return tokenizer, drawn, train_ids, held_out_ids


def assess(log: Log, out: Path, prompts: list[list[int]], held_out: torch.Tensor) -> None:
    """Evaluate the saved pair and write ``evaluation.json``.

    Args:
        log: where numbers go.
        out: directory with the saved pair.
        prompts: token ids of the drawn prompts, the shipped ones first.
        held_out: ``[T]`` held-out stream on the device.
    """
    target, draft = (evaluate.load(out / name, held_out.device) for name in ("target", "draft"))
    # A seeded slice from the middle of the stream would favour one package: take evenly spaced windows instead.
    context = TARGET.context
    starts = torch.arange(0, len(held_out) - context, context)
    chosen = starts[torch.linspace(0, len(starts) - 1, min(len(starts), HELD_OUT_TOKENS // context)).long()]
    stream = torch.cat([held_out[s : s + context] for s in chosen.tolist()])
    losses = {name: evaluate.held_out_loss(m, stream) for name, m in (("target", target), ("draft", draft))}
    per_byte = log.numbers["tokens"]["held_out_bytes_per_token"]
    log.record(
        "held_out_loss",
        {
            k: {"nats_per_token": round(v, 4), "bits_per_byte": round(v / 0.6931 / per_byte, 4)}
            for k, v in losses.items()
        },
    )
    log.say(f"held-out loss: {log.numbers['held_out_loss']}")
    results = {
        "shipped_prompts": evaluate.accepted_length(target, draft, prompts[:SHIPPED_SNIPPETS]),
        "all_prompts": evaluate.accepted_length(target, draft, prompts, batch=256),
    }
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

    target = models.create(models.target_config(), SEED, device)
    log.say(f"target: {models.count_parameters(target):,} parameters")
    log.record("target", training.fit(target, tokens, recipes[0], training.next_token_loss, seed=SEED, say=log.say))
    models.save(target, tokenizer, args.out / "target")

    draft = models.create(models.draft_config(), SEED + 1, device)
    log.say(f"draft: {models.count_parameters(draft):,} parameters")
    log.record("parameters", {"target": models.count_parameters(target), "draft": models.count_parameters(draft)})
    log.record("draft", training.fit(draft, tokens, recipes[1], training.next_token_loss, seed=SEED + 1, say=log.say))
    models.save(draft, tokenizer, args.out / "draft")
    distil = training.distillation_loss(target.eval())
    log.record("distil", training.fit(draft, tokens, recipes[2], distil, seed=SEED + 2, say=log.say))
    models.save(draft, tokenizer, args.out / "draft")

    torch.backends.cuda.matmul.allow_tf32 = False
    prompts = [tokenizer.encode(s.prompt).ids for s in drawn]
    assess(log, args.out, prompts[:16] if args.smoke else prompts, held_out[:20_000] if args.smoke else held_out)
    saved = sum(f.stat().st_size for name in ("target", "draft") for f in (args.out / name).iterdir())
    log.say(f"saved pair: {saved / 1e6:.2f} MB; done")
    log.record("saved_bytes", saved)


if __name__ == "__main__":
    sys.exit(main())
