"""Commit policies differ in when accepted nodes reach the state, and in nothing else."""

import pytest
import torch
from torch import Tensor

import oracle
from contract import Drafting
from models import POLICIES, committed_state, greedy, left_padded, plain_model, random_tokens
from test_generate_equality import compiled_model, speculative
from tolerances import STATE_AFTER_COMMITS, STORES_FLOAT32, relative_error
from treewy._generate import COMMIT_POLICIES
from treewy._nodes import _RING_ROWS, DeferredNodes, FusedNodes, Nodes, WyNodes
from treewy._session import Session
from treewy.ops import PADDING

BATCH, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 3, 2, 6, 8, 10
CHANNELS, WIDTH = 7, 4
SLOWEST_DECAYS = torch.tensor([0.9, 0.99, 0.999, 0.9, 0.99, 0.999])  # a value head


class Layer:
    """Stores of one layer, and random bfloat16 inputs of its rule."""

    def __init__(self, make_nodes: type[Nodes], seed: int = 0) -> None:
        self.nodes = make_nodes()
        self.generator = torch.Generator().manual_seed(seed)
        self.state = self._normal(BATCH, VALUE_HEADS, KEY_DIM, VALUE_DIM).float()
        self.exact = self.state.double()
        self._window = torch.zeros(BATCH, CHANNELS, WIDTH)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def round(self, parents: Tensor, accepted: Tensor) -> None:
        """Verify a tree and commit a path; the exact state takes the path's tokens one by one."""
        size = parents.shape[1]
        query, key = (self._normal(BATCH, size, KEY_HEADS, KEY_DIM).bfloat16() for _ in range(2))
        value = self._normal(BATCH, size, VALUE_HEADS, VALUE_DIM).bfloat16()
        gate, strength = (torch.rand(BATCH, size, VALUE_HEADS, generator=self.generator) for _ in range(2))
        log_decay, beta = gate * SLOWEST_DECAYS.log(), strength.bfloat16()
        self.nodes.add_columns(self._window, self._normal(BATCH, CHANNELS, size), parents)
        self.nodes.solve(self.state, query, key, value, log_decay, beta, parents, True)
        inputs = (value, query, key, log_decay, beta)
        for row, node in enumerate(accepted.tolist()):
            path = oracle.path(parents[row].tolist(), node)
            if path:
                chain = torch.arange(-1, len(path) - 1)[None]
                no_prefix = [x[row : row + 1, :0] for x in (value, key, log_decay)]
                mask = torch.zeros(1, len(path), 0, dtype=torch.bool)
                states = oracle.solve(
                    *(x[row : row + 1, path] for x in inputs),
                    self.exact[row : row + 1],
                    chain,
                    *no_prefix,
                    mask,
                    1.0,
                    True,
                )[-1]
                self.exact[row] = states[0][len(path) - 1]
        self.nodes.commit_(self.state, self._window, parents, accepted)

    def materialize(self) -> Tensor:
        self.nodes.materialize_(self.state)
        return self.state


TREE = torch.tensor([-1, 0, 0, 1, 3])


@pytest.mark.parametrize("commits", [1, 2500])
@pytest.mark.parametrize("make_nodes", POLICIES)
def test_state_after_commits_equals_the_float64_recurrence(make_nodes: type[Nodes], commits: int) -> None:
    """Case D21: sglang#28695, vllm#49887. States were rebuilt from a stash of low precision."""
    layer = Layer(make_nodes)
    for number in range(commits):
        rows = torch.arange(BATCH) + number
        layer.round(TREE.expand(BATCH, -1), torch.tensor([-1, 0, 2, 3, 4])[rows % 5] if number else rows + 2)
    assert relative_error(layer.materialize(), layer.exact) <= STATE_AFTER_COMMITS


@pytest.mark.parametrize("make_nodes", POLICIES)
def test_a_path_longer_than_the_ring_is_committed_whole(make_nodes: type[Nodes]) -> None:
    layer = Layer(make_nodes)
    long = torch.arange(-1, _RING_ROWS + 6).expand(BATCH, -1)
    for accepted in ([2, _RING_ROWS + 5, -1], [_RING_ROWS + 6, 1, _RING_ROWS - 1], [0, 0, 0]):
        layer.round(long, torch.tensor(accepted))
    assert relative_error(layer.materialize(), layer.exact) <= STATE_AFTER_COMMITS


