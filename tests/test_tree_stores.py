"""Any tree of any tokens, without a drafter: logits of its nodes, and the stores after any node is committed."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from models import (
    ATTENTION_ONLY,
    FAMILIES,
    POLICIES,
    SLIDING_WINDOW,
    VARIANTS,
    VOCAB_SIZE,
    assert_stores_equal_plain_run,
    left_padded,
    plain_model,
    token_by_token,
)
from parents import widths
from replay import History, MakeNodes, Replay, TreeRound, assert_close_stores, few, histories
from tolerances import LOGITS_FLOAT32, relative_error
from treewy._session import Session
from treewy.ops import PADDING


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
