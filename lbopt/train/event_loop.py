"""Event loops that let what has begun come to its end.

Orbax reads all arrays of a checkpoint at once, and closes its event loop as soon as one of them cannot be read. What was still being
read then complains to stderr, thousands of lines from threads of its own, over the one line that matters.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from typing import Any


class _Finishing(asyncio.SelectorEventLoop):
    def close(self) -> None:
        """Wait for all tasks, whatever becomes of them, then close; at once on Ctrl-C."""
        if (
            not self.is_closed()
            and not self.is_running()
            and not isinstance(sys.exc_info()[1], KeyboardInterrupt)
        ):
            tasks = asyncio.all_tasks(self)
            if tasks:
                self.run_until_complete(asyncio.wait(tasks))
                for task in tasks:
                    if not task.cancelled():
                        task.exception()  # now it has been looked at
        super().close()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Pass over tasks that failed as others had before them, whose failure is the one that is raised."""
        if "never retrieved" not in context["message"]:
            super().call_exception_handler(context)


class _Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return _Finishing()


@contextlib.contextmanager
def finishing() -> Iterator[None]:
    """Let event loops that are made in here wait for their tasks when they are closed."""
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(_Policy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(before)