@pytest.mark.parametrize("make_nodes", POLICIES)
def test_accepting_a_padding_node_leaves_the_state(make_nodes: type[Nodes]) -> None:
    layer = Layer(make_nodes)
    for accepted in ([2, 3, 3], [3, 0, 3]):
        layer.round(torch.tensor([-1, 0, 0, PADDING]).expand(BATCH, -1), torch.tensor(accepted))
    assert relative_error(layer.materialize(), layer.exact) <= STATE_AFTER_COMMITS


def test_deferred_commits_write_a_row_only_when_its_ring_is_full() -> None:
    layer = Layer(DeferredNodes)
    before = layer.state.clone()
    changed = []
    for _ in range(2 * _RING_ROWS):
        layer.round(TREE.expand(BATCH, -1), torch.tensor([4, 0, -1]))  # paths of four nodes, of one, and of none
        changed.append((layer.state != before).flatten(1).any(1).tolist())
        before = layer.state.clone()
    rows = [[number for number, rows in enumerate(changed) if rows[row]] for row in range(BATCH)]
    every = _RING_ROWS // 4
    assert rows[0] == list(range(every, 2 * _RING_ROWS, every))
    assert rows[1] == [_RING_ROWS]
    assert rows[2] == []


def test_fused_commits_reach_the_state_when_the_next_tree_begins() -> None:
    immediate, fused = Layer(WyNodes), Layer(FusedNodes)
    for number in range(3):
        waiting = immediate.state.clone()
        for layer in (immediate, fused):
            layer.round(TREE.expand(BATCH, -1), torch.tensor([4, 2, 0]))
        # what the round before last accepted is in, what this one accepted is not
        assert relative_error(fused.state, waiting) <= STATE_AFTER_COMMITS, number
        assert relative_error(fused.state, immediate.state) > STATE_AFTER_COMMITS


@pytest.mark.parametrize("make_nodes", POLICIES)
def test_rows_reordered_with_commits_waiting_go_on_as_what_they_were(make_nodes: type[Nodes]) -> None:
    model = plain_model("qwen3_next")
    prompt, mask = left_padded([6, 3, 9], seed=5)
    index = torch.tensor([2, 0, 0])
    first, second = random_tokens(3, 5, seed=1), random_tokens(3, 5, seed=2)
    accepted = torch.tensor([4, -1, 2])

    def play(rows: Tensor, reorder: bool) -> list[Tensor]:
        session = Session(model, make_nodes)
        session.prefill(prompt[rows], mask[rows])
        session.extend(first[rows], TREE.expand(3, -1))
        session.commit(accepted[rows])
        if reorder:
            session.cache.reorder_rows(index)
        logits = session.extend(second, TREE.expand(3, -1))
        session.commit(torch.tensor([3, 1, 4]))
        return [logits, *(committed_state(layer) for layer in session.cache.state_layers)]

    for ours, expected in zip(play(torch.arange(3), True), play(index, False), strict=True):
        assert relative_error(ours, expected) <= STORES_FLOAT32


def test_all_policies_give_the_same_tokens_in_the_same_rounds(family: str, drafting: Drafting) -> None:
    prompt, mask = left_padded([6, 13, 1], seed=4)
    text = greedy(plain_model(family), prompt, mask, 40)
    outputs = [
        speculative(compiled_model(family, commit=commit), prompt, mask, max_new_tokens=30, **drafting(text, prompt))
        for commit in COMMIT_POLICIES
    ]
    for output in outputs:
        assert output.sequences.tolist() == text[:, :-10].tolist()
        assert output.speculation.rounds == outputs[0].speculation.rounds
    kept = [output.speculation.state_bytes for output in outputs]
    assert kept[0] <= min(kept[1:])
    assert kept[3] == max(kept)


@pytest.mark.parametrize("commit", COMMIT_POLICIES)
def test_the_cache_in_the_output_has_all_commits_folded_in(family: str, commit: str) -> None:
    """Plain generation continues it correctly."""
    model = plain_model(family)
    prompt, mask = left_padded([7], seed=3)
    output = speculative(
        compiled_model(family, commit=commit), prompt, mask, max_new_tokens=9, prompt_lookup_num_tokens=3
    )
    cache = output.get("past_key_values", output.get("cache"))
    keyword = Session(model).cache_keyword
    seen = {"attention_mask": torch.ones_like(output.sequences), keyword: cache}
    again = model.generate(output.sequences, max_new_tokens=12, do_sample=False, pad_token_id=0, **seen)
    plain = greedy(model, prompt, mask, 21)
    assert again.tolist() == plain.tolist()
