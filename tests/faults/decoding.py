"""Mistakes of acceptance: greedy and sampled choices, where a text ends, and statistics."""

from faults.fault import Fault

_DECODING = "treewy_compile/_decoding.py"
_SAMPLING = "treewy_compile/_sampling.py"
_SAMPLE = "ops/_sample.py"
_ROUNDS = "treewy_compile/_rounds.py"
_PLANTING = "treewy_compile/_planting.py"
_EQUALITY = "tests/test_generate_equality.py::"
_CONTRACT = "tests/test_generate_contract.py::"
_CASES = "tests/test_cases.py::"
_RULE = "tests/test_sampling.py::test_the_emitted_token_has_the_target_distribution_exactly"
_TREES = "tests/test_sampling.py::test_every_path_of_a_tree_has_the_target_distribution"
_WALK = "tests/test_greedy_decoding.py::test_rows_emit_and_commit_what_a_walk_from_the_root_does"
_LITERAL = "tests/ops/test_sample.py::test_rows_follow_a_literal_walk"
_COMPILED = "tests/test_compiled_sampling.py::"
_STATISTICS = _CONTRACT + "test_statistics_are_those_of_the_script"

DECODING = [
    Fault(
        "the bonus token is the choice behind the root",
        "treewy_compile/_greedy.py",
        "return node, chosen.gather(1, node.clamp(min=0)[:, None])[:, 0]",
        "return node, chosen[:, 0]",
        (_CONTRACT + "test_max_length_counts_the_prompt[scripted-20]",),
    ),
    Fault(
        "a draft is compared with the choice behind itself",
        "treewy_compile/_accept.py",
        "expected = chosen.gather(1, parents.clamp(min=0))",
        "expected = chosen",
        (_STATISTICS + "[None-every draft right]",),
    ),
    Fault(
        "a node is accepted whatever its ancestors are",
        "treewy_compile/_accept.py",
        "accepted = (agrees[:, None] | ~on_path).all(dim=-1) & (parents != PADDING)",
        "accepted = agrees & (parents != PADDING)",
        (_WALK,),
    ),
    Fault(
        "the last accepted node is taken for the deepest",
        "treewy_compile/_accept.py",
        "rank = (depths(parents) + 1) * size - index",
        "rank = index.expand(batch, -1)",
        (_WALK,),
    ),
    Fault(
        "the number of accepted tokens less one is the node",
        _DECODING,
        "last = path.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]",
        "last = (count - 1).clamp(min=0)",
        (_CASES + "test_the_accepted_path_is_committed_wherever_its_nodes_lie[2-path6-qwen3_next]",),
    ),
    Fault(
        "an end of sequence is looked for in the last token only",
        _DECODING,
        ".any(dim=2) & (index < count[:, None])",
        ".any(dim=2) & (index == count[:, None] - 1)",
        (_STATISTICS + "[None-cut by eos]",),
    ),
    Fault(
        "tokens behind an end of sequence are emitted",
        _DECODING,
        "found.int().argmax(dim=1) + 1, count)",
        "count, count)",
        (_STATISTICS + "[None-cut by eos]",),
    ),
    Fault(
        "rows that have ended are verified further",
        _PLANTING,
        "if most < 0:\n        return [], 0",
        "most = max(0, most)",
        (_EQUALITY + "test_rows_that_end_early_stay_as_they_are[qwen3_next]",),
    ),
    Fault(
        "a text may be one token too long",
        _DECODING,
        "max(1, self._max_length - length)",
        "max(1, self._max_length - length + 1)",
        (_EQUALITY + "test_no_more_tokens_than_asked_for_when_the_draft_is_longer[1-0-qwen3_next]",),
    ),
    Fault(
        "drafts go one token beyond the room that is left",
        _PLANTING,
        "-1 if has_ended else room - 1",
        "-1 if has_ended else room",
        (_STATISTICS + "[None-cut to the room in the first round]",),
    ),
    Fault(
        "of siblings with the same token only the first is followed",
        _DECODING,
        "reached = children",
        "reached = children[:1]",
        (_WALK,),
    ),
    Fault(
        "processors see the text before the round at every node",
        _DECODING,
        "self.scores.of_row(tree.row, text, logits[reached[0]])",
        "self.scores.of_row(tree.row, text[:start], logits[reached[0]])",
        ("tests/test_processors_and_criteria.py::test_processors_see_what_they_see_in_plain_generation",),
    ),
    Fault(
        "an accepted token counts as the bonus token where an end of sequence cuts",
        _DECODING,
        "accepted = torch.minimum(count, length - 1).clamp(min=0)",
        "accepted = (count - 1).clamp(min=0)",
        (_STATISTICS + "[None-cut by eos]",),
    ),
    Fault(
        "the acceptance of a depth counts that of the depth before",
        "treewy_compile/_stats.py",
        "level < accepted",
        "level <= accepted",
        (_STATISTICS + "[None-every draft wrong]",),
    ),
    Fault(
        "all rows of a round count as one",
        "treewy_compile/_stats.py",
        "self._row_rounds += len(num_tokens)",
        "self._row_rounds += 1",
        (_CONTRACT + "test_statistics_of_a_batch_count_rows_until_they_end[qwen3_next]",),
    ),
    Fault(
        "a row does not count in the round that ends it",
        _ROUNDS,
        "enumerate(self.ended) if not ended]",
        "enumerate(self.ended) if not ended and not emission.on_host[row].ended]",
        (_STATISTICS + "[None-cut by eos]",),
    ),
    Fault(
        "criteria of the user's own are not asked",
        _DECODING,
        "not self.scores.textless or len(others) > 0",
        "not self.scores.textless",
        ("tests/test_processors_and_criteria.py::test_criteria_of_the_user_end_a_text_where_they_end_the_plain_one",),
    ),
    Fault(
        "only the first set of end tokens is looked at",
        _DECODING,
        "torch.empty(0, dtype=torch.int64), *eos])",
        "torch.empty(0, dtype=torch.int64), *eos[:1]])",
        ("tests/test_processors_and_criteria.py::test_criteria_of_the_user_end_a_text_where_they_end_the_plain_one",),
    ),
    Fault(
        "all rows get the scores of row 0",
        "treewy_compile/_scores.py",
        "return scores[row % places]",
        "return scores[0]",
        ("tests/test_processors_and_criteria.py::test_processors_see_what_they_see_in_plain_generation",),
    ),
    Fault(
        "kept bytes are counted when they have been given up",
        _ROUNDS,
        "            state_bytes,\n",
        "            cache.num_node_bytes,\n",
        (_CONTRACT + "test_kept_bytes_are_fewer_than_those_of_snapshots[qwen3_next-scripted]",),
    ),
    Fault(
        "the draft's distribution is not subtracted behind a rejection",
        _SAMPLE,
        "residual = (probs - drawn_from).clamp(min=0.0)",
        "residual = probs.clone()",
        (_RULE,),
    ),
    Fault(
        "the ratio of acceptance is upside down",
        _SAMPLE,
        "ratio = probs.gather(1, place) / drawn_from.gather(1, place)",
        "ratio = drawn_from.gather(1, place) / probs.gather(1, place)",
        (_RULE,),
    ),
    Fault(
        "siblings drawn without replacement are taken for draws with replacement",
        _SAMPLE,
        "draft_probs = draft_probs.scatter(1, place, 0.0)",
        "pass",
        (_RULE,),
    ),
    Fault(
        "the token behind rejected siblings is drawn from the target's own distribution",
        _SAMPLE,
        "torch.where(left > 0, left / exponential, -1.0)",
        "(probs[torch.arange(len(left)), node.clamp(min=0)] / exponential)",
        (_LITERAL + "[top]", _TREES + "[top-(2, 2)]"),
    ),
    Fault(
        "siblings share one random number",
        _SAMPLE,
        "(uniform[:, child] < accept)",
        "(uniform[:, 0] < accept)",
        (_LITERAL + "[top]", _TREES + "[top-(2, 2)]"),
    ),
    Fault(
        "a rejected child stays rejected where nothing is left to draw from",
        _SAMPLE,
        "torch.where(is_left, ratio.clamp(max=1.0), 1.0)[:, 0]",
        "ratio.clamp(max=1.0)[:, 0]",
        ("tests/ops/test_sample.py::test_a_child_behind_which_nothing_would_be_left_is_accepted[top]",),
    ),
    Fault(
        "children are compared with the distribution of another parent",
        _SAMPLING,
        "index[:, :size].clamp(0, number - 1)",
        "index[:, :size].sub(1).clamp(0, number - 1)",
        (_TREES + "[without_replacement-(2, 2)]",),
    ),
    Fault(
        "acceptance is not drawn from the generator that was given",
        _SAMPLING,
        "draw_into(place, generator=generator)",
        "draw_into(place)",
        ("tests/test_sampled_settings.py::test_a_generator_gives_the_same_text_again_and_leaves_pytorchs_own_alone",),
    ),
    Fault(
        "tokens without probability are drawn when the others run out",
        _SAMPLING,
        "arrival.values >= 0",
        "arrival.values > -2",
        ("tests/test_sampling.py::test_draws_without_replacement_run_out_of_outcomes",),
    ),
    Fault(
        "a draft of no possible distribution is not refused",
        "treewy_compile/_sampling.py",
        "        draft.check_draft_probs(vocab_size)",
        "        pass",
        ("tests/test_bad_drafts.py::test_a_draft_that_cannot_be_sampled_from_is_refused",),
    ),
    Fault(
        "what was compiled for some settings of processors serves others",
        "treewy_compile/_device_choice.py",
        "return type(self), self.scores.settings",
        "return type(self), ()",
        (_COMPILED + "test_equal_settings_are_compiled_once_and_others_compile_the_acceptance_alone",),
    ),
    Fault(
        "a compiled acceptance reads processors that a user may change",
        "treewy_compile/_scores.py",
        "processors = copy.deepcopy(self._processors)",
        "processors = self._processors",
        (_COMPILED + "test_processors_that_a_user_changes_are_not_those_that_were_compiled",),
    ),
    Fault(
        "a compiled round emits what was drawn from no distribution",
        "treewy_compile/_compiled_session.py",
        "refuse_unsound(sound)",
        "pass",
        (_COMPILED + "test_scores_that_are_no_distribution_raise_in_a_compiled_round_and_the_model_stays_usable",),
    ),
    Fault(
        "a compiled round ends texts where those of the generation before ended",
        "treewy_compile/_compiled_forward.py",
        "if of_choice.eos_given is not eos:",
        "if of_choice.eos_given is None:",
        ("tests/test_compiled_reuse.py::test_a_text_ends_at_its_own_tokens",),
    ),
    Fault(
        "what is written behind a text goes by its longest row",
        "treewy_compile/_texts.py",
        "self._counts = self._counts + num_tokens",
        "self._counts = self._counts + max(counts)",
        ("tests/test_texts.py::test_rows_are_the_prompt_and_what_was_added",),
    ),
]
