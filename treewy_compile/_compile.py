"""``treewy.compile`` and ``treewy.restore``."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from treewy._compiled_session import refuse_uncompilable
from treewy._draft_tree import DraftTree, parents_of_shape
from treewy._generate import CompiledGenerate, CompileOptions, commit_policies
from treewy._session import Session
from treewy.passes import find_gdn_layers

T = TypeVar("T")

BACKENDS = ("eager", "aot_eager", "inductor")


@overload
def compile(
    model: T,
    *,
    tree: Sequence[int] | DraftTree | None = None,
    backend: str = "eager",
    commit: str | None = None,
    max_cache_len: int | None = None,
) -> T: ...


@overload
def compile(
    model: None = None,
    *,
    tree: Sequence[int] | DraftTree | None = None,
    backend: str = "eager",
    commit: str | None = None,
    max_cache_len: int | None = None,
) -> Callable[[T], T]: ...


def compile(
    model: Any = None,
    *,
    tree: Sequence[int] | DraftTree | None = None,
    backend: str = "eager",
    commit: str | None = None,
    max_cache_len: int | None = None,
) -> Any:
    """Make ``model.generate`` decode speculatively, losslessly, with chains and draft trees.

    Works in place on one model and returns it. Only ``generate`` with a drafter changes; ``forward``, plain
    ``generate``, other models of the class and the global state of torch and transformers stay as they are. A second
    call replaces the options of the first. Like ``torch.compile`` it also decorates: a function that returns a model,
    or a model class.

    Args:
        model: A causal language model with Gated DeltaNet layers, a function that returns one, or a model class; None
            to decorate with options.
        tree: Default of ``generate(draft_tree=...)``: widths such as (3, 2, 1, 1), or a ``DraftTree`` of that shape.
        backend: How verification runs. "eager": the model's own code, redirected layer by layer. "inductor": its graph,
            rewritten by passes and compiled, on CUDA captured so that a round is one launch; the first rounds of a
            number of rows and nodes take up to a minute. "aot_eager": the same without Inductor, to look for mistakes.
            Draft models run behind the same backend.
        commit: When accepted nodes reach the state; tokens are the same. "immediate", the default of "eager": after
            each round. "fused": when the next verification begins. "deferred", the default of compiled backends: when a
            ring of 16 known rows is full, so that the state is written once in some rounds. "snapshots" keeps a state a
            node, as serving engines do, and is there to compare with. Compiled backends have the two in the middle.
        max_cache_len: Most columns a row may take in the cache (tokens, pads and nodes); None grows as needed.

    Returns:
        The model, function or class that was given; a decorator for None.

    Raises:
        ValueError: If an option is unknown, or the model has no Gated DeltaNet layers or unsupported ones.
        TypeError: If ``model`` is none of the above.

    Example:
        >>> import torch
        >>> from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
        >>> config = Qwen3NextConfig(
        ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
        ...     num_key_value_heads=1, head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8,
        ...     linear_num_key_heads=1, linear_num_value_heads=2, num_experts=0)
        >>> model = compile(Qwen3NextForCausalLM(config))
        >>> ids = model.generate(torch.tensor([[1, 2, 1, 2]]), prompt_lookup_num_tokens=3, max_new_tokens=5)
        >>> ids.shape
        torch.Size([1, 9])

    Source:
        docs/design.md; the tree solve is TreeWY (arXiv 2608.20961) with the factor of beta corrected.
    """
    options = _check_options(tree, backend, commit, max_cache_len)
    if model is None:
        return lambda decorated: _compile(decorated, options)
    return _compile(model, options)


def restore(model: PreTrainedModel) -> PreTrainedModel:
    """Undo :func:`compile` on a model.

    Args:
        model: A compiled model.

    Returns:
        The same model, as it was before it was compiled.

    Raises:
        ValueError: If the model is not compiled.

    Example:
        >>> import torch
        >>> restore(torch.nn.Linear(1, 1))
        Traceback (most recent call last):
        ValueError: Linear is not compiled by treewy; call treewy.compile(model) first

    Source:
        The counterpart of :func:`compile`.
    """
    if not isinstance(vars(model).get("generate"), CompiledGenerate):
        raise ValueError(f"{type(model).__name__} is not compiled by treewy; call treewy.compile(model) first")
    replaced = model.generate.replaced
    del model.generate
    if replaced is not None:
        model.generate = replaced
    return model


def _check_options(
    tree: Sequence[int] | DraftTree | None, backend: str, commit: str | None, max_cache_len: int | None
) -> CompileOptions:
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not available; choose one of {', '.join(BACKENDS)}")
    policies = commit_policies(backend)
    commit = policies[0] if commit is None else commit
    if commit not in policies:
        raise ValueError(
            f"commit policy {commit!r} is not available with backend {backend!r}; choose one of {', '.join(policies)}"
        )
    if max_cache_len is not None and (not isinstance(max_cache_len, int) or max_cache_len < 1):
        raise ValueError(f"max_cache_len is {max_cache_len}; it must be positive, or None for no limit")
    if tree is not None:
        parents_of_shape(tree)
    return CompileOptions(tree, backend, commit, max_cache_len)


def _compile(target: Any, options: CompileOptions) -> Any:
    if isinstance(target, PreTrainedModel):
        return _compile_model(target, options)
    if inspect.isclass(target) and issubclass(target, PreTrainedModel):
        return _compile_class(target, options)
    if inspect.isfunction(target):

        @functools.wraps(target)
        def returns_compiled(*args: Any, **kwargs: Any) -> Any:
            return _compile_model(target(*args, **kwargs), options)

        return returns_compiled
    raise TypeError(
        "treewy.compile takes a transformers model, a function that returns one, or a model class, not "
        f"{target!r:.60}; of a wrapped model compile the inner one"
    )


def _compile_class(cls: type[PreTrainedModel], options: CompileOptions) -> type[PreTrainedModel]:
    initialize = cls.__init__

    @functools.wraps(initialize)
    def initialize_compiled(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        _compile_model(self, options)

    cls.__init__ = initialize_compiled
    return cls


def _compile_model(model: PreTrainedModel, options: CompileOptions) -> PreTrainedModel:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"the decorated function returned a {type(model).__name__}, not a transformers model")
    refuse_model(model)
    if options.backend != "eager":
        refuse_uncompilable(model, options.backend)
    if isinstance(vars(model).get("generate"), CompiledGenerate):
        restore(model)
    model.generate = CompiledGenerate(model, options)
    return model


def refuse_model(model: PreTrainedModel) -> None:
    """Raise if no backend can serve a model."""
    config = model.config.get_text_config(decoder=True)
    layers = find_gdn_layers(model)
    stores = DynamicCache(config=config).layers
    wanted = [index for index, layer in enumerate(stores) if isinstance(layer, LinearAttentionLayer)]
    missed = sorted(set(wanted) - {layer.layer_idx for layer in layers})
    if not layers or missed:
        what = f"layers {missed} of {type(model).__name__}" if missed else type(model).__name__
        remedy = (
            "generate without a drafter" if missed else "a model of attention alone needs no compiling to be assisted"
        )
        raise ValueError(
            f"no Gated DeltaNet rule that treewy knows in {what} (model type {config.model_type!r}); it supports "
            f"hybrids such as Qwen3.5 and Qwen3-Next; {remedy}"
        )
    Session(model)  # refuses layers that have no store of ours, and attention that takes no mask
