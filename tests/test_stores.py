"""After every round the three stores of every layer are those of a token-by-token run of the plain model.

GDN state, convolution window and attention keys and values follow different rules, and most public faults are one of
the three forgotten. The text may still look right for a while, so the stores themselves are compared here.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

import oracle
from models import (
    ATTENTION_ONLY,
    FAMILIES,
    POLICIES,
    PREDICTABLE,
    SLIDING_WINDOW,
    VARIANTS,
    VOCAB_SIZE,
    Stores,
    assert_stores_equal_plain_run,
    committed_state,
    committed_stores,
    draft_with_embeddings_of,
    left_padded,
    new_tokens,
    noisy_copy,
    plain_model,
    random_tokens,
    token_by_token,
)
from parents import widths
from scripted import start_rounds
from tolerances import LOGITS_FLOAT32, STATE_AFTER_ROUNDS, STORES_FLOAT32, relative_error
from treewy import AssistantDrafter
from treewy._nodes import DeferredNodes, FusedNodes, Nodes, WyNodes, WyRows
from treewy._rounds import Rounds
from treewy._session import Session
from treewy._snapshots import SnapshotNodes
from treewy.ops import PADDING
from treewy.testing import NOTHING, Proposal, ScriptedDrafter, always_wrong, chain, perfect, tree
from treewy.testing import topologies as trees

MakeNodes = Callable[[], Nodes]

# The same examples in every run: these tests are too slow for many, and one of a million may be a near tie.
few = settings(max_examples=15, deadline=None, derandomize=True)


# --- Rounds of `generate`, with scripts


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
"""Rows that accept everything, nothing and parts in the same round."""


def play_script(
    model: PreTrainedModel,
    script: Script,
    after_round: Callable[[Rounds], None],
    *,
    make_nodes: MakeNodes = WyNodes,
    num_pads: int = 0,
    max_new_tokens: int = 12,
    num_eos: int = 0,
) -> ScriptedDrafter:
    """Run rounds to the end and look at them after each; some tokens of the rows' texts may end a row."""
    prompt, mask = left_padded(script.lengths, script.seed, max(script.lengths) + num_pads)
    continuations = new_tokens(model, prompt, mask, max_new_tokens + 10)
    eos = [row[2 * index + 2] for index, row in enumerate(continuations[:num_eos])] or None
    drafter = ScriptedDrafter(continuations, script.rows)
    rounds = start_rounds(model, prompt, mask, drafter, max_new_tokens=max_new_tokens, eos=eos, make_nodes=make_nodes)
    after_round(rounds)
    while not bool(rounds.ended.all()):
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
            if bool(rounds.ended[row]):
                now = committed_stores(cache, row, num_pads)
                assert_same_bits(now, self.at_end.setdefault(row, now))


