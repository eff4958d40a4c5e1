"""The tree-structured WY operators: verify a draft tree against one recurrent state, then commit one path of it.

Read `_solve.py` first: it holds the derivation. `_commit.py` folds the accepted path into the state, `_conv.py` and
`_attention.py` do the same tree for the other two stores of a hybrid layer, `_conv_commit.py` and `_kv_commit.py`
advance these, and `_tree.py` turns parents into masks. `_verify.py` joins solve and commit into a round that writes the
state seldom. `_snapshots.py` is what they replace, a state a node, kept to compare with. `_sample.py` chooses a path
by chance.
Every operator is registered under `torch.ops.treewy`; the functions exported here check shapes and then call it.
The operators are for inference: none has an autograd formula, so calling backward through one raises.
"""

from treewy.ops._attention import tree_attention
from treewy.ops._commit import tree_wy_commit, tree_wy_commit_
from treewy.ops._conv import tree_conv
from treewy.ops._conv_commit import tree_conv_commit_
from treewy.ops._kv_commit import tree_kv_commit_
from treewy.ops._sample import tree_sample
from treewy.ops._snapshots import tree_snapshots
from treewy.ops._solve import tree_wy_solve
from treewy.ops._tree import PADDING, ancestor_mask, depths, path_to_node
from treewy.ops._verify import tree_wy_verify_

__all__ = [
    "PADDING",
    "ancestor_mask",
    "depths",
    "path_to_node",
    "tree_attention",
    "tree_conv",
    "tree_conv_commit_",
    "tree_kv_commit_",
    "tree_sample",
    "tree_snapshots",
    "tree_wy_commit",
    "tree_wy_commit_",
    "tree_wy_solve",
    "tree_wy_verify_",
]
