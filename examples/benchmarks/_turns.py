"""Processes that prepare at the same time, for compiling takes minutes, and are measured one at a time."""

import time
import traceback
from collections.abc import Callable, Hashable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Protocol


class Subject(Protocol):
    """What a process measures."""

    def prepare(self, what: Any) -> None:
        """Compile what it takes."""

    def measure(self, what: Any) -> dict[str, Any]:
        """Return what was measured."""


class Turn:
    """A process of its own for some measurements.

    Args:
        make: Makes the subject there; picklable.
        whats: What to prepare, in this order.
        prepare_until: Time (``time.time``) after which nothing more is prepared.
    """

    def __init__(self, make: Callable[[], Subject], whats: Sequence[Hashable], prepare_until: float) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, make, whats, prepare_until))
        self._process.start()
        theirs.close()

    def prepared(self, until: float) -> set[Hashable]:
        """Wait for what it has prepared; nothing, and the process ends, if it does not say so in time."""
        found: set[Hashable] | None = self._answer(until)
        return found or set()

    def measure(self, what: Hashable, until: float) -> dict[str, Any] | None:
        """Let it measure; None, and the process ends, if it takes too long."""
        if not self._process.is_alive():
            return None
        self._connection.send(what)
        answer: dict[str, Any] | None = self._answer(until)
        return answer

    def end(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()

    def _answer(self, until: float) -> Any:
        if not self._connection.poll(max(0.0, until - time.time())):
            self.end()  # lest it disturb the others
            return None
        try:
            answer = self._connection.recv()
        except EOFError:
            raise RuntimeError("a measuring process has died; see above") from None
        if isinstance(answer, str):
            raise RuntimeError(f"a measuring process has failed:\n{answer}")
        return answer


def _work(connection: Connection, make: Callable[[], Subject], whats: Sequence[Hashable], prepare_until: float) -> None:
    try:
        subject = make()
        prepared = set()
        for what in whats:
            if time.time() > prepare_until:
                break
            subject.prepare(what)
            prepared.add(what)
        connection.send(prepared)
        while True:
            connection.send(subject.measure(connection.recv()))
    except EOFError:  # whoever asks is gone
        return
    except Exception:
        connection.send(traceback.format_exc())