def assert_same_bits(actual: Stores, expected: Stores) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("make_nodes", POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_stores_equal_a_token_by_token_run_after_every_round(family: str, make_nodes: MakeNodes) -> None:
    @few
    @given(scripts(), st.integers(0, 2), st.integers(0, 2), st.sampled_from(["sdpa", "eager"]))
    def check(script: Script, num_pads: int, num_eos: int, attention: str) -> None:
        model = plain_model(family, attention=attention)
        after_round = StoresFollow(model, script.lengths, num_pads)
        play_script(model, script, after_round, make_nodes=make_nodes, num_pads=num_pads, num_eos=num_eos)

    check()


@pytest.mark.parametrize("make_nodes", POLICIES)
@pytest.mark.parametrize("family", FAMILIES + VARIANTS + ATTENTION_ONLY)
def test_stores_follow_for_forty_tokens_of_rows_that_accept_differently(family: str, make_nodes: MakeNodes) -> None:
    model = plain_model(family)
    after_round = StoresFollow(model, MIXED.lengths, num_pads=2)
    drafter = play_script(model, MIXED, after_round, make_nodes=make_nodes, num_pads=2, max_new_tokens=40)
    accepted = {(row, count - 1) for counts in drafter.emitted for row, count in enumerate(counts) if count}
    assert accepted >= {(0, 0), (0, 1), (0, 3), (1, 0), (1, 1), (1, 2), (2, 0), (2, 6)}


class Float64States:
    """Make nodes that also take every committed token one by one in float64, from the same inputs of the rule."""

    def __init__(self, make_nodes: MakeNodes) -> None:
        self.make_nodes = make_nodes
        self.states: dict[int, Tensor] = {}  # by address of the committed state

    def __call__(self) -> Nodes:
        return _Float64Nodes(self.make_nodes(), self.states)


@dataclass
class _Float64Nodes(Nodes):
    nodes: Nodes
    states: dict[int, Tensor]
    inputs: list[tuple[Tensor, ...]] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return self.nodes.num_bytes

    def add_columns(self, window: Tensor, columns: Tensor, parents: Tensor) -> Tensor:
        return self.nodes.add_columns(window, columns, parents)

    def solve(self, state: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Tensor:
        log_decay, beta, _, qk_l2norm = rest
        assert qk_l2norm
        self.inputs.append((value, query, key, log_decay, beta))
        return self.nodes.solve(state, query, key, value, *rest)

    def commit_(self, state: Tensor, window: Tensor, parents: Tensor, accepted_node: Tensor) -> None:
        exact = self.states.setdefault(state.data_ptr(), state.double())
        inputs = [torch.cat(parts, dim=1) for parts in zip(*self.inputs, strict=True)]
        for row, node in enumerate(accepted_node.tolist()):
            path = oracle.path(parents[row].tolist(), node)
            if path:
                exact[row] = _recurrence([part[row : row + 1, path] for part in inputs], exact[row : row + 1])
        self.nodes.commit_(state, window, parents, accepted_node)
        self.inputs.clear()

    def materialize_(self, state: Tensor) -> None:
        self.nodes.materialize_(state)


def _recurrence(inputs: list[Tensor], state: Tensor) -> Tensor:
    value, _, key, log_decay, _ = inputs
    parents = torch.arange(-1, value.shape[1] - 1)[None]
    no_prefix = (value[:, :0], key[:, :0], log_decay[:, :0], torch.zeros(1, value.shape[1], 0, dtype=torch.bool))
    states = oracle.solve(*inputs, state, parents, *no_prefix, 1.0, True)[-1]
    return states[0][value.shape[1] - 1]


@pytest.mark.parametrize("make_nodes", POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_states_equal_a_float64_recurrence_over_what_was_accepted(family: str, make_nodes: MakeNodes) -> None:
    exact = Float64States(make_nodes)

    def compare(rounds: Rounds) -> None:
        for layer in rounds.session.cache.state_layers:
            expected = exact.states.get(layer.state.data_ptr(), layer.state)
            for row, state in enumerate(committed_state(layer)):
                assert relative_error(state, expected[row]) <= STATE_AFTER_ROUNDS

    play_script(plain_model(family), MIXED, compare, make_nodes=exact, max_new_tokens=40)
    assert len(exact.states) == 2


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2), (3, 1, 1)])
@pytest.mark.parametrize("kind", ["GDN", "attention only"])
def test_stores_of_the_draft_model_follow_what_was_emitted(kind: str, shape: tuple[int, ...]) -> None:
    mixing = 1.0 if kind == "GDN" else PREDICTABLE
    target = plain_model("qwen3_next", mixing=mixing)
    draft = noisy_copy(target, 0.05) if kind == "GDN" else draft_with_embeddings_of(target, mixing=mixing)
    drafter = AssistantDrafter(draft, shape)
    lengths = [4, 1, 9]
    prompt, mask = left_padded(lengths, seed=3)
    rounds = start_rounds(target, prompt, mask, drafter, max_new_tokens=24)
    emitted: list[int] = []
    while not bool(rounds.ended.all()):
        before = [len(text) for text in rounds.texts]
        rounds.step()
        emitted += [len(text) - length for text, length in zip(rounds.texts, before, strict=True)]
        assert drafter._session is not None
        seen = drafter._seen.tolist()
        for row, length in enumerate(lengths):
            tokens = rounds.texts[row][max(lengths) - length :].tolist()
            pads = max(lengths) - length  # both have one emitted token before the first proposal
            assert_stores_equal_plain_run(drafter._session.cache, row, pads, tokens[: seen[row]], draft)
    assert {1, 2} < set(emitted)  # nothing, a part and more were accepted


