"""A target that a draft model drafts for, without one: texts, and what is emitted of proposals."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models import ATTENTION_ONLY, INTERFACE_FAMILIES, VOCAB_SIZE, random_tokens
from treewy import DraftTree

DRAFTS = INTERFACE_FAMILIES + ATTENTION_ONLY


def logits_after(model: PreTrainedModel, text: list[int]) -> Tensor:
    """Logits [V] after a text, by a forward without any cache."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([text]), use_cache=False).logits[0, -1]
    return logits


@dataclass
class Target:
    """The text of each row as the target of a drafter would emit it."""

    texts: list[list[int]]
    seed: int = 0
    ended: set[int] = field(default_factory=set)

    def context(self) -> tuple[Tensor, Tensor]:
        """Texts padded on the right with a token that must not matter, and their lengths."""
        longest = max(map(len, self.texts))
        padded = [text + [7] * (longest - len(text)) for text in self.texts]
        return torch.tensor(padded), torch.tensor([len(text) for text in self.texts])

    def emit(self, tree: DraftTree, choices: Sequence[int | str]) -> tuple[Tensor, Tensor]:
        """Accept in each row the path to a node (-1: nothing) and add a token that is none of its children.

        "end": the row ends inside the path to its last node, at the first level. A row that has ended emits nothing.
        """
        emitted: list[list[int]] = []
        for row, choice in enumerate(choices):
            parents, tokens = tree.parents[row].tolist(), tree.token_ids[row].tolist()
            if row in self.ended:
                emitted.append([])
                continue
            node = tree.num_nodes[row].item() - 1 if choice == "end" else int(choice)
            path: list[int] = []
            above = node
            while above >= 0:
                path.insert(0, tokens[above])
                above = parents[above]
            if choice == "end":
                self.ended.add(row)
                emitted.append(path[:1])
                continue
            children = {tokens[child] for child, parent in enumerate(parents) if parent == node}
            self.seed += 1
            bonus = next(t for t in random_tokens(VOCAB_SIZE, seed=self.seed).tolist() if t not in children)
            emitted.append([*path, bonus])
        longest = max(1, *map(len, emitted))
        for text, tokens in zip(self.texts, emitted, strict=True):
            text += tokens
        counts = torch.tensor([len(tokens) for tokens in emitted])
        return torch.tensor([tokens + [7] * (longest - len(tokens)) for tokens in emitted]), counts

    def live(self) -> list[int]:
        return [row for row in range(len(self.texts)) if row not in self.ended]
