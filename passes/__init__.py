"""Where treewy meets the layers of Hugging Face: finding Gated DeltaNet layers, redirecting and rewriting their rule.

Imports point one way: this package may use :mod:`treewy.ops`, never the rest of :mod:`treewy`.
"""

from treewy.passes._anchors import GdnLayerInfo, TreeCall, find_gdn_layers, names_called, redirect_gdn_layers
from treewy.passes._backend import TreeBackend

__all__ = ["GdnLayerInfo", "TreeBackend", "TreeCall", "find_gdn_layers", "names_called", "redirect_gdn_layers"]