# --- Any tree of any tokens, without a drafter


@dataclass(frozen=True)
class TreeRound:
    parents: tuple[tuple[int, ...], ...]  # of each row
    accepted: tuple[int, ...]


@dataclass(frozen=True)
class History:
    """What to verify and commit, round by round; tokens come from the seed."""

    lengths: tuple[int, ...]
    rounds: tuple[TreeRound, ...]
    family: str = "qwen3_5"
    attention: str = "sdpa"
    seed: int = 0

    @property
    def model(self) -> PreTrainedModel:
        return plain_model(self.family, attention=self.attention)

    @property
    def num_pads(self) -> list[int]:
        return [max(self.lengths) - length for length in self.lengths]

    def token_ids(self, number: int) -> Tensor:
        return random_tokens(len(self.lengths), len(self.rounds[number].parents[0]), seed=self.seed + number + 1)


@st.composite
def histories(
    draw: st.DrawFn,
    *,
    families: Sequence[str] = FAMILIES,
    max_rounds: int = 3,
    padding: bool = True,
    min_batch: int = 1,
) -> History:
    batch = draw(st.integers(min_batch, 3))
    rounds = []
    for _ in range(draw(st.integers(1, max_rounds))):
        size = draw(st.integers(1, 8))
        parents = tuple(draw(trees(size, padding=padding)) for _ in range(batch))
        real = [[-1] + [node for node in range(size) if row[node] != PADDING] for row in parents]
        rounds.append(TreeRound(parents, tuple(draw(st.sampled_from(nodes)) for nodes in real)))
    return History(
        lengths=tuple(draw(st.integers(1, 6)) for _ in range(batch)),
        rounds=tuple(rounds),
        family=draw(st.sampled_from(families)),
        attention=draw(st.sampled_from(["sdpa", "eager"])),
        seed=draw(st.integers(0, 2**30)),
    )


class Replay:
    """Play a history on a session, step by step."""

    def __init__(self, history: History, make_nodes: MakeNodes = WyNodes, row: int | None = None) -> None:
        self.history = history
        self.rows = list(range(len(history.lengths))) if row is None else [row]
        prompt, mask = left_padded(history.lengths, history.seed)
        self.texts = [prompt[r, history.num_pads[r] :].tolist() for r in self.rows]
        self.pads = history.num_pads if row is None else [0]
        first = 0 if row is None else history.num_pads[row]
        self.session = Session(history.model, make_nodes)
        self.session.prefill(prompt[self.rows, first:], mask[self.rows, first:])

    def tree(self, number: int) -> tuple[Tensor, Tensor]:
        """Token ids and parents of a round."""
        parents = torch.tensor(self.history.rounds[number].parents)
        return self.history.token_ids(number)[self.rows], parents[self.rows]

    def commit(self, number: int) -> None:
        token_ids, parents = self.tree(number)
        accepted = [self.history.rounds[number].accepted[row] for row in self.rows]
        before = self.stores()
        self.session.commit(torch.tensor(accepted))
        for row, node in enumerate(accepted):
            self.texts[row] += token_ids[row, oracle.path(parents[row].tolist(), node)].tolist()
            if node < 0:
                assert_same_bits(self.stores()[row], before[row])

    def stores(self) -> list[Stores]:
        return [committed_stores(self.session.cache, row, pads) for row, pads in enumerate(self.pads)]

    def play(self) -> list[Tensor]:
        """Play all rounds and return the logits of the real nodes of each."""
        logits = []
        for number in range(len(self.history.rounds)):
            token_ids, parents = self.tree(number)
            logits.append(self.session.extend(token_ids, parents)[parents != PADDING])
            self.commit(number)
        return logits


