"""Measure a layer's round, verify a tree and commit three tokens of it, under each commit policy, against its floor.

Run ``python examples/benchmarks/ops.py --json docs/benchmarks/ops.json`` on a CUDA device; ``--device cpu --quick``
goes the same way with tiny sizes, for tests. Exits with 1, and times nothing, if outputs are not those of the
recurrence.

The policies, for a layer with 16 key heads, 32 value heads, 128 x 128, float32 state and bfloat16 inputs:

- deferred: `tree_wy_verify_` with a ring of 16 rows. Each round leaves a path of 3 for the next one, so the ring holds
  0, 3, ..., 15 rows when a round begins, and the round after 15 folds all 18 into the state: a cycle of 6 rounds.
  `round_us` is the mean over the cycle, with the fold's share in it, `worst_us` the slowest of the 6.
- fused: the same without a ring, so that every round folds.
- immediate: `tree_wy_solve`, then `tree_wy_commit_`.
- snapshots: one call of `tree_snapshots` that reads the committed state. To copy the accepted node's state to where it
  is read next would cost a state more, which is left out in its favour.

The root is a node. A chain of one or two nodes leaves a path of as many. All times are medians over replays of CUDA
graphs with inputs rotated past the L2 (`_timing.py`). `floor_us` is what the round must move over the bandwidth that
this run measured: each state once (immediate: twice, as another layer's work lies between; snapshots: N + 1), what is
written of it, nodes, known rows and outputs.
"""

import argparse
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _ops_goals import goal_table
from _ops_rounds import POLICIES, RING, TREES, Layer, Rows, Tree, draw_nodes
from _record import write_record
from _timing import Replay, copy_bandwidth

from treewy.ops import _launch, tree_snapshots
from treewy.ops._snapshots import snapshot_config
from treewy.testing._bounds import relative_error

OUTPUT_BOUND = 2.0**-8 + 1e-5  # rounding to bfloat16 and the arithmetic before it, relative to the greatest output
ROTATED_BYTES = 250e6  # of states alone: four times the L2 of an H200
MAX_SNAPSHOT_BYTES = 20e9


