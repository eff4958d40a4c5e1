"""Draft with a smaller model, attention-only or itself a GDN hybrid, as a chain or as a tree of its best tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from treewy._accept import deepest_accepted
from treewy._draft_tree import DraftTree, parents_of_shape
from treewy._session import Session
from treewy.ops import PADDING, depths

_DEFAULT_NUM_TOKENS = 20  # what transformers assumes when the draft model's generation_config says nothing
_DEFAULT_CONFIDENCE = 0.4


class AssistantDrafter:
    """Propose what a draft model with the same vocabulary finds most probable.

    The draft model's own stores are rolled forward along what the target accepted, so a GDN draft model works too.

    Args:
        draft_model: The draft model.
        tree: Widths or the shape of the tree to propose; the k-th child of a node is its k-th most probable token. None
            proposes a chain of ``generation_config.num_assistant_tokens`` that ends early behind a token whose
            probability is under ``generation_config.assistant_confidence_threshold``, as transformers does.

    Raises:
        ValueError: If the tree is malformed or a layer of the draft model is not supported.

    Source:
        Assisted generation of transformers for the chain; top-w trees as in EAGLE-2 (Li et al., 2024), of fixed shape.
    """

    def __init__(self, draft_model: PreTrainedModel, tree: Sequence[int] | DraftTree | None = None) -> None:
        config = draft_model.generation_config
        self._model = draft_model
        self._confidence: float | None = None
        self.max_length: int | None = None  # of the text; what cannot be emitted before it is not drafted
        if tree is None:
            if config.num_assistant_tokens_schedule not in (None, "constant"):
                raise ValueError(
                    f"num_assistant_tokens_schedule {config.num_assistant_tokens_schedule!r} is not supported; set the "
                    "draft model's generation_config to 'constant', or pass draft_tree"
                )
            tree = (1,) * (config.num_assistant_tokens or _DEFAULT_NUM_TOKENS)
            threshold = config.assistant_confidence_threshold
            self._confidence = _DEFAULT_CONFIDENCE if threshold is None else threshold
        self._levels = _levels_of(parents_of_shape(tree))
        widest = max(max(ranks) + 1 for _, ranks in self._levels)
        vocab_size = draft_model.config.get_text_config(decoder=True).vocab_size
        if widest > vocab_size:
            raise ValueError(
                f"a node has {widest} children, but the draft model has only {vocab_size} tokens to offer; draft a "
                "narrower tree"
            )
        self.reset()
        try:
            Session(draft_model)  # refuses unsupported layers now rather than in the first round
        except ValueError as error:
            raise ValueError(f"the draft model {type(draft_model).__name__} cannot draft: {error}") from error

    def reset(self) -> None:
        """Forget the previous text."""
        self._session: Session | None = None
        self._seen = torch.empty(0, dtype=torch.int64)  # tokens committed to the draft model's stores [B]
        self._pending = torch.empty(0, dtype=torch.int64)  # of the nodes on trial, how many are emitted tokens [B]
        self._node_tokens: list[Tensor] = []  # tokens of the nodes on trial
        self._prompt_logits = torch.empty(0)  # where the first proposal starts [B, 1, V]

    def reorder(self, index: Tensor) -> None:
        """Let row ``i`` continue what row ``index[i]`` was."""
        if self._session is not None:
            index = index.to(self._seen.device)
            self._settle(torch.empty(len(self._seen), 0, dtype=torch.int64), torch.zeros_like(self._seen))
            self._session.cache.reorder_rows(index)
            self._seen, self._prompt_logits = self._seen[index], self._prompt_logits[index]

    def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
        """Run the draft model level by level and propose its most probable continuations."""
        tokens, counts = input_ids.to(self._model.device), lengths.to(self._model.device)
        above_logits, root = self._catch_up(tokens, counts)  # logits of the nodes that get children next [B, n, V]
        assert self._session is not None
        first_draft = self._session.num_nodes
        above_start = -1
        proposed: list[Tensor] = []
        parents_so_far: list[int] = []
        going = torch.ones_like(counts, dtype=torch.bool)
        num_nodes = torch.zeros_like(counts)
        levels = self._levels
        if self.max_length is not None:  # a round's last token is the target's own
            levels = levels[: max(0, self.max_length - int(lengths.min()) - 1)]
        for depth, (parents, ranks) in enumerate(levels):
            best = above_logits.topk(max(ranks) + 1, dim=-1).indices
            chosen = best[:, [parent - above_start for parent in parents], ranks]
            proposed.append(chosen)
            num_nodes += going * len(parents)
            if self._confidence is not None:
                probability = above_logits[:, 0].float().softmax(dim=-1).gather(1, chosen)[:, 0]
                going &= probability >= self._confidence
            above_start = len(parents_so_far)
            parents_so_far += parents
            if depth + 1 == len(levels) or not bool(going.any()):
                break
            index = torch.tensor(parents, device=tokens.device).expand(chosen.shape)
            above_logits = self._extend(chosen, torch.where(index < 0, root[:, None], first_draft + index))
        return DraftTree(
            torch.cat([tokens[:, :0], *proposed], dim=1).to(input_ids.device),
            torch.tensor(parents_so_far, dtype=torch.int64, device=input_ids.device),
            num_nodes=num_nodes.to(input_ids.device),
        )

    def update(self, token_ids: Tensor, num_tokens: Tensor) -> None:
        """Commit the part of the emitted tokens that the draft model has already seen as nodes."""
        if self._session is not None:
            self._settle(token_ids.to(self._model.device), num_tokens.to(self._model.device))

    def _catch_up(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Feed what was emitted since; return the last token's logits [B, 1, V] and its node [B], -1 after prefill."""
        if self._session is None:
            self._session = Session(self._model)
            size = int(lengths.max())
            source = torch.arange(size, device=tokens.device) - (size - lengths[:, None])  # pads go to the left
            self._prompt_logits = self._session.prefill(tokens.gather(1, source.clamp(min=0)), source >= 0)[:, None]
            self._seen = lengths
        self._settle(tokens[:, :0], torch.zeros_like(lengths))
        self._pending = lengths - self._seen
        if not bool(self._pending.any()):
            return self._prompt_logits, self._pending - 1
        index = torch.arange(int(self._pending.max()), device=tokens.device)
        chain = tokens.gather(1, (self._seen[:, None] + index).clamp(max=tokens.shape[1] - 1))
        logits = self._extend(chain, torch.where(index < self._pending[:, None], index - 1, PADDING))
        rows = torch.arange(len(lengths), device=tokens.device)
        return logits[rows, (self._pending - 1).clamp(min=0)][:, None], self._pending - 1

    def _extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        assert self._session is not None
        self._node_tokens.append(token_ids)
        return self._session.extend(token_ids, parents)

    def _settle(self, emitted: Tensor, num_emitted: Tensor) -> None:
        """Commit the nodes that were emitted: pending ones, and the drafts that agree with ``emitted`` [B, M]."""
        assert self._session is not None
        parents = self._session.parents
        if parents is None:
            return
        after_root = depths(parents) - self._pending[:, None]  # 0 for the first drafted level
        padded = torch.nn.functional.pad(emitted, (0, 1)).to(parents.device)  # at least one column to gather from
        expected = padded.gather(1, after_root.clamp(0, padded.shape[1] - 1))
        agrees = (after_root < 0) | (torch.cat(self._node_tokens, dim=1) == expected)
        # never the last emitted token: its logits are what the next proposal starts from
        accepted = deepest_accepted(agrees & (after_root < num_emitted[:, None] - 1), parents)
        self._seen = self._seen + torch.where(
            accepted >= 0, depths(parents).gather(1, accepted.clamp(min=0)[:, None])[:, 0] + 1, 0
        )
        self._session.commit(accepted)
        self._node_tokens = []
        self._pending = torch.zeros_like(self._pending)


def _levels_of(parents: list[int]) -> list[tuple[list[int], list[int]]]:
    """Sort nodes by depth; return for each level its nodes' parents (in the new order) and ranks among siblings."""
    depth: list[int] = []
    rank: list[int] = []
    for node, parent in enumerate(parents):
        depth.append(0 if parent < 0 else depth[parent] + 1)
        rank.append(sum(other == parent for other in parents[:node]))
    order = sorted(range(len(parents)), key=lambda node: depth[node])
    place = {node: index for index, node in enumerate(order)} | {-1: -1}
    return [
        ([place[parents[n]] for n in order if depth[n] == level], [rank[n] for n in order if depth[n] == level])
        for level in range(max(depth) + 1)
    ]
