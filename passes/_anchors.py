"""Find the Gated DeltaNet layers of a model and redirect their convolution and delta rule.

Every Hugging Face GDN layer calls its causal convolution and its delta rule through globals of its modeling file, and
hands them the keyword arguments that came into ``model.forward``. Those globals are the anchors. While a redirection is
active each anchor is replaced by a shim that looks for the keywords of a tree forward of ours. With ``treewy_call`` the
call goes to the :class:`TreeCall`. With ``treewy_parents``, the tree alone, it becomes a marker in the graph that is
being traced, for passes to rewrite. Without either the original function runs, so that any other model of the same
class, in any thread, is computed as before. The last redirection to end puts the original functions back.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor, nn

from treewy.passes._markers import convolution_marker, delta_rule_marker

_CONVOLUTION = "causal_conv1d_fn"
_RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
_KIMI_RULE = "chunk_kimi_delta_attention"

_lock = threading.Lock()
_active: dict[str, int] = {}
_originals: dict[tuple[str, str], Callable[..., Any]] = {}


class TreeCall(Protocol):
    """What a tree forward does instead of the sequential convolution and delta rule.

    Both methods receive exactly what the modeling file passes to the function they stand for.
    """

    def convolve(self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """Return the convolution of every node over its own ancestors, channels first."""

    def apply_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        initial_state: Tensor,
        qk_l2norm: bool,
    ) -> tuple[Tensor, Any]:
        """Return the output of every node, and what the layer hands on to its cache as the new state."""


@dataclass(frozen=True)
class GdnLayerInfo:
    """One Gated DeltaNet layer of a model.

    Args:
        layer_idx: Position among the decoder layers.
        name: Qualified name of the module.
        modeling_module: Name of the Python module that defines its class.
        num_key_heads: Key heads before they are repeated to the value heads.
    """

    layer_idx: int
    name: str
    modeling_module: str
    num_key_heads: int


def find_gdn_layers(model: nn.Module) -> list[GdnLayerInfo]:
    """List the Gated DeltaNet layers of a model, in layer order.

    Args:
        model: Any model; layers are recognised by the functions that their ``forward`` calls, not by class name.

    Returns:
        One entry a layer; empty for a model without such layers.

    Raises:
        ValueError: If a layer uses another delta rule, or if something replaced the whole ``forward`` of a layer.

    Example:
        >>> import torch
        >>> find_gdn_layers(torch.nn.Linear(2, 3))
        []

    Source:
        Layer structure of the ``qwen3_next``, ``qwen3_5``, ``olmo_hybrid`` and ``lara_mini`` modeling files of
        transformers 5.17 to 5.24.
    """
    found = []
    for name, module in model.named_modules():
        called = names_called(type(module))
        if _KIMI_RULE in called:
            raise ValueError(
                f"layer {name!r} ({type(module).__name__}) uses Kimi delta attention, whose decay is per channel; "
                "treewy supports the Gated DeltaNet rule only, so generate without a drafter"
            )
        if _RULES[0] not in called:
            continue
        # accelerate keeps the forward that its hooks wrap as _old_forward
        own_forward = vars(module).get("_old_forward", vars(module).get("forward"))
        if own_forward is not None and getattr(own_forward, "__func__", None) is not type(module).forward:
            raise ValueError(
                f"the forward of layer {name!r} was replaced as a whole (a hub kernel?), so treewy cannot see its "
                "delta rule; load the model with use_kernels=False"
            )
        found.append(GdnLayerInfo(module.layer_idx, name, type(module).__module__, module.num_k_heads))
    return sorted(found, key=lambda layer: layer.layer_idx)


def names_called(cls: type[nn.Module]) -> frozenset[str]:
    """List the global names and attributes that the ``forward`` of a class uses.

    Args:
        cls: Class of a module; decorators around its ``forward`` are looked through.

    Returns:
        The names; empty if ``forward`` is not a Python function.

    Example:
        >>> import torch
        >>> "linear" in names_called(torch.nn.Linear)
        True

    Source:
        ``co_names`` of Python's code objects.
    """
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return frozenset(code.co_names) if code is not None else frozenset()


@contextmanager
def redirect_gdn_layers(layers: Iterable[GdnLayerInfo]) -> Iterator[None]:
    """Redirect calls that carry a :class:`TreeCall` for as long as the context is open.

    Contexts nest and overlap freely, also across threads.

    Args:
        layers: Layers whose modeling files are to be redirected.

    Yields:
        Nothing.
    """
    names = sorted({layer.modeling_module for layer in layers})
    with _lock:
        for name in names:
            _active[name] = _active.get(name, 0) + 1
            if _active[name] == 1:
                _install(sys.modules[name])
    try:
        yield
    finally:
        with _lock:
            for name in names:
                _active[name] -= 1
                if _active[name] == 0:
                    del _active[name]
                    _uninstall(sys.modules[name])


def _install(module: ModuleType) -> None:
    for anchor, make_shim in ((_CONVOLUTION, _convolution_shim), *((rule, _rule_shim) for rule in _RULES)):
        original = getattr(module, anchor)
        _originals[module.__name__, anchor] = original
        setattr(module, anchor, make_shim(original))


def _uninstall(module: ModuleType) -> None:
    for anchor in (_CONVOLUTION, *_RULES):
        setattr(module, anchor, _originals.pop((module.__name__, anchor)))


def _convolution_shim(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def convolution(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        treewy_call: TreeCall | None = None,
        treewy_parents: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if treewy_call is not None:
            return treewy_call.convolve(hidden_states, weight, bias, activation)
        if treewy_parents is not None:
            return convolution_marker(hidden_states, weight, bias, activation, treewy_parents)
        return original(hidden_states, weight, bias, activation=activation, **kwargs)

    return convolution


def _rule_shim(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def rule(
        *args: Any, treewy_call: TreeCall | None = None, treewy_parents: Tensor | None = None, **kwargs: Any
    ) -> Any:
        if treewy_call is None and treewy_parents is None:
            return original(*args, **kwargs)
        query, key, value = args
        arguments = (query, key, value, kwargs["g"], kwargs["beta"], kwargs["initial_state"])
        qk_l2norm = kwargs["use_qk_l2norm_in_kernel"]
        if treewy_call is not None:
            return treewy_call.apply_rule(*arguments, qk_l2norm)
        return delta_rule_marker(*arguments, treewy_parents, qk_l2norm)

    return rule