def output_errors(tree: Tree, batch: int, layer: Layer, device: str) -> dict[str, float]:
    """Compare each policy's outputs over more than a cycle with the recurrence in float64, from poisoned stores."""
    rounds = [draw_nodes(layer, batch, tree.nodes, device) for _ in range(RING["deferred"] // tree.path_length + 3)]
    stores = {policy: Rows(tree, batch, layer, device, poisoned=True) for policy in POLICIES}
    example = stores["snapshots"]
    state = example.pool.double()
    for rows in stores.values():
        rows.pool.copy_(state)
        rows.path_length.zero_()  # nothing was accepted before the first tree
    errors = dict.fromkeys(POLICIES, 0.0)
    for nodes, last in zip(rounds, [rounds[0], *rounds], strict=False):
        exact = (*(x.double() for x in nodes), state, example.parents, example.no_states.double())
        expected, states = tree_snapshots(*exact, layer.key_dim**-0.5, True)
        state = states[:, tree.accepted]
        for policy, rows in stores.items():
            output, kept = POLICIES[policy](rows, nodes, last)
            error = relative_error(output, expected)
            errors[policy] = max(errors[policy], math.inf if math.isnan(error) else error)
            if policy == "snapshots":
                rows.pool.copy_(kept[:, tree.accepted])
            elif kept is not None:
                rows.num_known.copy_(kept)
            rows.path_length.fill_(tree.path_length)
    return errors


def floor_bytes(policy: str, tree: Tree, batch: int, layer: Layer) -> float:
    """Return the bytes that a round must move, on average over a cycle."""
    key, value = layer.key_heads * layer.key_dim, layer.value_heads * layer.value_dim
    state = layer.value_heads * layer.key_dim * layer.value_dim * 4
    inputs = tree.nodes * (2 * key * 2 + value * 2 + layer.value_heads * (4 + 2))
    outputs = tree.nodes * value * 2
    if policy == "snapshots":
        return batch * ((tree.nodes + 1) * state + inputs + outputs)
    row = value * 4 + key * 2 + layer.value_heads * 4
    cycle = RING.get(policy, 0) // tree.path_length + 1
    known = tree.path_length * (cycle + 1) / 2  # read, the path among them
    appended = tree.path_length * (cycle - 1) / cycle
    states = 3 if policy == "immediate" else 1 + 1 / cycle
    return batch * (states * state + inputs + outputs + tree.nodes * value * 4 + row * (known + appended))


def launch_config(policy: str, tree: Tree, batch: int, layer: Layer) -> dict[str, Any]:
    """Return the tiles and warps of each kernel, as the operators choose them."""
    if policy == "snapshots":
        return {"tree_snapshots_kernel": snapshot_config(batch * layer.value_heads, layer.key_dim, layer.value_dim)}
    value = torch.empty(batch, tree.nodes, layer.value_heads, layer.value_dim, dtype=torch.bfloat16, device="meta")
    key = torch.empty(batch, tree.nodes, layer.key_heads, layer.key_dim, dtype=torch.bfloat16, device="meta")
    heads, has_ring = _launch.head_options(value, key), policy != "immediate"
    if _launch.fits_one_launch(batch, layer.value_heads, tree.nodes, 0):
        config = {"tree_solve_kernel": _launch.solve_options(value, layer.key_dim)[1]}
    else:
        config = {
            "tree_tables_kernel": _launch.tables_options(value, layer.key_dim, 0, has_ring=has_ring)[1],
            "tree_pass_kernel": _launch.pass_options(value, heads, 0, has_ring=has_ring)[1],
        }
    if policy == "immediate":
        config["tree_commit_kernel"] = _launch.commit_options(value.float(), key.float())[1]
    return config


def measure(tree: Tree, batch: int, layer: Layer, device: str, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Time every policy on one tree and batch size."""
    state_bytes = batch * layer.value_heads * layer.key_dim * layer.value_dim * 4
    sets = math.ceil(ROTATED_BYTES / state_bytes) if device.startswith("cuda") else 1
    stores = [Rows(tree, batch, layer, device) for _ in range(sets)]
    for rows in stores:
        rows.num_known = stores[0].num_known
    for policy, run in POLICIES.items():
        row = {"policy": policy, "batch": batch, "tree": str(tree), "nodes": tree.nodes, "depth": tree.depth}
        row |= {"widths": tree.widths, "key_heads": layer.key_heads, "value_heads": layer.value_heads}
        row |= {"head_dims": (layer.key_dim, layer.value_dim), "state_dtype": "float32", "round_us": None}
        row |= {"worst_us": None, "floor_us": floor_bytes(policy, tree, batch, layer) / bandwidth, "launches": None}
        row["config"] = launch_config(policy, tree, batch, layer)
        if policy == "snapshots" and (size := sets * tree.nodes * state_bytes) > MAX_SNAPSHOT_BYTES:
            yield row | {"not_run": f"{size / 1e9:.1f} GB of states"}
            continue
        stores[0].num_known.zero_()  # the warm-up must not find more known rows than this ring has
        replay = Replay([partial(run, rows, rows.nodes, rows.last) for rows in stores], device)
        times = []
        for num_known in range(0, RING.get(policy, 0) + 1, tree.path_length):
            stores[0].num_known.fill_(num_known)
            times.append(replay.median_us())
        if not all(output.isfinite().all() for output, _ in replay.results):
            raise RuntimeError(f"{policy}, batch {batch}, {tree}: outputs are not finite after the timing")
        mean = sum(times) / len(times)
        yield row | {"round_us": mean, "worst_us": max(times), "launches": replay.launches}


def compile_case(policy: str, tree: Tree, batch: int, layer: Layer, device: str) -> None:
    """Run a round once, for Triton to leave the kernels in its cache."""
    rows = Rows(tree, batch, layer, device)
    POLICIES[policy](rows, rows.nodes, rows.last)
    torch.cuda.synchronize()


def main() -> int:
    """Compile, check, time, write down, and hold against the goals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="torch device (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="JSON file to write")
    parser.add_argument("--quick", action="store_true", help="two trees at batch 1 and 32")
    parser.add_argument("--batches", type=int, nargs="+", help="batch sizes")
    parser.add_argument("--commit", help="commit of the code, where git cannot tell")
    args = parser.parse_args()
    on_gpu = args.device.startswith("cuda")
    layer = Layer(16, 32, 128, 128) if on_gpu else Layer(2, 4, 16, 24)
    trees = [TREES[1], TREES[5]] if args.quick else TREES
    batches = args.batches or ([1, 32] if args.quick else [1, 8, 32, 128, 256])
    torch.manual_seed(0)
    start = time.perf_counter()

    # Kernels depend on the batch only in that few rows go another way than many.
    small_batches = (3, 1)
    if on_gpu:
        cases = [
            (policy, tree, batch, layer, args.device)
            for batch in small_batches
            for tree in sorted(trees, key=lambda tree: -tree.nodes)
            for policy in POLICIES
        ]
        with multiprocessing.get_context("spawn").Pool(min(12, os.cpu_count() or 1)) as pool:
            pool.starmap(compile_case, cases, chunksize=1)
        print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)

    torch.use_deterministic_algorithms(True, warn_only=True)  # new tensors hold NaN until they are written
    errors = {
        (str(tree), batch): output_errors(tree, batch, layer, args.device) for tree in trees for batch in small_batches
    }
    torch.use_deterministic_algorithms(False)
    wrong = [
        f"{policy}, {tree}, batch {batch}: output off by {error:.1e}"
        for (tree, batch), by_policy in errors.items()
        for policy, error in by_policy.items()
        if error > OUTPUT_BOUND
    ]
    if wrong:
        print(*wrong, "Outputs are wrong, so nothing was timed.", sep="\n")
        return 1
    greatest = max(max(by_policy.values()) for by_policy in errors.values())
    print(f"outputs right, greatest error {greatest:.1e}, after {time.perf_counter() - start:.0f} s", flush=True)

    bandwidth = copy_bandwidth(args.device)
    rows = []
    for batch in batches:
        for tree in trees:
            measured = list(measure(tree, batch, layer, args.device, bandwidth))
            snapshots_us = measured[-1]["round_us"]
            rows += [row | {"snapshots_us": snapshots_us} for row in measured]
            print(batch, tree, *(f"{row['policy']} {row['round_us'] or math.nan:.1f}" for row in measured), flush=True)
    if args.json:
        write_record(
            args.json,
            args.device,
            ("torch", "triton") if on_gpu else ("torch",),
            commit=args.commit,
            workload="one layer and round, 3 tokens accepted, bfloat16 inputs, float32 state; microseconds",
            copy_tb_s=bandwidth / 1e6,
            greatest_output_error=greatest,
            rows=rows,
        )
    print(f"{time.perf_counter() - start:.0f} s in all; a kernel that copies moves {bandwidth / 1e6:.2f} TB/s")
    print(goal_table(rows) if on_gpu else "Timings on a CPU are not meaningful: sizes are tiny and there is no graph.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
