"""One task at a time on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs a task while its caller goes on; knows nothing of what it does.

    The thread ends with the process, so nobody waits for a task whose caller has failed.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, task: Callable[[], None]) -> None:
        """Begin a task, once the one before has ended."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(task,), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when the task has ended; what it raised is raised here."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001  # raised where it is waited for
            self._error = error
