"""Time whole rounds of Qwen3.5-shaped models with random weights: verify a tree, accept, commit, in one CUDA graph.

Run ``python examples/benchmarks/round.py --json docs/benchmarks/round.json`` on a CUDA device with room for the models,
9 and 71 GB; ``--quick`` goes the same way with tiny ones and without a graph, for tests. Exits with 1, and times
nothing, if logits are off by more than twice what those of the eager engine are.

Random weights reject what random drafts propose, so each round commits its root, and one of a node is plain decoding.
Times are medians over replays; the floor is what a round must read, all weights but embeddings and experts that it does
not use, and keys and values up to each row's length, over the bandwidth of a copying kernel in the same run. Of a long
prefix all but the first columns are zeros.
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from _record import write_record
from _round_models import bytes_read, count_experts, random_model
from _timing import copy_bandwidth
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from treewy._compiled_session import CompiledSession, CompiledTarget
from treewy._greedy import GreedyChoice
from treewy._scores import Scores
from treewy._session import Session

Size = tuple[int, int, int]

GOALS: dict[str, dict[Size, float]] = {
    "dense": {
        (1, 16, 128): 1.35,
        (1, 16, 32768): 1.35,
        (1, 40, 128): 1.6,
        (8, 16, 128): 1.7,
        (1, 1, 128): 1.25,
    },
    "moe": {(1, 4, 128): 1.6, (1, 16, 128): 1.6, (1, 40, 128): 1.6, (1, 1, 128): 1.25},
}
"""Times the floor, by model, batch, nodes and prefix. What is compiled serves until the batch changes or a tree is
larger; rounds of a node are compiled for themselves."""

_PROMPT = 128
_REPEATS, _CALLS = 20, 5
_SHALLOW = 4  # layers of the model of experts whose logits are compared: of all, there is no room in float32


@dataclass
class Row:
    """A measured round."""

    model: str
    mode: str
    policy: str
    batch: int
    nodes: int
    prefix: int
    round_ms: float
    floor_ms: float
    tokens_per_s: float
    first_call_s: float
    experts: int
    launches: int | None
    eager_logit_error: float
    logit_error: float


def tree_of(nodes: int, batch: int, device: str) -> Tensor:
    """Return the parents [B, N] of a tree in which each node has three children."""
    parents = torch.tensor([-1] + [(node - 1) // 3 for node in range(1, nodes)], device=device)
    return parents.expand(batch, -1)


def logit_errors(model: PreTrainedModel, target: CompiledTarget, batch: int, nodes: int) -> tuple[float, float, float]:
    """Return the errors of the logits of three eager and three compiled rounds, and the seconds of the latter.

    Relative to the greatest, against the same model in float32, so that they can be compared with each other.
    """
    device, generator = model.device.type, torch.Generator().manual_seed(1)
    prompt, tokens = (torch.randint(0, 100, (batch, n), generator=generator).to(device) for n in (64, nodes))
    logits = []
    exact = Session(copy.deepcopy(model).float())
    for session in (exact, Session(model), CompiledSession(target)):
        session.prefill(prompt, torch.ones_like(prompt))
        start, seen = time.perf_counter(), []
        for accepted in (nodes // 3, nodes - 1, 0):
            seen.append(session.extend(tokens, tree_of(nodes, batch, device)).float())
            session.commit(torch.full((batch,), accepted, device=device))
        logits.append(torch.cat(seen))
        session.close()
        seconds = time.perf_counter() - start
    eager, compiled = (float((x - logits[0]).abs().max() / logits[0].abs().max()) for x in logits[1:])
    return eager, compiled, seconds


def median_ms(function: Callable[[], object], device: str) -> float:
    """Return the median time of a call in milliseconds; on a GPU of some in a row, so that launches are hidden."""
    times = []
    for _ in range(_REPEATS if device == "cuda" else 3):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(_CALLS):
                function()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / _CALLS)
        else:
            begin = time.perf_counter()
            function()
            times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def launches(graph: torch.cuda.CUDAGraph) -> int:
    """Return the kernels, copies and fills that a replay runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages())


