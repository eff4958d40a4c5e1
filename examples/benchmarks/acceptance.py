"""Measure mean accepted length of the shipped pair with the engine, on all held-out prompts that do not loop.

Run ``python examples/benchmarks/acceptance.py --device cuda --out docs/benchmarks/acceptance.json``. Compares chain and
tree with plain generation, both commit policies, and exits with 1 if any token differs.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from _record import write_record
from transformers import AutoModelForCausalLM, AutoTokenizer

import treewy

MODELS = Path(__file__).parents[1] / "tiny_gdn"
NEW_TOKENS = 96
TREES = ((1, 1, 1, 1), (3, 2, 1, 1))


def main() -> int:
    """Run every combination and write one row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="torch device (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    model, draft = (
        AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32).to(args.device).eval()
        for name in ("target", "draft")
    )
    snippets = [json.loads(line) for line in (MODELS / "held_out.jsonl").read_text().splitlines()]
    prompts = [tokenizer(s["prompt"], return_tensors="pt").to(args.device) for s in snippets if not s["loops"]]
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    start = time.perf_counter()
    plain = [model.generate(**prompt, **settings).tolist() for prompt in prompts]
    plain_seconds = time.perf_counter() - start

    rows, all_equal = [], True
    for policy in ("immediate", "snapshots"):
        treewy.compile(model, commit=policy)
        for tree in TREES:
            start = time.perf_counter()
            outputs = [
                model.generate(
                    **prompt, **settings, assistant_model=draft, draft_tree=tree, return_dict_in_generate=True
                )
                for prompt in prompts
            ]
            seconds = time.perf_counter() - start
            equal = [output.sequences.tolist() for output in outputs] == plain
            all_equal &= equal
            stats = [output.speculation for output in outputs]
            rows.append(
                {
                    "policy": policy,
                    "tree": tree,
                    "prompts": len(prompts),
                    "tokens_equal": equal,
                    "mean_accepted_length": sum(s.mean_accepted_length * s.rounds for s in stats)
                    / sum(s.rounds for s in stats),
                    "tokens_per_forward": sum(s.tokens for s in stats) / sum(s.target_forwards for s in stats),
                    "seconds_over_plain": seconds / plain_seconds,
                    "state_bytes": max(s.state_bytes for s in stats),
                    "snapshot_bytes": max(s.snapshot_bytes for s in stats),
                }
            )
            print(rows[-1], flush=True)
    write_record(
        args.out,
        args.device,
        ("torch", "transformers"),
        workload=f"{NEW_TOKENS} greedy tokens a prompt, batch 1, fp32, eager",
        rows=rows,
    )
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main())
