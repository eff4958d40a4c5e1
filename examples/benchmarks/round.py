"""Time whole rounds of a Qwen3.5-shaped model with random weights: verify a tree, accept, commit, in one CUDA graph.

    python examples/benchmarks/round.py --json docs/benchmarks/round.json --commit $(git rev-parse --short HEAD)

Needs a GPU with room for 4.35 billion parameters in bfloat16. Random weights reject what random drafts propose, so each
round commits its root. Times are medians over replays; the floor is the bytes that a round must read, weights and keys
and values up to each row's length, over the bandwidth of a copying kernel in the same run.
"""

import argparse
import datetime
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
import triton
from torch import Tensor
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from treewy._compiled_session import CompiledSession, CompiledTarget
from treewy._session import Session

Size = tuple[int, int, int]

GOALS = {(1, 16, 128): 1.35, (1, 40, 128): 1.6, (8, 16, 128): 1.7, (1, 16, 32768): 1.35, (1, 1, 128): 1.25}
"""Times the floor, by batch, nodes and prefix; of one node that of plain decoding."""


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
    launches: int


def qwen3_5(num_layers: int) -> PreTrainedModel:
    """Return the model, by default 4.35 billion parameters, in bfloat16 on the GPU."""
    config = Qwen3_5TextConfig(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9216,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=65536,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return Qwen3_5ForCausalLM(config).to(torch.bfloat16).eval()


def tree_of(nodes: int) -> Tensor:
    """Return the parents of a root with three children each down to the last node [N]."""
    return torch.tensor([-1] + [(node - 1) // 3 for node in range(1, nodes)])


def bytes_read(model: PreTrainedModel, batch: int, prefix: int) -> int:
    """Return the bytes that a round must read: all weights but embeddings, and keys and values."""
    embedding = model.get_input_embeddings().weight
    weights = sum(parameter.nbytes for parameter in model.parameters()) - embedding.nbytes
    config = model.config
    attention = config.layer_types.count("full_attention")
    return weights + batch * prefix * attention * 2 * config.num_key_value_heads * config.head_dim * 2


def copy_bandwidth() -> float:
    """Return the bytes a second of a copying kernel, reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (median_ms(lambda: target.copy_(source)) / 1e3)


def median_ms(function, repeats: int = 20) -> float:
    """Return the median time of a function in milliseconds."""
    times = []
    for _ in range(repeats + 3):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        function()
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]))
    return sorted(times[3:])[repeats // 2]


def check(model: PreTrainedModel, target: CompiledTarget) -> float:
    """Return how far logits of the compiled forward are from those of the eager engine."""
    prompt = torch.randint(0, 1000, (1, 64), device="cuda")
    parents = tree_of(13)[None].cuda()
    tokens = torch.randint(0, 1000, (1, 13), device="cuda")
    logits = []
    for session in (Session(model), CompiledSession(target)):
        session.prefill(prompt, torch.ones_like(prompt))
        session.extend(tokens, parents)
        session.commit(torch.tensor([4], device="cuda"))
        logits.append(session.extend(tokens, parents).float())
        session.commit(torch.tensor([12], device="cuda"))
        logits[-1] = torch.cat([logits[-1], session.extend(tokens, parents).float()])
    return float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())


@torch.no_grad()
def measure(model: PreTrainedModel, target: CompiledTarget, policy: str, bandwidth: float, size: Size) -> Row:
    """Time the rounds of a batch, a number of nodes and a prefix."""
    batch, nodes, prefix = size
    session = CompiledSession(target)
    prompt = torch.randint(0, 1000, (batch, 128), device="cuda")
    session.prefill(prompt, torch.ones_like(prompt))
    parents = tree_of(nodes)[None].repeat(batch, 1).cuda()
    tokens = torch.randint(0, 1000, (batch, nodes), device="cuda")
    room = torch.full((batch,), 1000, device="cuda")
    eos = torch.empty(0, dtype=torch.int64, device="cuda")
    start = time.perf_counter()
    forward, padded = session._prepare(tokens, parents)
    stores = session._stores
    stores.reserve(prefix + 1024)
    target.forget_graphs()
    for counter in (stores.lengths, stores._length, stores.next_position):
        counter.fill_(prefix)
    for _ in range(3):
        forward.round(*padded, room, eos)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    graph = forward._rounds._graph
    floor_ms = bytes_read(model, batch, prefix) / bandwidth * 1e3
    round_ms = median_ms(graph.replay)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    launches = sum(event.count for event in profile.key_averages())
    if torch.cuda.current_device() == 0 and size == (1, 16, 128):
        print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=90))
    return Row(
        "qwen3_5 4.35B", "compiled", policy, *size, round_ms, floor_ms, batch / round_ms * 1e3, seconds, launches
    )


def main() -> None:
    """Measure, print against the goals, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--sizes", default="1,16,128;1,1,128;1,40,128;8,16,128;1,16,32768")
    parser.add_argument("--policy", default="deferred")
    arguments = parser.parse_args()
    model = qwen3_5(arguments.layers)
    bandwidth = copy_bandwidth()
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion parameters, {bandwidth / 1e12:.2f} TB/s")
    target = CompiledTarget(model, "inductor", arguments.policy)
    with torch.no_grad():
        start = time.perf_counter()
        error = check(model, target)
    print(f"logits differ from the eager engine's by {error:.1e}, compiled in {time.perf_counter() - start:.0f} s")
    rows = []
    for text in arguments.sizes.split(";"):
        batch, nodes, prefix = map(int, text.split(","))
        size = batch, nodes, prefix
        row = measure(model, target, arguments.policy, bandwidth, size)
        rows.append(row)
        goal = GOALS.get(size)
        print(
            f"batch {batch}, {nodes} nodes, prefix {prefix}: {row.round_ms:.2f} ms, "
            f"{row.round_ms / row.floor_ms:.2f} x floor (goal {goal}), {row.launches} kernels, "
            f"first call {row.first_call_s:.0f} s",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(
            json.dumps(
                {
                    "command": f"python examples/benchmarks/round.py --commit {arguments.commit}",
                    "commit": arguments.commit,
                    "date": str(datetime.date.today()),
                    "hardware": torch.cuda.get_device_name(),
                    "versions": {
                        "torch": torch.__version__,
                        "triton": triton.__version__,
                        "transformers": transformers.__version__,
                        "python": platform.python_version(),
                    },
                    "copy_tb_s": bandwidth / 1e12,
                    "greatest_logit_difference": error,
                    "rows": [asdict(row) for row in rows],
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