def assert_close_stores(actual: list[Stores], expected: list[Stores]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        for pair in zip(ours, theirs, strict=True):
            for a, b in zip(*pair, strict=True):
                assert a.shape == b.shape
                assert relative_error(a, b) <= STORES_FLOAT32


@pytest.mark.parametrize("make_nodes", POLICIES)
@pytest.mark.parametrize("family", FAMILIES + VARIANTS + ATTENTION_ONLY)
def test_committing_any_node_of_any_tree_equals_its_path_token_by_token(family: str, make_nodes: MakeNodes) -> None:
    @few
    @given(histories(families=[family]))
    def check(history: History) -> None:
        replay = Replay(history, make_nodes)
        for number in range(len(history.rounds)):
            replay.session.extend(*replay.tree(number))
            replay.commit(number)
            for row, text in enumerate(replay.texts):
                assert_stores_equal_plain_run(replay.session.cache, row, replay.pads[row], text, history.model)

    check()


@pytest.mark.parametrize("make_nodes", POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_each_node_equal_a_plain_run_of_its_path(family: str, make_nodes: MakeNodes) -> None:
    @settings(few, max_examples=8)
    @given(histories(families=[family], max_rounds=2))
    def check(history: History) -> None:
        replay = Replay(history, make_nodes)
        for number in range(len(history.rounds)):
            token_ids, parents = replay.tree(number)
            logits = replay.session.extend(token_ids, parents)
            for row, text in enumerate(replay.texts):
                for node in range(parents.shape[1]):
                    path = oracle.path(parents[row].tolist(), node)
                    if path:
                        plain = token_by_token(history.model).after(text + token_ids[row, path].tolist())
                        assert relative_error(logits[row, node], plain.logits) <= LOGITS_FLOAT32
            replay.commit(number)

    check()


@pytest.mark.parametrize("family", [*ATTENTION_ONLY, FAMILIES[-1]])
def test_in_a_tree_deeper_than_a_sliding_window_each_node_sees_the_window_of_its_own_text(family: str) -> None:
    depth = SLIDING_WINDOW + 4
    parents = (-1, *(2 * (level // 2) for level in range(2 * depth)))  # of two siblings the second has children
    history = History((5, 2), (TreeRound((parents, parents), (2 * depth, 0)),), family)
    replay = Replay(history)
    token_ids, _ = replay.tree(0)
    logits = replay.session.extend(*replay.tree(0))
    for row, text in enumerate(replay.texts):
        for node in range(len(parents)):
            path = oracle.path(list(parents), node)
            plain = token_by_token(history.model).after(text + token_ids[row, path].tolist())
            assert relative_error(logits[row, node], plain.logits) <= LOGITS_FLOAT32


@pytest.mark.parametrize("make_nodes", POLICIES)
def test_verification_leaves_what_is_committed_bit_identical(make_nodes: MakeNodes) -> None:
    @few
    @given(histories())
    def check(history: History) -> None:
        replay = Replay(history, make_nodes)
        for number in range(len(history.rounds)):
            before, cache = replay.stores(), replay.session.cache
            lengths = cache.lengths.clone()
            token_ids, parents = replay.tree(number)
            logits = replay.session.extend(token_ids, parents)
            for now, old in zip(replay.stores(), before, strict=True):
                assert_same_bits(now, old)
            assert torch.equal(cache.lengths, lengths)
            replay.session.commit(torch.full_like(parents[:, 0], -1))  # forget the nodes: as if nothing had been
            for now, old in zip(replay.stores(), before, strict=True):
                assert_same_bits(now, old)
            assert torch.equal(replay.session.extend(token_ids, parents), logits)
            replay.commit(number)

    check()


@pytest.mark.parametrize("make_nodes", POLICIES)
def test_tokens_of_padding_nodes_change_no_bit(make_nodes: MakeNodes) -> None:
    class OtherFillers(Replay):
        def tree(self, number: int) -> tuple[Tensor, Tensor]:
            token_ids, parents = super().tree(number)
            fillers = random_tokens(*token_ids.shape, seed=self.history.seed + 1000)
            return torch.where(parents == PADDING, fillers, token_ids), parents

    @settings(few, max_examples=20)
    @given(histories(min_batch=2))
    def check(history: History) -> None:
        assert_same_history(Replay(history, make_nodes), OtherFillers(history, make_nodes))

    check()


def assert_same_history(replay: Replay, other: Replay) -> None:
    for logits, others in zip(replay.play(), other.play(), strict=True):
        assert torch.equal(logits, others)
    for stores, others in zip(replay.stores(), other.stores(), strict=True):
        assert_same_bits(stores, others)


class Poisoned:
    """Before a policy: everything about rejected nodes, and what the ring does not hold, is lost before the commit."""

    def commit_(self, state: Tensor, window: Tensor, parents: Tensor, accepted_node: Tensor) -> None:
        rejected = _rejected(parents, accepted_node)
        self._columns.masked_fill_(rejected[:, None], float("nan"))
        _poison_rows(self._on_trial, rejected)
        super().commit_(state, window, parents, accepted_node)
        if getattr(self, "_known", None) is not None:
            _poison_rows(self._known, torch.arange(self._known.size) >= self._num_known[:, None])


def _poison_rows(rows: WyRows, which: Tensor) -> None:
    for tensor in rows.tensors:
        tensor.masked_fill_(which.view(*which.shape, *[1] * (tensor.ndim - 2)), float("nan"))


class PoisonedWyNodes(Poisoned, WyNodes):
    pass


class PoisonedFusedNodes(Poisoned, FusedNodes):
    pass


class PoisonedDeferredNodes(Poisoned, DeferredNodes):
    pass


class PoisonedSnapshotNodes(SnapshotNodes):
    """Likewise; of a path only the last snapshot may be used."""

    def commit_(self, state: Tensor, window: Tensor, parents: Tensor, accepted_node: Tensor) -> None:
        assert self._states is not None
        assert self._windows is not None
        other = torch.arange(parents.shape[1]) != accepted_node[:, None]
        self._states = self._states.masked_fill(other[:, :, None, None, None], float("nan"))
        self._windows = self._windows.masked_fill(other[:, :, None, None], float("nan"))
        super().commit_(state, window, parents, accepted_node)


def _rejected(parents: Tensor, accepted_node: Tensor) -> Tensor:
    rejected = torch.ones_like(parents, dtype=torch.bool)
    for row, node in enumerate(accepted_node.tolist()):
        rejected[row, oracle.path(parents[row].tolist(), node)] = False
    return rejected


class PoisonedReplay(Replay):
    """Put large numbers into all key-value columns that no later node may attend to: rejected nodes, scratch, pads.

    Finite ones: attention multiplies a masked value by zero.
    """

    def commit(self, number: int) -> None:
        _, parents = self.tree(number)
        accepted = torch.tensor(self.history.rounds[number].accepted)[self.rows]
        rejected = _rejected(parents, accepted)
        for row, start in enumerate(self.session.cache.lengths.tolist()):
            self._poison(row, [start + int(node) for node in rejected[row].nonzero()])
            self._poison(row, range(start + parents.shape[1], self._num_columns))
        super().commit(number)
        for row, start in enumerate(self.session.cache.lengths.tolist()):
            self._poison(row, range(start, self._num_columns))
            self._poison(row, range(self.pads[row]))

    @property
    def _num_columns(self) -> int:
        return self.session.cache.key_value_layers[0].keys.shape[2]

    def _poison(self, row: int, columns: Sequence[int]) -> None:
        for layer in self.session.cache.key_value_layers:
            layer.keys[row, :, list(columns)] = 1e4
            layer.values[row, :, list(columns)] = -1e4


@pytest.mark.parametrize(
    ("make_nodes", "poisoned"),
    list(
        zip(POLICIES, (PoisonedWyNodes, PoisonedFusedNodes, PoisonedDeferredNodes, PoisonedSnapshotNodes), strict=True)
    ),
)
def test_what_is_left_of_rejected_nodes_changes_no_bit(make_nodes: MakeNodes, poisoned: MakeNodes) -> None:
    @settings(few, max_examples=20)
    @given(histories())
    def check(history: History) -> None:
        assert_same_history(Replay(history, make_nodes), PoisonedReplay(history, poisoned))

    check()


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """With deterministic algorithms PyTorch fills memory that nobody has written with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("make_nodes", POLICIES)
def test_nothing_that_was_never_written_is_read(make_nodes: MakeNodes) -> None:
    model = plain_model("qwen3_next")
    play_script(model, MIXED, StoresFollow(model, MIXED.lengths, num_pads=0), make_nodes=make_nodes, max_new_tokens=20)


@pytest.mark.parametrize("make_nodes", POLICIES)
def test_each_row_of_a_batch_equals_that_row_alone(make_nodes: MakeNodes) -> None:
    @few
    @given(histories(min_batch=2))
    def check(history: History) -> None:
        together = Replay(history, make_nodes)
        alone = [Replay(history, make_nodes, row) for row in range(len(history.lengths))]
        for number in range(len(history.rounds)):
            token_ids, parents = together.tree(number)
            logits = together.session.extend(token_ids, parents)
            for row, replay in enumerate(alone):
                real = parents[row] != PADDING
                own = replay.session.extend(*replay.tree(number))
                assert relative_error(logits[row, real], own[0, real]) <= LOGITS_FLOAT32
                replay.commit(number)
            together.commit(number)
        assert_close_stores(together.stores(), [replay.stores()[0] for replay in alone])

    check()


def test_a_changed_token_changes_nothing_but_its_descendants() -> None:
    @settings(few, max_examples=20)
    @given(histories(max_rounds=1, padding=False), st.data())
    def check(history: History, data: st.DataObject) -> None:
        replay = Replay(history)
        token_ids, parents = replay.tree(0)
        row = data.draw(st.integers(0, parents.shape[0] - 1))
        node = data.draw(st.integers(0, parents.shape[1] - 1))
        changed = token_ids.clone()
        changed[row, node] = (token_ids[row, node] + data.draw(st.integers(1, VOCAB_SIZE - 1))) % VOCAB_SIZE
        logits = replay.session.extend(token_ids, parents)
        other = Replay(history)
        changed_logits = other.session.extend(changed, parents)
        for r in range(parents.shape[0]):
            for n in range(parents.shape[1]):
                affected = r == row and node in oracle.path(parents[r].tolist(), n)
                assert torch.equal(logits[r, n], changed_logits[r, n]) == (not affected)

    check()


@pytest.mark.parametrize("make_nodes", POLICIES)
def test_a_tree_grown_in_parts_equals_the_tree_at_once(make_nodes: MakeNodes) -> None:
    @few
    @given(histories(), st.data())
    def check(history: History, data: st.DataObject) -> None:
        whole, grown = Replay(history, make_nodes), Replay(history, make_nodes)
        for number in range(len(history.rounds)):
            token_ids, parents = whole.tree(number)
            logits = whole.session.extend(token_ids, parents)
            size = parents.shape[1]
            cuts = sorted(data.draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else [])
            parts = []
            for start, stop in zip([0, *cuts], [*cuts, size], strict=True):
                parts.append(grown.session.extend(token_ids[:, start:stop], parents[:, start:stop]))
            real = parents != PADDING
            assert relative_error(torch.cat(parts, dim=1)[real], logits[real]) <= LOGITS_FLOAT32
            whole.commit(number)
            grown.commit(number)
        assert_close_stores(grown.stores(), whole.stores())

    check()


@pytest.mark.parametrize("make_nodes", POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_grown_level_by_level_equals_the_tree_at_once(family: str, make_nodes: MakeNodes) -> None:
    parents = widths(2, 2, 1)
    history = History((5, 2), (TreeRound((parents, parents), (9, 0)),) * 2, family)
    whole, grown = Replay(history, make_nodes), Replay(history, make_nodes)
    for number in range(2):
        token_ids, tree_parents = whole.tree(number)
        logits = whole.session.extend(token_ids, tree_parents)
        for level in ((0, 1), (1, 3), (3, 7), (7, 11)):
            nodes = slice(*level)
            own = grown.session.extend(token_ids[:, nodes], tree_parents[:, nodes])
            assert relative_error(own, logits[:, nodes]) <= LOGITS_FLOAT32
        whole.commit(number)
        grown.commit(number)
    assert_close_stores(grown.stores(), whole.stores())


@pytest.mark.parametrize("make_nodes", POLICIES)
def test_reordered_rows_go_on_as_the_rows_that_they_were(make_nodes: MakeNodes) -> None:
    history = History(
        (5, 2, 3), (TreeRound((widths(2, 1), (-1, 0, 1, PADDING, PADDING), widths(1, 1, 1, 1)), (4, 0, -1)),) * 2
    )
    replay = Replay(history, make_nodes)
    replay.session.extend(*replay.tree(0))
    replay.commit(0)
    index = [1, 1, 0]
    replay.session.cache.reorder_rows(torch.tensor(index))
    replay.texts = [list(replay.texts[old]) for old in index]
    replay.pads = [replay.pads[old] for old in index]
    replay.session.extend(*replay.tree(1))
    replay.commit(1)
    for row, text in enumerate(replay.texts):
        assert_stores_equal_plain_run(replay.session.cache, row, replay.pads[row], text, history.model)


def test_reordered_rows_keep_their_positions_on_every_axis() -> None:
    """Vision models count positions on several axes."""
    session = Session(plain_model("qwen3_next"))
    prompt, mask = left_padded([4, 2, 3], seed=1)
    session.prefill(prompt, mask)
    session.cache.start_rows(mask, torch.tensor([[10, 20, 30], [11, 21, 31]]))
    session.cache.reorder_rows(torch.tensor([2, 0, 0]))
    positions = session.cache.node_positions(session.cache.begin(torch.tensor([[-1, 0, 0]] * 3), 3))
    session.cache.end()
    assert positions[0].tolist() == [[30, 31, 31], [10, 11, 11], [10, 11, 11]]
    assert positions[1].tolist() == [[31, 32, 32], [11, 12, 12], [11, 12, 12]]


@pytest.mark.parametrize("make_nodes", POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_that_is_handed_out_continues_the_text(family: str, make_nodes: MakeNodes) -> None:
    history = History((4,), (TreeRound((widths(2, 2),), (6,)), TreeRound(((-1, 0, 0),), (1,))), family)
    replay = Replay(history, make_nodes)
    replay.play()
    cache = replay.session.cache.to_dynamic_cache()
    kept = copy.deepcopy(cache)
    # the position by itself: a vision model remembers an offset of its last prompt
    position = torch.tensor([[len(replay.texts[0])]])
    keyword = replay.session.cache_keyword
    output = history.model(torch.tensor([[7]]), position_ids=position, use_cache=True, **{keyword: cache})
    plain = token_by_token(history.model).after([*replay.texts[0], 7])
    assert relative_error(output.logits[0, -1], plain.logits) <= LOGITS_FLOAT32
    # and shares no memory with ours
    for ours, theirs in zip(replay.session.cache.state_layers, (kept.layers[0], kept.layers[2]), strict=True):
        assert torch.equal(ours.state, theirs.recurrent_states[0])
        assert torch.equal(ours.window, theirs.conv_states[0])
