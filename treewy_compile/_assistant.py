"""Draft with a smaller model, attention-only or itself a GDN hybrid, as a chain or as a tree of its best tokens."""

import warnings
from collections.abc import Sequence
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from treewy._accept import emitted_node
from treewy._compiled_session import CompiledSession
from treewy._draft_tree import DraftTree, Sampling, parents_of_shape
from treewy._drafters import DraftingContext
from treewy._drafting_on_device import DraftingOnDevice
from treewy._sampling import draw, draw_without_replacement
from treewy._session import Session
from treewy._whole_draft import WholeDraft, known
from treewy.ops import PADDING
from treewy.ops._launch import LARGEST_TREE

_DEFAULT_NUM_TOKENS = 20  # what transformers assumes when the draft model's generation_config says nothing
_DEFAULT_CONFIDENCE = 0.4
_MOST_PENDING = 2  # emitted in a round and not seen as nodes: the target's own token, and a draft of the last level


class AssistantDrafter:
    """Propose what a draft model with the same tokenizer finds probable.

    The draft model's own stores are rolled forward along what the target accepted, so a GDN draft model works too.

    Args:
        draft_model: The draft model.
        tree: Widths or the shape of the tree to propose. None proposes a chain of
            ``generation_config.num_assistant_tokens`` that ends early behind a token whose probability is under
            ``generation_config.assistant_confidence_threshold``, as transformers does.
        sampling: How the children of a node are chosen: its most probable tokens ("top"), or drawn from the draft
            model's distribution "with_replacement" or "without_replacement". None: the most probable ones for greedy
            decoding, drawn without replacement for sampling.

    Raises:
        ValueError: If the tree is malformed or a layer of the draft model is not supported.

    Source:
        Assisted generation of transformers for the chain; top-w trees as in EAGLE-2 (Li et al., 2024), of fixed shape.
    """

    _context: DraftingContext | None
    _sampling: Sampling

    def __init__(
        self,
        draft_model: PreTrainedModel,
        tree: Sequence[int] | DraftTree | None = None,
        *,
        sampling: Sampling | None = None,
    ) -> None:
        if not isinstance(draft_model, PreTrainedModel):
            raise TypeError(f"draft_model is a {type(draft_model).__name__}; pass a transformers model")
        config = draft_model.generation_config
        self._model = draft_model
        self._confidence: float | None = None
        self._given_sampling = sampling
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
        if sampling not in (None, *get_args(Sampling)):
            raise ValueError(f"sampling {sampling!r} must be None or one of {', '.join(get_args(Sampling))}")
        self._vocab_size = draft_model.config.get_text_config(decoder=True).vocab_size
        self._check_width(self._vocab_size, "draft model")
        self.reset()
        try:
            Session(draft_model)  # refuses unsupported layers now rather than in the first round
        except ValueError as error:
            raise ValueError(f"the draft model {type(draft_model).__name__} cannot draft: {error}") from error

    def _check_width(self, vocab_size: int, whose: str) -> None:
        widest = max(max(ranks) + 1 for _, ranks in self._levels)
        if widest > vocab_size:
            raise ValueError(
                f"a node has {widest} children, but the {whose} has only {vocab_size} tokens to offer; draft a "
                "narrower tree"
            )

    def prepare(self, context: DraftingContext) -> None:
        """Learn what the drafts are for; ``generate`` calls it after ``reset``.

        Raises:
            ValueError: If the target has fewer tokens than a node has children.
        """
        self._check_width(context.vocab_size, "target")
        self._context = context
        if self._given_sampling is None:
            self._sampling = "without_replacement" if context.do_sample else "top"

    def reset(self) -> None:
        """Forget the previous text, and what it was for."""
        self._context = None
        self._sampling = self._given_sampling or "top"
        self._session: Session | None = None
        self._on_device: DraftingOnDevice | None = None  # who drafts instead, where a tree is one launch
        self._seen = torch.empty(0, dtype=torch.int64)  # tokens committed to the draft model's stores [B]
        self._pending = torch.empty(0, dtype=torch.int64)  # of the nodes on trial, how many are emitted tokens [B]
        self._node_tokens: list[Tensor] = []  # tokens of the nodes on trial
        self._prompt_logits = torch.empty(0)  # where the first proposal starts [B, 1, V]

    def reorder(self, index: Tensor) -> None:
        """Let row ``i`` continue what row ``index[i]`` was."""
        if self._session is not None:
            index = index.to(self._seen.device)
            if self._on_device is not None:
                self._on_device.reorder(index)
                return
            self._settle(torch.empty(len(self._seen), 0, dtype=torch.int64), torch.zeros_like(self._seen))
            self._session.reorder(index)
            self._seen, self._prompt_logits = self._seen[index], self._prompt_logits[index]

    def propose(self, input_ids: Tensor, lengths: Tensor) -> DraftTree:
        """Run the draft model level by level and propose continuations.

        Every level is drafted whole. A node that does not count (its parent had fewer than its rank possible tokens, or
        a chain ended before it) is dropped from the tree at the end, and so are its descendants.
        """
        tokens, counts = input_ids.to(self._model.device), lengths.to(self._model.device)
        if self._session is None:
            self._begin(tokens, counts, input_ids.device)
        if self._on_device is not None:
            if self._on_device.follows(counts):
                return self._on_device.propose(tokens.shape[1])
            self._seen, self._on_device = self._on_device.leave(), None
        assert self._session is not None
        above_logits, root = self._catch_up(tokens, counts)  # logits of the nodes that get children next [B, n, V]
        first_draft = self._session.num_nodes
        texts = [row[:length] for row, length in zip(tokens, counts, strict=True)]
        if self._context is not None:
            texts = [torch.cat([pads.to(text), text]) for pads, text in zip(self._context.pads, texts, strict=True)]
        paths = tokens[:, None, :0]  # drafted tokens up to each node that gets children next [B, n, depth]
        above_counts = torch.ones_like(counts, dtype=torch.bool)[:, None]
        levels = _Levels(self._sampling != "top")
        shape = self._levels
        if self._context is not None:  # a round's last token is the target's own
            shape = shape[: max(0, self._context.max_length - min(len(text) for text in texts) - 1)]
        for depth, (parents, ranks) in enumerate(shape):
            scores = self._scores(above_logits, texts, paths)
            probs = scores.softmax(dim=-1)
            above = [parent - levels.start for parent in parents]
            best, possible = self._choose(scores, probs, max(ranks) + 1)
            chosen, counts_now = best[:, above, ranks], possible[:, above, ranks] & above_counts[:, above]
            levels.add(chosen, parents, counts_now, probs)
            if self._confidence is not None:
                counts_now = counts_now & (probs[:, 0].gather(1, chosen) >= self._confidence)
            if depth + 1 == len(shape) or not bool(counts_now.any()):
                break
            above_counts, paths = counts_now, torch.cat([paths[:, above], chosen[..., None]], dim=2)
            index = torch.tensor(parents, device=tokens.device).expand(chosen.shape)
            above_logits = self._extend(chosen, torch.where(index < 0, root[:, None], first_draft + index))
        return levels.tree(self._sampling, tokens[:, :0], input_ids.device)

    def _scores(self, logits: Tensor, texts: list[Tensor], paths: Tensor) -> Tensor:
        """Return the scores [B, n, V] over the target's vocabulary, processed as the target's are."""
        if bool(logits.isnan().any()):
            self._refuse_nan()
        if self._context is None:
            return logits.float()
        missing = self._context.vocab_size - logits.shape[-1]  # of padded vocabularies either may be the larger
        logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return self._context.scores.of_nodes(logits, lambda row, node: torch.cat([texts[row], paths[row, node]]))

    def _refuse_nan(self) -> NoReturn:
        raise ValueError(
            f"the draft model {type(self._model).__name__} gave logits that are NaN; look for an overflow (half "
            "precision?), or generate without it"
        )

    def _choose(self, scores: Tensor, probs: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Return children [B, n, number] of each of n nodes, and which of them are possible."""
        generator = None if self._context is None else self._context.generator
        if self._sampling == "without_replacement":
            return draw_without_replacement(probs, number, generator)
        if self._sampling == "with_replacement":
            chosen = torch.stack([draw(probs, generator) for _ in range(number)], dim=-1)
            return chosen, (probs > 0).any(dim=-1, keepdim=True).expand(chosen.shape)
        chosen = scores.topk(number, dim=-1).indices
        return chosen, torch.ones_like(chosen, dtype=torch.bool)

    def update(self, token_ids: Tensor, num_tokens: Tensor) -> None:
        """Commit the part of the emitted tokens that the draft model has already seen as nodes."""
        if self._session is None:
            return
        token_ids, num_tokens = token_ids.to(self._model.device), num_tokens.to(self._model.device)
        if self._on_device is None:
            self._settle(token_ids, num_tokens)
            return
        if not self._on_device.update(token_ids, num_tokens, self._refuse_nan):
            self._seen, self._on_device = self._on_device.leave(), None

    def _begin(self, tokens: Tensor, lengths: Tensor, device: torch.device) -> None:
        """Feed the first text, for drafts on a device.

        Where trees grow in one launch the last token is left to be the root of the first.
        """
        session = self._open_session()
        on_device = isinstance(session, CompiledSession) and self._drafts_most_probable and bool((lengths > 1).all())
        seen = lengths - 1 if on_device else lengths
        size = int(seen.max())
        source = torch.arange(size, device=tokens.device) - (size - seen[:, None])  # pads go to the left
        prompt = known(tokens.gather(1, source.clamp(min=0)), self._vocab_size)
        self._prompt_logits = session.prefill(prompt, source >= 0)[:, None]
        self._session = session
        if isinstance(session, CompiledSession):
            try:
                session.try_out()
            except ValueError as error:
                what = f"the draft model {type(self._model).__name__}"
                warnings.warn(f"{what} drafts with backend 'eager', for a compiled one cannot: {error}", stacklevel=2)
                self._begin(tokens, lengths, device)
                return
        self._seen = seen
        if on_device and isinstance(session, CompiledSession):
            last = tokens.gather(1, seen[:, None])[:, 0]
            vocab_size = self._vocab_size if self._context is None else self._context.vocab_size
            self._on_device = DraftingOnDevice(session, self._levels, vocab_size, self._vocab_size, seen, last, device)

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without what belongs to a text."""
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        copied.reset()
        return vars(copied)

    @property
    def _drafts_most_probable(self) -> bool:
        """Whether the most probable tokens are drafted, as they come, in trees of one size that kernels take."""
        if WholeDraft.num_nodes(self._levels) > LARGEST_TREE:
            return False
        as_they_come = self._context is None or not self._context.scores.change_logits
        return self._sampling == "top" and self._confidence is None and as_they_come

    def _catch_up(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Feed what was emitted since; return the last token's logits [B, 1, V] and its node [B], -1 after prefill."""
        self._settle(tokens[:, :0], torch.zeros_like(lengths))
        self._pending = lengths - self._seen
        if not bool(self._pending.any()):
            return self._prompt_logits, self._pending - 1
        index = torch.arange(int(self._pending.max()), device=tokens.device)
        chain = tokens.gather(1, (self._seen[:, None] + index).clamp(max=tokens.shape[1] - 1))
        logits = self._extend(chain, torch.where(index < self._pending[:, None], index - 1, PADDING))
        rows = torch.arange(len(lengths), device=tokens.device)
        return logits[rows, (self._pending - 1).clamp(min=0)][:, None], self._pending - 1

    def _open_session(self) -> Session:
        """Make the draft model's stores: those of the target's backend within ``generate``, otherwise eager ones."""
        if self._context is None:
            return Session(self._model)
        num_nodes = _MOST_PENDING + sum(len(parents) for parents, _ in self._levels[:-1])
        return self._context.open_session(self._model, num_nodes)

    def _extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        assert self._session is not None
        self._node_tokens.append(token_ids)
        return self._session.extend(known(token_ids, self._vocab_size), parents)

    def _settle(self, emitted: Tensor, num_emitted: Tensor) -> None:
        """Commit the nodes that were emitted: pending ones, and the drafts that agree with ``emitted`` [B, M]."""
        assert self._session is not None
        parents = self._session.parents
        if parents is None:
            return
        padded = torch.nn.functional.pad(emitted, (0, 1)).to(parents.device)  # there may be no column
        token_ids = torch.cat(self._node_tokens, dim=1)
        accepted, after_root = emitted_node(token_ids, parents, self._pending, padded, num_emitted)
        self._seen = self._seen + torch.where(accepted >= 0, self._pending + after_root + 1, 0)
        self._session.commit(accepted)
        self._node_tokens = []
        self._pending = torch.zeros_like(self._pending)


class _Levels:
    """The drafted nodes, level by level, in a shape that all rows share; not all of them count."""

    def __init__(self, keep_probs: bool) -> None:
        self.start = -1  # of the nodes that get children next; -1 is the last emitted token
        self._token_ids: list[Tensor] = []
        self._parents: list[int] = []
        self._count: list[Tensor] = []
        self._probs: list[Tensor] | None = [] if keep_probs else None

    def add(self, token_ids: Tensor, parents: list[int], count: Tensor, probs: Tensor) -> None:
        """Take a level: tokens [B, m], parents, which count [B, m], distributions after the level above [B, n, V]."""
        self.start = len(self._parents)
        self._token_ids.append(token_ids)
        self._parents += parents
        self._count.append(count)
        if self._probs is not None:
            self._probs.append(probs)

    def tree(self, sampling: Sampling, nothing: Tensor, device: torch.device) -> DraftTree:
        """Return the nodes that count; ``nothing`` [B, 0] is the tree without any."""
        count = torch.cat([nothing.bool(), *self._count], dim=1)
        parents = torch.tensor(self._parents, dtype=torch.int64, device=nothing.device)
        order = _first(count)
        place = count.cumsum(dim=1) - 1
        new_parents = torch.where(parents < 0, -1, place[:, parents.clamp(min=0)]).gather(1, order)
        draft_probs = None
        if self._probs:
            probs = torch.cat(self._probs, dim=1)
            has_children = torch.zeros(probs.shape[:2], dtype=torch.int64, device=probs.device)
            has_children.scatter_add_(1, (parents + 1).expand(count.shape), count.long())
            used = _first(has_children > 0)[:, : int((has_children > 0).sum(dim=1).max())]
            draft_probs = probs.gather(1, used[..., None].expand(-1, -1, probs.shape[2])).to(device)
        return DraftTree(
            torch.cat([nothing, *self._token_ids], dim=1).gather(1, order).to(device),
            new_parents.to(device),
            num_nodes=count.sum(dim=1).to(device),
            draft_probs=draft_probs,
            sampling=sampling,
        )


def _first(which: Tensor) -> Tensor:
    """Return the indices [B, N] that put what is marked in ``which`` [B, N] first, otherwise in the old order."""
    return which.logical_not().int().argsort(dim=1, stable=True)


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
