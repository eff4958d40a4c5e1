"""Rounds of `generate` with scripts of what is drafted, and the stores that have to follow them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st
from transformers import PreTrainedModel

import oracle
from models import (
    Stores,
    assert_stores_equal_plain_run,
    committed_stores,
    left_padded,
    new_tokens,
)
from replay import MakeNodes, assert_same_bits
from scripted import start_rounds
from treewy._nodes import WyNodes
from treewy._rounds import Rounds
from treewy._session import Session
from treewy.testing import NOTHING, Proposal, ScriptedDrafter, always_wrong, chain, perfect, tree


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    """Nothing, or any tree of up to eight nodes and any of them to be accepted, or none."""
    size = draw(st.integers(0, 8))
    if draw(st.booleans()):
        return chain(size, draw(st.integers(0, size)))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    return Proposal(tuple(parents), tuple(oracle.path(parents, draw(st.integers(-1, size - 1)))))


@dataclass(frozen=True)
class Script:
    lengths: tuple[int, ...]
    rows: tuple[tuple[Proposal, ...], ...]
    seed: int


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    batch = draw(st.integers(1, 3))
    return Script(
        lengths=tuple(draw(st.integers(1, 9)) for _ in range(batch)),
        rows=tuple(tuple(draw(st.lists(proposals(), min_size=1, max_size=4))) for _ in range(batch)),
        seed=draw(st.integers(0, 2**31 - 1)),
    )


MIXED = Script(
    lengths=(3, 9, 1),
    rows=(
        (chain(4, 3), NOTHING, NOTHING, chain(4, 1)),
        (tree((2, 2), (0, 2, 6)), tree((3, 1, 1), (0,)), perfect(1)),
        (always_wrong(3), perfect(6)),
    ),
    seed=0,
)


def play_script(
    model: PreTrainedModel,
    script: Script,
    after_round: Callable[[Rounds], None],
    *,
    make_nodes: MakeNodes = WyNodes,
    num_pads: int = 0,
    max_new_tokens: int = 12,
    num_eos: int = 0,
    session: Session | None = None,
    continuations: Sequence[list[int]] | None = None,
) -> ScriptedDrafter:
    """Run rounds to the end and look at them after each; some tokens of the rows' texts may end a row.

    What the model says is taken from `continuations`, if they are given.
    """
    padded = left_padded(script.lengths, script.seed, max(script.lengths) + num_pads)
    prompt, mask = (x.to(model.device) for x in padded)
    if continuations is None:
        continuations = new_tokens(model, prompt, mask, max_new_tokens + 10)
    eos = [row[2 * index + 2] for index, row in enumerate(continuations[:num_eos])] or None
    drafter = ScriptedDrafter(continuations, script.rows)
    options = {"eos": eos, "make_nodes": make_nodes, "session": session}
    rounds = start_rounds(model, prompt, mask, drafter, max_new_tokens=max_new_tokens, **options)
    after_round(rounds)
    while not rounds.all_ended:
        rounds.step()
        after_round(rounds)
    drafter.assert_followed()
    return drafter


class StoresFollow:
    """After a round: each row's stores are the plain run's, and do not move once the row has ended."""

    def __init__(self, model: PreTrainedModel, lengths: Sequence[int], num_pads: int) -> None:
        self.model = model
        self.pads = [max(lengths) + num_pads - length for length in lengths]
        self.at_end: dict[int, Stores] = {}

    def __call__(self, rounds: Rounds) -> None:
        cache = rounds.session.cache
        for row, num_pads in enumerate(self.pads):
            tokens = rounds.texts[row][num_pads:].tolist()
            assert_stores_equal_plain_run(cache, row, num_pads, tokens[:-1], self.model)  # the last is the next root
            if rounds.ended[row]:
                now = committed_stores(cache, row, num_pads)
                assert_same_bits(now, self.at_end.setdefault(row, now))
