"""``treewy.explain``: what treewy makes of a model, layer by layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table
from transformers import DynamicCache, PreTrainedModel

from treewy._compile import refuse_model
from treewy._compiled_session import CompiledSize, refuse_uncompilable
from treewy._generate import CompiledGenerate
from treewy.passes import AttentionLayerInfo, GdnLayerInfo, LayerInfo, find_attention_layers, find_gdn_layers

_KINDS = {GdnLayerInfo: "Gated DeltaNet", AttentionLayerInfo: "attention"}


@dataclass(frozen=True)
class ExplainedLayer:
    """What treewy makes of one layer that keeps something from token to token.

    Args:
        layer_idx: Position among the decoder layers.
        module: Qualified name of the module; "" if it was not recognised.
        kind: "Gated DeltaNet", "attention" or "other".
        redirected: Functions of its modeling file that lead to treewy while backend "eager" computes nodes.
        left_alone: What it does instead, if that backend redirects nothing and serves the model; what an other layer
            keeps.
        rewritten: Operators that compiled backends put into its graph; none if they refuse the model.
    """

    layer_idx: int
    module: str
    kind: str
    redirected: tuple[str, ...]
    left_alone: str
    rewritten: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """What :func:`treewy.explain` found; prints as a table.

    Args:
        model: Class of the model.
        backend: What it is compiled with; None if it is not compiled by treewy.
        commit: Its commit policy, likewise.
        refused: Why no backend can serve it; None if one can.
        not_compilable: Why backends "aot_eager" and "inductor" cannot; None if they can.
        layers: The layers that keep something from token to token.
        compiled: What is compiled so far, but for what a generation is using right now.
    """

    model: str
    backend: str | None
    commit: str | None
    refused: str | None
    not_compilable: str | None
    layers: tuple[ExplainedLayer, ...]
    compiled: tuple[CompiledSize, ...]

    def __str__(self) -> str:
        """Draw the tables."""
        text = StringIO()
        console = Console(
            file=text, color_system=None, force_terminal=False, force_jupyter=False, highlight=False, markup=False
        )
        options = f"backend={self.backend!r}, commit={self.commit!r}" if self.backend else "not compiled by treewy"
        console.print(f"treewy on {self.model}: {options}", soft_wrap=True)
        console.print(_table(("layer", "module", "matched as", "backend 'eager'", "compiled backends"), self._rows()))
        functions = dict.fromkeys(name for layer in self.layers for name in layer.redirected)
        if self.refused:
            console.print(f"refused: {self.refused}", soft_wrap=True)
        else:
            console.print(f"redirected: while nodes are computed, {', '.join(functions)}", soft_wrap=True)
            console.print("all else is left alone: it looks at each node by itself", soft_wrap=True)
            if self.not_compilable:
                console.print(f"compiled backends refuse it: {self.not_compilable}", soft_wrap=True)
        if self.compiled:
            sizes = [(str(x.rows), str(x.nodes), "yes" if x.captured else "no", _counts(x)) for x in self.compiled]
            console.print(_table(("rows", "nodes", "captured", "compiled so far"), sizes))
        return text.getvalue().rstrip()

    def _rows(self) -> list[tuple[str, ...]]:
        no_backend = "refused" if self.refused else ""
        compiled = no_backend or ("refused" if self.not_compilable else "")
        return [
            (
                *(str(layer.layer_idx), layer.module, layer.kind),
                layer.left_alone or no_backend or "redirected",
                compiled or ", ".join(layer.rewritten),
            )
            for layer in self.layers
        ]


def explain(model: PreTrainedModel) -> Explanation:
    """Say what treewy makes of a model, or why it refuses it, and what is compiled so far; change nothing.

    What only tracing brings to light, such as experts that cannot be traced, is not foreseen.

    Args:
        model: A transformers model, compiled by treewy or not.

    Returns:
        The explanation; print it for a table.

    Raises:
        TypeError: If ``model`` is no transformers model.

    Example:
        >>> from transformers import Qwen3Config, Qwen3ForCausalLM
        >>> config = Qwen3Config(
        ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        ...     num_key_value_heads=1, head_dim=8)
        >>> explain(Qwen3ForCausalLM(config)).refused
        "no Gated DeltaNet rule that treewy knows in Qwen3ForCausalLM (model type 'qwen3'); it supports ..."

    Source:
        The checks of :func:`treewy.compile` and the anchors of ``treewy.passes``.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"treewy.explain takes a transformers model, not {model!r:.60}; of a wrapped model explain the inner one"
        )
    refused = _refusal(refuse_model, model)
    not_compilable = refused or _refusal(refuse_uncompilable, model, "inductor")
    generate = vars(model).get("generate")
    is_compiled = isinstance(generate, CompiledGenerate)
    return Explanation(
        type(model).__name__,
        generate.options.backend if is_compiled else None,
        generate.options.commit if is_compiled else None,
        refused,
        not_compilable,
        tuple(_layers(model, refused is None, not_compilable is None)),
        tuple(generate.compiled_sizes()) if is_compiled else (),
    )


def _refusal(refuse: Callable[..., object], *args: Any) -> str | None:
    try:
        refuse(*args)
    except ValueError as error:
        return str(error)
    return None


def _layers(model: PreTrainedModel, is_served: bool, is_compilable: bool) -> list[ExplainedLayer]:
    found: dict[int, LayerInfo] = {layer.layer_idx: layer for layer in find_attention_layers(model)}
    if _refusal(find_gdn_layers, model) is None:
        found |= {layer.layer_idx: layer for layer in find_gdn_layers(model)}
    layers = []
    for index, store in enumerate(DynamicCache(config=model.config.get_text_config(decoder=True)).layers):
        info = found.get(index)
        left_alone = f"keeps a {type(store).__name__}" if info is None else ""
        if isinstance(info, AttentionLayerInfo) and is_served:
            left_alone = "takes the tree as a mask"
        layers.append(
            ExplainedLayer(
                index,
                info.name if info else "",
                _KINDS[type(info)] if info else "other",
                info.anchors if isinstance(info, GdnLayerInfo) and is_served else (),
                left_alone,
                info.operators if info and is_compilable else (),
            )
        )
    return layers


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*(Column(name, overflow="fold") for name in columns), box=SIMPLE)
    for row in rows:
        table.add_row(*row)
    return table


def _counts(size: CompiledSize) -> str:
    return ", ".join(f"{number} {operator}" for operator, number in size.operators.items())
