"""What is being compiled shows on a terminal, there alone, and leaves nothing behind."""

import io
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import transformers.utils.logging

import treewy
from models import fresh_model, random_tokens
from treewy import _progress
from treewy._compiled_session import CompiledTarget
from treewy._progress import compiling

LOG = logging.getLogger("treewy.test")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make standard error a terminal that can move its cursor; in a fixture pytest would capture it again."""
    for name in ("TREEWY_PROGRESS", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(transformers.utils.logging, "_tqdm_active", True)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def redraw() -> str:
    """What is shown now, without what moves the cursor."""
    assert _progress._display is not None
    return str(_progress._display.get_renderable())


def test_a_compilation_shows_its_steps_and_clears_them(
    monkeypatch: pytest.MonkeyPatch, nothing_compiled_is_kept: None, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = terminal_of(monkeypatch)
    model = treewy.compile(fresh_model("qwen3_next short"), backend="aot_eager")
    model.generate.target = CompiledTarget(model, "eager", "deferred")
    streams = sys.stdout, sys.stderr
    model.generate(random_tokens(1, 6, seed=1), prompt_lookup_num_tokens=3, max_new_tokens=4, do_sample=False)
    shown = terminal.getvalue()
    assert "treewy: tracing and compiling 1 nodes x 1 rows, 0 s" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") > 0  # the cursor is hidden and comes back
    assert shown.endswith("\x1b[2K")  # the line is cleared
    assert (sys.stdout, sys.stderr) == streams
    assert capsys.readouterr().out == ""


def disable_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.utils.logging, "_tqdm_active", False)


@pytest.mark.parametrize(
    "silence",
    [
        lambda monkeypatch: monkeypatch.setattr(sys.stderr, "isatty", lambda: False),
        lambda monkeypatch: monkeypatch.setenv("TREEWY_PROGRESS", "0"),
        disable_bars,
    ],
    ids=["no terminal", "environment", "transformers"],
)
def test_it_is_silent_where_nobody_wants_it(
    monkeypatch: pytest.MonkeyPatch, silence: Callable[[pytest.MonkeyPatch], None]
) -> None:
    terminal = terminal_of(monkeypatch)
    monkeypatch.setenv("FORCE_COLOR", "1")  # takes any file for a terminal, but only colours are asked for
    silence(monkeypatch)
    with compiling(LOG, "compiling this"):
        pass
    assert terminal.getvalue() == ""


def test_it_is_silent_without_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal_of(monkeypatch)
    monkeypatch.setattr(sys, "stderr", None)
    with compiling(LOG, "compiling this"):
        assert _progress._display is None


def test_threads_share_one_display_with_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    inside, leave = threading.Barrier(3), [threading.Event(), threading.Event()]

    def work(number: int) -> None:
        with compiling(LOG, f"outer {number}"), compiling(LOG, f"inner {number}"):
            inside.wait(10)
            assert leave[number].wait(10)

    with ThreadPoolExecutor(2) as pool:
        works = [pool.submit(work, number) for number in range(2)]
        inside.wait(10)
        display, both = _progress._display, redraw()
        leave[0].set()
        works[0].result(10)
        assert _progress._display is display
        one = redraw()
        leave[1].set()
        works[1].result(10)
    assert sorted(both.splitlines()) == ["treewy: inner 0, 0 s", "treewy: inner 1, 0 s"]
    assert one == "treewy: inner 1, 0 s"
    assert _progress._display is None
    assert terminal.getvalue().count("\x1b[?25h") == 1


def test_a_failure_ends_the_display_and_is_not_logged_as_done(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal_of(monkeypatch)
    caplog.set_level(logging.INFO, "treewy")
    with pytest.raises(RuntimeError, match="no idea"), compiling(LOG, "compiling this"):
        raise RuntimeError("no idea")
    assert (_progress._display, _progress._under_way, caplog.messages) == (None, [], [])
    with compiling(LOG, "compiling that"):
        pass
    (record,) = caplog.records
    assert (record.name, record.levelname, record.getMessage()) == ("treewy.test", "INFO", "compiling that: 0.0 s")


def test_no_handler_and_no_level_is_set() -> None:
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.split(".")[0] == "treewy"]
    assert len(loggers) >= 4
    assert all(not log.handlers and log.propagate and log.level == logging.NOTSET for log in loggers)
