"""Find the layers of a hybrid model and redirect their convolution, delta rule and attention.

Every Hugging Face GDN layer calls its causal convolution and its delta rule through globals of its modeling file, and
hands them the keyword arguments that came into ``model.forward``. An attention layer asks a global for the function of
its implementation. Those globals are the anchors. While a redirection is active each anchor is replaced by a shim that
looks for the keywords of a tree forward of ours. With ``treewy_call`` the call goes to the :class:`TreeCall`. With
``treewy_parents``, the tree alone, and for attention ``treewy_prefix``, it becomes a marker in the graph that is being
traced, for passes to rewrite. Without either the original function runs, so that any other model of the same class, in
any thread, is computed as before. The last redirection to end puts the original functions back.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from treewy.passes._markers import attention_marker, convolution_marker, delta_rule_marker

_CONVOLUTION = "causal_conv1d_fn"
_RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
_ATTENTION = "ALL_ATTENTION_FUNCTIONS"
_KIMI_RULE = "chunk_kimi_delta_attention"

_lock = threading.Lock()
_active: dict[tuple[str, str], int] = {}  # by modeling file and anchor
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
class TreePrefix:
    """What the nodes of a traced forward attend to before each other.

    Args:
        start: First column of each row [B].
        length: Columns of each row [B].
        keys: Cache of each attention layer [B, HKV, L, D], by its index.
        values: Likewise.
        windows: How many tokens the mask of each attention layer shows, likewise; None for all.
    """

    start: Tensor
    length: Tensor
    keys: Mapping[int, Tensor]
    values: Mapping[int, Tensor]
    windows: Mapping[int, int | None]


@dataclass(frozen=True)
class LayerInfo:
    """One layer of a model.

    Args:
        layer_idx: Position among the decoder layers.
        name: Qualified name of the module.
        modeling_module: Name of the Python module that defines its class.
    """

    anchors: ClassVar[tuple[str, ...]]
    """What such a layer calls by globals of its modeling file."""
    operators: ClassVar[tuple[str, ...]]
    """What passes put in their place."""

    layer_idx: int
    name: str
    modeling_module: str


@dataclass(frozen=True)
class AttentionLayerInfo(LayerInfo):
    """One attention layer of a model, described as any."""

    anchors = (_ATTENTION,)
    operators = ("tree_attention",)


@dataclass(frozen=True)
class GdnLayerInfo(LayerInfo):
    """One Gated DeltaNet layer of a model.

    Args:
        layer_idx: Position among the decoder layers.
        name: Qualified name of the module.
        modeling_module: Name of the Python module that defines its class.
        num_key_heads: Key heads before they are repeated to the value heads.
    """

    anchors = (_CONVOLUTION, *_RULES)
    operators = ("tree_conv", "tree_wy_verify_")

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


def find_attention_layers(model: nn.Module) -> list[AttentionLayerInfo]:
    """List the attention layers that keep keys and values, in layer order.

    Args:
        model: Any model; layers are recognised by the functions that their ``forward`` calls, not by class name.

    Returns:
        One entry a layer; those of a vision tower, which keep nothing, are left out.

    Example:
        >>> import torch
        >>> find_attention_layers(torch.nn.Linear(2, 3))
        []

    Source:
        The attention of modeling files of transformers 5.17 to 5.24.
    """
    found = [
        AttentionLayerInfo(module.layer_idx, name, type(module).__module__)
        for name, module in model.named_modules()
        if {_ATTENTION, "update"} <= names_called(type(module))
    ]
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
def redirect_layers(layers: Iterable[LayerInfo]) -> Iterator[None]:
    """Redirect calls that carry a tree for as long as the context is open.

    Contexts nest and overlap freely, also across threads.

    Args:
        layers: Layers whose modeling files are to be redirected, in what such layers call.

    Yields:
        Nothing.
    """
    places = sorted({(layer.modeling_module, anchor) for layer in layers for anchor in layer.anchors})
    with _lock:
        for place in places:
            _active[place] = _active.get(place, 0) + 1
            if _active[place] == 1:
                _install(*place)
    try:
        yield
    finally:
        with _lock:
            for place in places:
                _active[place] -= 1
                if _active[place] == 0:
                    del _active[place]
                    setattr(sys.modules[place[0]], place[1], _originals.pop(place))


def _install(module: str, anchor: str) -> None:
    original = getattr(sys.modules[module], anchor)
    _originals[module, anchor] = original
    setattr(sys.modules[module], anchor, _SHIMS[anchor](original))


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


class _AttentionShim:
    """Stand in for the table of attention functions in a modeling file."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __getitem__(self, name: str) -> Any:
        return self._original[name]

    def get_interface(self, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        original = self._original.get_interface(implementation, default)

        def attention(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *args: Any,
            treewy_parents: Tensor | None = None,
            treewy_prefix: TreePrefix | None = None,
            **kwargs: Any,
        ) -> Any:
            if treewy_parents is None or treewy_prefix is None:
                return original(module, query, key, value, *args, **kwargs)
            index: Any = module.layer_idx
            # Raised here it would be Dynamo's; a pass names the layer as well.
            more = [f"{name}={kwargs[name]}" for name in _NOT_IN_TREES if kwargs.get(name) is not None]
            window, shown = kwargs.get("sliding_window"), treewy_prefix.windows[index]
            # The mask decides in transformers, whose functions ignore the window if they take a mask.
            if window != shown or (window is not None and window < 1):
                more.append(f"sliding_window={window} where its mask shows {'all' if shown is None else shown} tokens")
            keys, values = treewy_prefix.keys[index], treewy_prefix.values[index]
            prefix = (keys, values, treewy_prefix.start, treewy_prefix.length)
            numbers = kwargs["scaling"], window if isinstance(window, int) else 0
            return attention_marker(query, key, value, *prefix, treewy_parents, *numbers, ", ".join(more)), None

        return attention


_NOT_IN_TREES = ("softcap", "s_aux")
_SHIMS: dict[str, Callable[[Any], Any]] = {
    _CONVOLUTION: _convolution_shim,
    **dict.fromkeys(_RULES, _rule_shim),
    _ATTENTION: _AttentionShim,
}
