"""Mistakes around the draft model: its own stores, its distributions, and who else is affected."""

from faults.fault import Fault

_CONFIDENT = "tests/test_confident_drafts.py::"
_SETTINGS = "tests/test_sampled_settings.py::"
_ISOLATION = "tests/test_compile_isolation.py::"
_COMPILED = "tests/test_compiled_drafts.py::"
_PLANTING = "treewy_compile/_planting.py"
_FOLLOWS = _COMPILED + "test_drafts_follow_any_text"
_ASSISTANT = "treewy_compile/_assistant.py"
_ACCEPT = "treewy_compile/_accept.py"
_ANCHORS = "passes/_anchors.py"
_DRAFTERS = "tests/test_drafters.py::"
_PROPOSALS = _DRAFTERS + "test_every_proposal_is_the_one_computed_from_the_text_alone"
_SAMPLED = "tests/test_sampled_generate.py::"

DRAFTING = [
    Fault(
        "the draft model is fed a token that it has committed",
        _ASSISTANT,
        "self._pending + after_root + 1, 0)",
        "self._pending + after_root, 0)",
        (_PROPOSALS + "[widths0-qwen3_next]",),
    ),
    Fault(
        "the draft model commits the last emitted token",
        _ACCEPT,
        "(after_root < num_emitted[:, None] - 1)",
        "(after_root < num_emitted[:, None])",
        (_CONFIDENT + "test_the_target_may_go_on_with_what_the_drafter_held_back",),
    ),
    Fault(
        "the draft model keeps what the target rejected",
        _ACCEPT,
        "agrees = (after_root < 0) | (token_ids == expected)",
        "agrees = torch.ones_like(after_root, dtype=torch.bool)",
        (_PROPOSALS + "[widths1-qwen3_next]", _PROPOSALS),
    ),
    Fault(
        "tokens that wait to be fed are no ancestors of the drafts",
        _ASSISTANT,
        "torch.where(index < 0, root[:, None], first_draft + index)",
        "torch.where(index < 0, -1, first_draft + index)",
        (_PROPOSALS + "[widths1-qwen3_next]", _PROPOSALS),
    ),
    Fault(
        "the draft tree takes its parents among the drafts, waiting tokens not counted",
        _ASSISTANT,
        "torch.where(index < 0, root[:, None], first_draft + index)",
        "torch.where(index < 0, root[:, None], index)",
        (_PROPOSALS + "[widths1-qwen3_next]", _PROPOSALS),
    ),
    Fault(
        "a chain ends before the token that is not likely enough",
        _ASSISTANT,
        "levels.add(chosen, parents, counts_now, probs)",
        "levels.add(chosen, parents, counts_now & (probs.amax(-1) >= (self._confidence or 0.0)), probs)",
        (_CONFIDENT + "test_without_a_tree_a_chain_ends_behind_the_first_token_below_the_threshold",),
    ),
    Fault(
        "drafts are drawn before the processors, and said to be drawn behind them",
        _ASSISTANT,
        "self._choose(scores, probs, max(ranks) + 1)",
        "self._choose(above_logits, above_logits.float().softmax(dim=-1), max(ranks) + 1)",
        (_SAMPLED + "test_continuations_have_the_distribution_of_plain_sampling[another model, with replacement]",),
    ),
    Fault(
        "drafts are not drawn from the generator that was given",
        _ASSISTANT,
        "generator = None if self._context is None else self._context.generator",
        "generator = None",
        (_SETTINGS + "test_a_generator_gives_the_same_text_again_and_leaves_pytorchs_own_alone[shape0]",),
    ),
    Fault(
        "the draft model drafts the token that only the target may emit",
        _ASSISTANT,
        "- min(len(text) for text in texts) - 1)]",
        "- min(len(text) for text in texts))]",
        ("tests/test_generate_inputs.py::test_trees_are_as_deep_as_asked_for_and_as_the_row_with_most_room_can_use",),
    ),
    Fault(
        "processors with a memory are shown drafts that are rejected",
        "treewy_compile/_scores.py",
        "LogitsProcessorList(p for p in self._processors if type(p) in _ROWWISE)",
        "self._processors",
        (
            "tests/test_processors_and_criteria.py::"
            "test_a_processor_with_a_memory_gets_exactly_the_calls_of_plain_generation[4-None]",
        ),
    ),
    Fault(
        "drafts are chosen by processors that do not see the pads of a row",
        _ASSISTANT,
        "texts = [torch.cat([pads.to(text), text]) for",
        "texts = [torch.cat([pads.to(text)[:0], text]) for",
        (
            "tests/test_processors_and_criteria.py::"
            "test_a_model_that_drafts_for_itself_is_right_behind_processors_too[begin_suppress_tokens]",
        ),
    ),
    Fault(
        "drafts for sampling are the most probable tokens",
        _ASSISTANT,
        '"without_replacement" if context.do_sample else "top"',
        '"top"',
        (_SETTINGS + "test_drafts_are_drawn_if_the_target_draws_and_nothing_else_was_asked_for",),
    ),
    Fault(
        "prompt lookup continues the earliest occurrence",
        "treewy_compile/_drafters.py",
        "for start in range(len(tokens) - size - 1, -1, -1):",
        "for start in range(len(tokens) - size):",
        (_DRAFTERS + "test_lookup_continues_the_latest_earlier_occurrence_of_the_longest_suffix",),
    ),
    Fault(
        "parents of padding nodes have a row of the draft's distributions",
        "treewy_compile/_draft_tree.py",
        "counts.scatter_add_(1, torch.where(real, self.parents, -1) + 1, real.long())",
        "counts.scatter_add_(1, self.parents.clamp(-1, size - 1) + 1, torch.ones_like(self.parents))",
        ("tests/test_draft_tree.py::test_distributions_are_those_of_the_parents_of_real_nodes_in_their_order",),
    ),
    Fault(
        "a drafter is not reset before a text",
        "treewy_compile/_generate.py",
        "drafter.reset()\n",
        "\n",
        ("tests/test_bad_drafts.py::test_a_drafter_that_failed_may_be_used_again",),
    ),
    Fault(
        "tokens that only the target has are likely drafts",
        _ASSISTANT,
        'value=float("-inf"))',
        "value=9.0)",
        ("tests/test_vocabularies.py::test_a_draft_model_proposes_only_tokens_that_it_has",),
    ),
    Fault(
        "a reordered draft model goes on from the logits of the prompt that it had in that place",
        _ASSISTANT,
        "self._seen[index], self._prompt_logits[index]",
        "self._seen[index], self._prompt_logits",
        (_DRAFTERS + "test_rows_reordered_before_anything_was_emitted_propose_what_their_prompts_call_for",),
    ),
    Fault(
        "the first token of each row is a pad to the draft model",
        _ASSISTANT,
        "session.prefill(prompt, source >= 0)",
        "session.prefill(prompt, source > 0)",
        (_PROPOSALS + "[widths0-qwen3_next]",),
    ),
    Fault(
        "the longest row of a batch cuts the drafts of all",
        _ASSISTANT,
        "- min(len(text) for text in texts)",
        "- max(len(text) for text in texts)",
        ("tests/test_generate_inputs.py::test_trees_are_as_deep_as_asked_for_and_as_the_row_with_most_room_can_use",),
    ),
    Fault(
        "drafters are shown pads",
        "treewy_compile/_texts.py",
        "real = [row[of_row.bool()] for",
        "real = [row for",
        ("tests/test_generate_inputs.py::test_a_drafter_is_shown_the_tokens_of_each_row_without_its_pads",),
    ),
    Fault(
        "drafters are not told what was emitted",
        "treewy_compile/_rounds.py",
        "self._drafter.update(emission.token_ids, emission.num_tokens)",
        "pass",
        (
            "tests/test_stores.py::"
            "test_stores_follow_for_forty_tokens_of_rows_that_accept_differently[qwen3_next-WyNodes]",
        ),
    ),
    Fault(
        "redirections are not undone",
        _ANCHORS,
        "setattr(sys.modules[place[0]], place[1], _originals.pop(place))",
        "_originals.pop(place)",
        (_ISOLATION + "test_redirections_that_overlap_put_the_originals_back_in_any_order",),
    ),
    Fault(
        "every overlapping redirection saves the functions of the one before as the originals",
        _ANCHORS,
        "if _active[place] == 1:",
        "if _active[place] >= 1:",
        (_ISOLATION + "test_redirections_that_overlap_put_the_originals_back_in_any_order",),
    ),
    Fault(
        "redirections are not counted under the lock",
        _ANCHORS,
        "finally:\n        with _lock:",
        "finally:\n        if True:",
        (_ISOLATION + "test_redirections_are_counted_under_a_lock",),
    ),
    Fault(
        "a tree that has grown takes the last path in again",
        "treewy_compile/_static_stores.py",
        '            self.of_layers["", "path_length"].zero_()\n',
        "",
        (_COMPILED + "test_a_tree_grows_by_levels_as_in_the_eager_engine[qwen3_next-deferred]",),
    ),
    Fault(
        "tokens that the draft model has not seen are counted as seen on the device",
        "treewy_compile/_whole_draft.py",
        "torch.where(accepted < 0, 0, after_root + 1)",
        "torch.where(accepted < 0, 0, after_root + 2)",
        (_FOLLOWS + "[levels0]",),
    ),
    Fault(
        "a row to which nothing was emitted loses its root on the device",
        "treewy_compile/_whole_draft.py",
        "torch.where(stays[:, None], root, following)",
        "following",
        (_FOLLOWS + "[levels0]",),
    ),
    Fault(
        "drafts on the device go on behind a text that others have continued",
        "treewy_compile/_drafting_on_device.py",
        "return not self._has_proposed and lengths.tolist() == self._lengths",
        "return True",
        (_COMPILED + "test_drafts_may_be_mixed_with_those_of_others[update]",),
    ),
    Fault(
        "a known tree is verified whole where the text has no room for it",
        _PLANTING,
        "most = [min(limit, len(draft.known_levels)) for limit in most]",
        "most = [min(limit, 0) + len(draft.known_levels) for limit in most]",
        (_COMPILED + "test_trees_become_shallower_where_a_text_ends_and_drafters_can_be_pickled",),
    ),
    Fault(
        "drafters are handed what the engine counts on",
        "treewy_compile/_texts.py",
        "self._counts.clone()",
        "self._counts",
        ("tests/test_texts.py::test_rows_are_the_prompt_and_what_was_added",),
    ),
    Fault(
        "a known tree is planted as it was when the text had more room",
        _PLANTING,
        "or self._last[1] != most:",
        "or False:",
        ("tests/test_planting.py::test_a_tree_of_a_known_shape_is_planted_as_any_other_one",),
    ),
    Fault(
        "a level drafted on the device has the children of other nodes",
        "treewy_compile/_whole_draft.py",
        "(parent - start) * width + rank",
        "(parent - start) + rank",
        (_FOLLOWS + "[levels0]",),
    ),
    Fault(
        "other models of the class are redirected as well",
        _ANCHORS,
        "        if treewy_call is None and treewy_parents is None:\n            return original(*args, **kwargs)\n",
        "        global _last\n"
        "        treewy_call = _last = treewy_call or globals().get('_last')\n"
        "        if treewy_call is None and treewy_parents is None:\n            return original(*args, **kwargs)\n",
        (_ISOLATION + "test_another_model_of_the_class_is_untouched_in_the_middle_of_a_tree_forward",),
    ),
]
