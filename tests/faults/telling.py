"""Mistakes in what is told of compiling: explanations and progress."""

from faults.fault import Fault

_EXPLAIN = "tests/test_explain.py::"
_PROGRESS = "tests/test_progress.py::"

TELLING = [
    Fault(
        "operators are promised for a model that is refused",
        "treewy_compile/_explain.py",
        "info.operators if info and is_compilable else ()",
        "info.operators if info else ()",
        (_EXPLAIN + "test_a_refused_model_is_explained_with_the_reason[BambaForCausalLM]",),
    ),
    Fault(
        "what is compiled is listed only where it is captured",
        "treewy_compile/_compiled_session.py",
        "            if forward.operators\n",
        "            if forward.is_captured\n",
        (_EXPLAIN + "test_what_is_compiled_is_listed_with_the_operators_of_its_graph",),
    ),
    Fault(
        "progress is shown where there is no terminal",
        "treewy_compile/_progress.py",
        "        and sys.stderr.isatty()\n",
        "",
        (_PROGRESS + "test_it_is_silent_where_nobody_wants_it[no terminal]",),
    ),
    Fault(
        "whoever is ready first ends the display of all threads",
        "treewy_compile/_progress.py",
        "elif _display is not None and not _under_way:",
        "elif _display is not None:",
        (_PROGRESS + "test_threads_share_one_display_with_a_line_each",),
    ),
]
