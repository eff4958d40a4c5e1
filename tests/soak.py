"""A long comparison with plain greedy generation: tiny models, drawn drafters, trees, batches and commit policies.

``python tests/soak.py --tokens 1000000 --workers 14 --out docs/benchmarks/soak.json`` counts tokens that were compared;
of a row that parts from plain generation at a tie, those before the tie. The drawn generations depend on the seed
alone, not on the number of workers. ``test_soak.py`` runs a slice.
"""

import argparse
import json
import multiprocessing
import random
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers
from torch import Tensor

import treewy
from models import BITWISE_EXPERTS, EXPERTS, FAMILIES, MIXTURES, greedy, left_padded, new_tokens, plain_model
from test_generate_equality import KINDS, TokenComparison, compiled_model, draw_eos, speculative
from treewy._generate import COMMIT_POLICIES

TOKENS_A_SLICE = 5000
LONGEST_TEXT = 160  # new tokens
LARGEST_BATCH = 16


@dataclass
class Slice:
    """What some generations compared."""

    generations: int = 0
    tokens: int = 0
    rounds: int = 0
    by: Counter[str] = field(default_factory=Counter)  # tokens by family, kind of drafter, policy and batch size
    ties: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __iadd__(self, other: "Slice") -> "Slice":
        self.generations += other.generations
        self.tokens += other.tokens
        self.rounds += other.rounds
        self.by += other.by
        self.ties += other.ties
        self.wrong += other.wrong
        return self


def run_slice(seed: str, num_tokens: int) -> Slice:
    """Compare drawn generations until that many tokens have been compared."""
    done = Slice()
    while done.tokens < num_tokens:
        compare_one(random.Random(f"soak {seed} {done.generations}"), f"soak {seed} {done.generations}", done)
    return done


def compare_one(rng: random.Random, label: str, done: Slice) -> None:
    """Draw a generation and compare it."""
    family, name, commit = rng.choice(FAMILIES), rng.choice(list(KINDS)), rng.choice(list(COMMIT_POLICIES))
    kind = KINDS[name]
    seed, attention = rng.randrange(3), rng.choice(["sdpa", "eager"])
    experts = rng.choice(EXPERTS) if family in MIXTURES else BITWISE_EXPERTS
    batch, number = rng.choice([1, rng.randint(2, LARGEST_BATCH)]), rng.randint(8, LONGEST_TEXT)
    lengths = [rng.choice([rng.randint(1, 5), rng.randint(1, 100)]) for _ in range(batch)]
    prompt, mask = left_padded(lengths, seed=rng.randrange(2**31), width=max(lengths) + rng.choice([0, 0, 5]))

    model = plain_model(family, seed, attention, kind.mixing, experts)
    continuations = new_tokens(model, prompt, mask, number + kind.beyond_end)
    eos = draw_eos(rng, continuations) if rng.random() < 0.2 else None
    expected = torch.cat([prompt, torch.tensor(continuations)[:, :number]], dim=1)
    if eos is not None:
        expected = greedy(model, prompt, mask, number, eos)
    output = speculative(
        compiled_model(family, seed, attention, kind.mixing, experts, commit),
        prompt,
        mask,
        eos=eos,
        max_new_tokens=number,
        **kind.draw(rng, model, continuations),
    )
    comparison = TokenComparison()
    where = f"{label}: {family}, {name}, {commit}, {attention}, lengths {lengths}, eos {eos}"
    try:
        comparison.compare(model, expected, output.sequences, mask, where)
    except AssertionError as error:
        done.wrong.append(str(error).splitlines()[0])
    done.ties += comparison.ties
    compared = _num_equal(expected, output.sequences, prompt.shape[1])
    done.generations += 1
    done.tokens += compared
    done.rounds += output.speculation.rounds
    for subject in (family, name, commit, f"batch {'1' if batch == 1 else '2 to 16'}"):
        done.by[subject] += compared


def _num_equal(expected: Tensor, actual: Tensor, start: int) -> int:
    """Count the new tokens before each row's first difference."""
    width = min(expected.shape[1], actual.shape[1])
    equal = expected[:, start:width] == actual[:, start:width]
    return int(equal.int().cumprod(dim=1).sum())


def main() -> int:
    """Run slices side by side and write what they found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--commit", help="commit of the code, where git cannot tell")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    seeds = [f"{options.seed} {number}" for number in range(-(-options.tokens // TOKENS_A_SLICE))]
    start, total = time.monotonic(), Slice()
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        slices = [pool.submit(run_slice, seed, TOKENS_A_SLICE) for seed in seeds]
        for number, finished in enumerate(as_completed(slices), start=1):
            total += finished.result()
            if number % 10 == 0 or number == len(slices):
                seconds = time.monotonic() - start
                print(
                    f"{seconds:6.0f} s: {total.tokens:,} tokens in {total.generations:,} generations, "
                    f"{total.rounds:,} rounds; {len(total.wrong)} wrong, {len(total.ties)} ties",
                    flush=True,
                )
    for kind, places in (("wrong", total.wrong), ("tie", total.ties)):
        for place in sorted(places):
            print(f"{kind}: {place}")
    commit = (
        options.commit
        or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    )
    result = {
        "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python tests/soak.py --tokens {options.tokens} --workers {options.workers} --seed {options.seed}",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "treewy": treewy.__version__,
        },
        "workload": f"greedy, float32, CPU; up to {LONGEST_TEXT} new tokens a row, up to {LARGEST_BATCH} rows",
        "tokens": total.tokens,
        "generations": total.generations,
        "rounds": total.rounds,
        "tokens_by": dict(sorted(total.by.items())),
        "wrong": sorted(total.wrong),
        "ties": sorted(total.ties),
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if total.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
