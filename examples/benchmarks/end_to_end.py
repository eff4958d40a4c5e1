"""Time whole calls of ``generate``: plain, Hugging Face's own ways, and speculation with chains and trees.

Run ``python examples/benchmarks/end_to_end.py --json docs/benchmarks/end_to_end.json`` on a CUDA device with 140 GB;
``--quick`` goes the same way with tiny models on the CPU, for tests. Rows that were not reached in ``--minutes`` say
so; ``--only "large, batch 8"`` measures rows with these words in their names and keeps the others of the file. A row
whose tokens are not those of eager generation has no time, and the exit code is 1.

A row is a model, a batch size and a way of generating. Each model and batch size has two processes. All compile at the
same time, then one row after another is timed and nothing else runs. The time is the median of three passes behind a
warm-up, or of fewer where they take seconds. A pass is a call of ``generate`` with its prefill; of the pair at batch 1,
four calls with a prompt each. How acceptance is forced upon random weights: `_forced.py`.
"""

import argparse
import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from _end_to_end_goals import goal_table
from _end_to_end_models import forced_rates
from _end_to_end_rows import Bench, Way, ways
from _record import git_commit, hardware, write_record
from _turns import Turn

KINDS = ("pair", "large")
BATCHES = (1, 8, 32)

_PREPARING, _MEASURING = 0.65, 0.97  # of the minutes: when the last way is prepared, and the last row measured

Place = tuple[str, int, Way]


def label(row: dict[str, Any]) -> str:
    """Return the name of a row."""
    return f"{row['model']}, batch {row['batch']}, {row['way']}"


def places(batches: list[int], only: list[str] | None) -> list[Place]:
    """Return the rows to measure, in order: those that goals need most at first."""
    found = [(kind, batch, way) for batch in batches for kind in KINDS for way in ways(kind)]
    found.sort(key=lambda place: place[2].is_extra)
    names = [f"{kind}, batch {batch}, {way.name}" for kind, batch, way in found]
    return [place for place, name in zip(found, names, strict=True) if only is None or any(x in name for x in only)]


def kept_rows(path: Path, measured: list[str], commit: str, device: str) -> list[dict[str, Any]]:
    """Return the rows of a record that are not measured again."""
    record = json.loads(path.read_text())
    for what, here in (("commit", commit), ("hardware", hardware(device))):
        if record[what] != here:
            sys.exit(f"{path} was measured with {what} {record[what]!r}, this is {here!r}; measure all rows anew")
    return [row for row in record["rows"] if label(row) not in measured]


def line(row: dict[str, Any]) -> str:
    """Say what was measured."""
    if "tokens_per_s" not in row:
        return f"{label(row)}: " + (
            f"FAILED, {row['failed']}" if "failed" in row else f"not measured, {row['not_measured']}"
        )
    text = f"{label(row)}: {row['tokens_per_s']:.1f} tokens/s"
    if "rounds" in row:
        text += f", accepted {row['mean_accepted_length']:.2f}, round {row['verifying_s'] * 1e3:.1f} ms"
        text += f" + drafting {row['drafting_s'] * 1e3:.1f} ms"
    return text


def main() -> int:
    """Measure, print, write, and hold against the goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", help="of the checkout, where git cannot tell")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--only", nargs="+", help="words of the names of rows to measure")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all of it (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny models on the CPU")
    arguments = parser.parse_args()
    start = time.time()
    device, commit = "cpu" if arguments.quick else "cuda", arguments.commit or git_commit()
    chosen = places(arguments.batches, arguments.only)
    if not chosen:
        parser.error(f"no row has any of {arguments.only} in its name")
    names = [label({"model": kind, "batch": batch, "way": way.name}) for kind, batch, way in chosen]
    rows = []
    if arguments.only and arguments.json.exists():
        rows = kept_rows(arguments.json, names, commit, device)
    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "1"}  # of each of a dozen processes
    forced = {way.tree for _, _, way in chosen if way.drafting in ("forced", "charged")}
    rates = forced_rates(sorted(forced), quick=arguments.quick) if forced else {}

    prepare_until, until = (start + share * 60 * arguments.minutes for share in (_PREPARING, _MEASURING))
    turns: dict[tuple[str, int, int], Turn] = {}
    failed = False
    try:
        for kind, batch, process in dict.fromkeys((kind, batch, way.process) for kind, batch, way in chosen):
            own = [way for k, b, way in chosen if (k, b, way.process) == (kind, batch, process)]
            bench = functools.partial(Bench, kind, batch, arguments.quick, rates)
            turns[kind, batch, process] = Turn(bench, own, prepare_until)
        prepared = {key: turn.prepared(until) for key, turn in turns.items()}
        print(f"prepared after {time.time() - start:.0f} s", flush=True)
        for kind, batch, way in chosen:
            key = kind, batch, way.process
            row = turns[key].measure(way, until) if way in prepared[key] and time.time() < until else None
            if row is None:
                row = {"model": kind, "batch": batch, "way": way.name, "not_measured": "out of time"}
            failed |= "failed" in row
            rows.append(row)
            print(line(row), flush=True)
            write_record(
                arguments.json,
                device,
                ("torch", "transformers") if arguments.quick else ("torch", "triton", "transformers"),
                commit=commit,
                rates={str(tree): by_depth for tree, by_depth in rates.items()},
                rows=rows,
            )
    finally:
        for turn in turns.values():
            turn.end()
    print(f"{time.time() - start:.0f} s in all", goal_table(rows), sep="\n")
    if arguments.quick:
        print("Times on a CPU are not meaningful: models are tiny and there are no graphs.")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
