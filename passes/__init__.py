"""Where treewy meets the layers of Hugging Face: finding them, redirecting what they call, and rewriting their graph.

Imports point one way: this package may use :mod:`treewy.ops`, never the rest of :mod:`treewy`.
"""

from treewy.passes._anchors import (
    AttentionLayerInfo,
    GdnLayerInfo,
    LayerInfo,
    TreeCall,
    TreePrefix,
    find_attention_layers,
    find_gdn_layers,
    names_called,
    redirect_layers,
)
from treewy.passes._backend import TreeBackend

__all__ = [
    "AttentionLayerInfo",
    "GdnLayerInfo",
    "LayerInfo",
    "TreeBackend",
    "TreeCall",
    "TreePrefix",
    "find_attention_layers",
    "find_gdn_layers",
    "names_called",
    "redirect_layers",
]
