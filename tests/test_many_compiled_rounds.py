"""Hundreds of compiled rounds over drawn trees: nothing is compiled again, and the stores stay those of the text."""

import random

import pytest

from compiled_calls import cuda_calls, graphs
from models import fresh_model, left_padded, new_tokens, plain_model
from scripted_stores import Script, play_script
from test_compiled_rounds import GRAPHS, CompiledStoresFollow
from treewy._compiled_session import CompiledSession, CompiledTarget
from treewy._rounds import Rounds
from treewy.testing import NOTHING, perfect
from treewy.testing._proposals import random_proposal

pytestmark = pytest.mark.usefixtures("nothing_compiled_is_kept")

FAMILY = "qwen3_next short"
ROUNDS = 500
LOOK_EVERY = 10
MOST_NODES = 15  # drafts and root: one compiled forward, and another one for rounds without a draft
LENGTHS = (3, 9, 1)
FIRST_NEW, MOST_NEW = 40, 110  # tokens; keys and values of the longest texts have to grow
FIRST = Script(LENGTHS, ((NOTHING, perfect(MOST_NODES)),) * len(LENGTHS), seed=0)
"""Both forwards, more than once."""


class Followed:
    """Counts rounds, and looks at the stores of some."""

    def __init__(self) -> None:
        self.rounds = 0
        self._follow = CompiledStoresFollow(plain_model(FAMILY), LENGTHS, num_pads=0)

    def __call__(self, rounds: Rounds) -> None:
        self.rounds += rounds.session.has_begun
        if self.rounds % LOOK_EVERY == 0 or rounds.all_ended:
            self._follow(rounds)


def drawn_script(rng: random.Random) -> Script:
    rows = tuple(tuple(random_proposal(rng, MOST_NODES) for _ in range(50)) for _ in LENGTHS)
    return Script(LENGTHS, rows, seed=0)


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_hundreds_of_rounds_compile_nothing_and_keep_the_stores(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any trees of a size, any accepted nodes, rows that have ended, and keys and values that grow.

    On a GPU rounds are captured by then, and each is one launch of a graph.
    """
    monkeypatch.setattr("treewy._static_stores._COLUMNS", 64)
    model = fresh_model(FAMILY).to("cuda" if inner == "inductor" else "cpu")
    target, rng = CompiledTarget(model, inner, "deferred"), random.Random(0)
    prompt, mask = (x.to(model.device) for x in left_padded(LENGTHS, seed=0))
    continuations = new_tokens(model, prompt, mask, MOST_NEW + MOST_NODES)

    def generate(script: Script, max_new_tokens: int, after_round: Followed) -> None:
        session = CompiledSession(target)
        options = {"max_new_tokens": max_new_tokens, "session": session, "continuations": continuations}
        play_script(model, script, after_round, **options)
        session.close()

    generate(FIRST, FIRST_NEW, Followed())
    assert (compiled_once := graphs()) == 2 * GRAPHS  # with and without drafts
    followed = Followed()
    while followed.rounds < ROUNDS:
        generate(drawn_script(rng), rng.randint(FIRST_NEW, MOST_NEW), followed)
        assert graphs() == compiled_once
    if model.device.type == "cuda":
        captured = Followed()
        generate(FIRST, FIRST_NEW, captured)  # captures what has moved since
        captured.rounds = 0
        calls = cuda_calls(lambda: generate(FIRST, FIRST_NEW, captured))
        assert calls["cudaGraphLaunch"] == captured.rounds > 0
