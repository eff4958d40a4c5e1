"""What is being compiled or captured: shown on a terminal while it lasts, and logged with its seconds afterwards."""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.live import Live
from rich.text import Text
from transformers.utils.logging import is_progress_bar_enabled

_lock = threading.Lock()
_under_way: list[tuple[int, str, float]] = []  # thread, what and since when, in the order in which they began
_display: Live | None = None


@contextmanager
def compiling(log: logging.Logger, what: str) -> Iterator[None]:
    """Say what takes its time: on standard error while it lasts, and to a logger when it is done.

    Shown only on a terminal, and not where ``TREEWY_PROGRESS=0`` is set or transformers is told to show no progress
    bars. Threads share one display with a line each; within one another only the innermost is shown.

    Args:
        log: Of the module that does it; gets the seconds at level INFO.
        what: "compiling 16 nodes x 2 rows", for example.

    Yields:
        Nothing.

    Example:
        >>> with compiling(logging.getLogger("treewy.example"), "compiling 16 nodes x 2 rows"):
        ...     pass

    Source:
        Live displays of rich.
    """
    entry = threading.get_ident(), what, time.monotonic()
    shown = _is_wanted()
    if shown:
        with _lock:
            _under_way.append(entry)
            _follow()
    try:
        yield
    finally:
        if shown:
            with _lock:
                _under_way.remove(entry)
                _follow()
    log.info("%s: %.1f s", what, time.monotonic() - entry[2])


def _is_wanted() -> bool:
    return (
        os.environ.get("TREEWY_PROGRESS") != "0"
        and is_progress_bar_enabled()
        and sys.stderr is not None
        and sys.stderr.isatty()
    )


def _follow() -> None:
    """Begin the display with the first entry, and end it with the last; a terminal that is gone stops nobody."""
    with suppress(OSError):
        _show()


def _show() -> None:
    global _display
    if _under_way and _display is None:
        # What others print is left alone: to redirect it, rich would replace sys.stdout and sys.stderr.
        _display = Live(
            get_renderable=_lines,
            console=Console(stderr=True),
            refresh_per_second=2,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        _display.start(refresh=True)
    elif _display is not None and not _under_way:
        _display.stop()
        _display = None


def _lines() -> Text:
    innermost = {thread: (what, since) for thread, what, since in list(_under_way)}
    now = time.monotonic()
    lines = (f"treewy: {what}, {now - since:.0f} s" for what, since in innermost.values())
    return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")
