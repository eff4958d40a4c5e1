"""What the kernels are to reach, and whether the rows of `ops.py` do."""

from collections.abc import Iterator
from typing import Any

from _goals import Goal, table

# Peers' times in microseconds a layer and round for chains, by batch and nodes: ReplaySSM (vLLM) on another H200 in
# another run, with the layer of these rows and one round in five folding.
REPLAYSSM = {
    (1, 4): 7.7,
    (1, 16): 20.1,
    (8, 4): 10.9,
    (32, 4): 35.4,
    (32, 8): 39.9,
    (32, 16): 64.8,
    (128, 4): 113.0,
    (128, 16): 232.0,
}


def _goals(rows: list[dict[str, Any]]) -> Iterator[Goal]:
    """Yield the goals with what was measured."""
    timed = [row for row in rows if row["round_us"] is not None]
    deferred = [row for row in timed if row["policy"] == "deferred"]
    beside = [row for row in deferred if row["snapshots_us"] is not None]

    small = [row for row in deferred if row["batch"] == 1 and row["nodes"] <= 16]
    yield "batch 1, to 16 nodes: launches", [row["launches"] for row in small], 1, True
    yield "batch 1, to 16 nodes: us", [row["round_us"] for row in small], 4.0, True
    middle = [row["round_us"] for row in deferred if (row["batch"], row["nodes"]) == (1, 40)]
    yield "batch 1, 40 nodes: us", middle, 7.0, True
    for batch, nodes, bound in ((32, 4, 1.35), (32, 16, 1.4), (32, 40, 2.2), (128, 16, 1.3)):
        over = [row["round_us"] / row["floor_us"] for row in deferred if (row["batch"], row["nodes"]) == (batch, nodes)]
        yield f"batch {batch}, {nodes} nodes: x floor", over, bound, True
    for (batch, nodes), peer in REPLAYSSM.items():
        chains = [row for row in deferred if row["batch"] == batch and row["nodes"] == row["depth"] == nodes]
        faster = [peer / row["round_us"] for row in chains]
        yield (
            f"batch {batch}, chain {nodes}: ReplaySSM, {peer:g} us, over ours",
            faster,
            1.1 if batch == 128 else 1.3,
            False,
        )
    for nodes, bound in ((4, 3.0), (16, 8.0), (40, 11.0)):
        ratios = [
            row["snapshots_us"] / row["round_us"] for row in beside if (row["batch"], row["nodes"]) == (32, nodes)
        ]
        yield f"batch 32, {nodes} nodes: snapshots over ours", ratios, bound, False
    yield "anywhere: ours over snapshots", [row["round_us"] / row["snapshots_us"] for row in beside], 1.03, True
    stored = [row for row in timed if row["policy"] == "snapshots" and row["batch"] >= 32]
    yield "batch 32 and more: snapshots x their floor", [row["round_us"] / row["floor_us"] for row in stored], 1.3, True


def goal_table(rows: list[dict[str, Any]]) -> str:
    """Return a line a goal: the worst value of the policy "deferred", the goal, and whether it is reached."""
    peers = "ReplaySSM was measured in another run, on another GPU of the same kind (H200)."
    return f"{table(_goals(rows))}\n{peers}"