class Subject:
    """A model to be measured, and what is compiled of it.

    Args:
        kind: "dense" or "moe".
        device: Where it lies.
        inner: What compiles.
        policy: Commit policy.
    """

    def __init__(self, kind: str, device: str, inner: str, policy: str) -> None:
        self.kind, self.device, self._inner, self._policy = kind, device, inner, policy
        self.model = random_model(kind, device)
        self._checked = self.model if kind == "dense" else random_model(kind, device, num_layers=_SHALLOW)
        self._targets: dict[tuple[int, bool], CompiledTarget] = {}

    def measure(self, bandwidth: float, size: Size) -> Row:
        """Time the rounds of a batch, a number of nodes and a prefix."""
        batch, nodes, prefix = size
        model, device = self.model, self.device
        checked, target = (self._target(which, nodes) for which in (self._checked, model))
        eager_error, error, seconds = logit_errors(self._checked, checked, batch, nodes)
        if not error <= 2 * eager_error + 1e-6:
            sys.exit(f"logits of {size} are off by {error:.1e}, those of the eager engine by {eager_error:.1e}")
        session = CompiledSession(target)
        prompt = torch.randint(0, 100, (batch, min(prefix, _PROMPT)), device=device)
        session.prefill(prompt, torch.ones_like(prompt))
        tokens, parents = torch.randint(0, 100, (batch, nodes), device=device), tree_of(nodes, batch, device)
        start = time.perf_counter()
        forward = session.reserve(prefix + 2 * _REPEATS * _CALLS, nodes)
        session.stores.lengthen(prefix - prompt.shape[1])
        limits = torch.full((batch,), 1000, device=device), torch.empty(0, dtype=torch.int64, device=device)
        greedy = GreedyChoice(Scores(LogitsProcessorList(), batch))
        for _ in range(3):  # compiles, captures, replays
            forward.round(tokens, parents, *limits, greedy)
        if self._checked is not model:
            seconds = time.perf_counter() - start
        graph = forward.round_graph
        run = (lambda: forward.round(tokens, parents, *limits, greedy)) if graph is None else graph.replay
        round_ms = median_ms(run, device)
        num_launches = None if graph is None else launches(graph)
        session.close()
        num_experts = self._experts(prompt, tokens, parents)
        return Row(
            model=f"{model.config.model_type} {sum(p.numel() for p in model.parameters()) / 1e9:.2f}B",
            mode="compiled" if nodes > 1 else "plain",
            policy=self._policy,
            batch=batch,
            nodes=nodes,
            prefix=prefix,
            round_ms=round_ms,
            floor_ms=bytes_read(model, batch, prefix, num_experts) / bandwidth / 1e3,
            tokens_per_s=batch / round_ms * 1e3,
            first_call_s=seconds,
            experts=num_experts,
            launches=num_launches,
            eager_logit_error=eager_error,
            logit_error=error,
        )

    def _target(self, model: PreTrainedModel, nodes: int) -> CompiledTarget:
        key = id(model), nodes == 1
        if key not in self._targets:
            self._targets[key] = CompiledTarget(model, self._inner, self._policy)
        return self._targets[key]

    def _experts(self, prompt: Tensor, tokens: Tensor, parents: Tensor) -> int:
        session = Session(self.model)
        session.prefill(prompt, torch.ones_like(prompt))
        number = count_experts(self.model, lambda: session.extend(tokens, parents))
        session.close()
        return number


def main() -> None:
    """Measure, print against the goals, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="of the checkout, where git cannot tell")
    parser.add_argument("--policy", default="deferred", choices=["deferred", "fused"])
    parser.add_argument("--models", nargs="*", default=list(GOALS), choices=list(GOALS))
    parser.add_argument("--sizes", type=lambda text: tuple(map(int, text.split(","))), nargs="*")
    parser.add_argument("--quick", action="store_true", help="tiny models on the CPU")
    arguments = parser.parse_args()
    unknown = set(arguments.sizes or ()).difference(*(GOALS[kind] for kind in arguments.models))
    if unknown:
        parser.error(f"--sizes {sorted(unknown)} of no model; choose from {[*GOALS['dense'], *GOALS['moe']]}")
    device, inner = ("cpu", "aot_eager") if arguments.quick else ("cuda", "inductor")
    bandwidth = copy_bandwidth(device)
    rows = []
    for kind in arguments.models:
        subject = Subject(kind, device, inner, arguments.policy)
        for size, goal in GOALS[kind].items():
            if arguments.sizes and size not in arguments.sizes:
                continue
            with torch.no_grad():
                rows.append(row := subject.measure(bandwidth, size))
            print(
                f"{row.model}, batch {row.batch}, {row.nodes} nodes, prefix {row.prefix}: {row.round_ms:.2f} ms, "
                f"{row.round_ms / row.floor_ms:.2f} x floor (goal {goal}), {row.launches} kernels, "
                f"compiled in {row.first_call_s:.0f} s, logits off by {row.logit_error:.1e}",
                flush=True,
            )
            if arguments.json is not None:  # after each row: compiling all sizes takes minutes
                write_record(
                    arguments.json,
                    device,
                    ("torch", "transformers") if arguments.quick else ("torch", "triton", "transformers"),
                    commit=arguments.commit,
                    copy_tb_s=bandwidth / 1e6,
                    rows=[asdict(row) for row in rows],
                )


if __name__ == "__main__":
    main()
