"""A user's own compiled function with a pass of their own, which knows nothing of treewy."""

from typing import Any

import torch
import torch._inductor.config
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass


class UsersPass(CustomGraphPass):
    """Note the operators of each graph."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.graphs.append([str(node.target) for node in graph.nodes])

    def uuid(self) -> str:
        return "a pass of the user's own"


def users_function(x: Tensor) -> Tensor:
    return x @ x @ x  # nothing that a C++ compiler would have to see first


def inductor_settings() -> dict[str, Any]:
    """The compiler's configuration but for passes, of which a copy would be another object."""
    settings = torch._inductor.config.get_config_copy()
    return {name: value for name, value in settings.items() if not name.startswith("post_grad_custom")}


def compile_and_run() -> tuple[list[list[str]], int, int]:
    """The graphs that the pass saw, and how often the cache of compiled graphs had them or not."""
    torch._dynamo.reset()
    counters.clear()
    users_pass = UsersPass()
    with torch._inductor.config.patch(post_grad_custom_post_pass=users_pass, fx_graph_cache=True):
        torch.compile(users_function)(torch.ones(3, 3))
    hits, misses = (counters["inductor"][f"fxgraph_cache_{result}"] for result in ("hit", "miss"))
    return users_pass.graphs, hits, misses
