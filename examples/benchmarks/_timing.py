"""Times of calls that are shorter than a launch takes: replays of a CUDA graph, and the bandwidth to hold them against.

A graph holds calls over several sets of inputs. Their bytes must exceed the L2 cache several times, or a call finds its
inputs there. Results are kept as long as the graph, a buffer for each set, for else all calls would write to one place
that never leaves the cache.
"""

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

MIN_CALLS = 16
"""Calls in a graph at least: what lies between two replays, some microseconds, is a small part of so many."""


class Replay:
    """Calls in a row: a CUDA graph, or on a CPU a loop.

    Args:
        calls: One for each set of inputs. Together they run as often as it takes for MIN_CALLS.
        device: Where they run.

    Attributes:
        results: The last result of each call.
        launches: Kernels, copies and fills of one call; None on a CPU.
    """

    def __init__(self, calls: Sequence[Callable[[], Any]], device: str) -> None:
        self.results: list[Any] = [None] * len(calls)
        self.launches: int | None = None
        self._calls = calls
        self._passes, self._graph = 1, None
        if device.startswith("cuda"):
            calls[0]()  # compiles and loads
            self._passes = -(-MIN_CALLS // len(calls))
            self._graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(self._graph):
                self._run()
            self._graph.instantiate()
            self.launches = graph_nodes(self._graph) // (self._passes * len(calls))

    def _run(self) -> None:
        for _ in range(self._passes):
            for number, call in enumerate(self._calls):
                self.results[number] = None  # so that its buffer is free
                self.results[number] = call()

    def median_us(self) -> float:
        """Return the median time of a call in microseconds, of 20 replays (3 on a CPU) after warm-up."""
        if self._graph is None:
            times = []
            for _ in range(3):
                start = time.perf_counter()
                self._run()
                times.append((time.perf_counter() - start) * 1e3)
        else:
            for _ in range(3):
                self._graph.replay()
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(20)]
            for start_event, end_event in events:
                start_event.record()
                self._graph.replay()
                end_event.record()
            torch.cuda.synchronize()
            times = [start_event.elapsed_time(end_event) for start_event, end_event in events]
        return statistics.median(times) * 1e3 / (self._passes * len(self._calls))


def graph_nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Return the kernels, copies and fills of a graph that was kept (``keep_graph=True``)."""
    count = ctypes.c_size_t()
    raw = ctypes.c_void_p(graph.raw_cuda_graph())
    status = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(raw, None, ctypes.byref(count))
    if status != 0:
        raise RuntimeError(f"cuGraphGetNodes returned {status}")
    return count.value


def copy_bandwidth(device: str) -> float:
    """Return the bytes a microsecond that a kernel moves which reads and writes a large tensor.

    Not a copy: as a node of a graph that is no kernel, and on an H200 much slower than one.
    """
    elements = 2**29 if device.startswith("cuda") else 2**20
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    return 2 * 4 * elements / Replay([lambda: torch.add(source, 1.0, out=target)], device).median_us()
