"""An asyncio loop that waits for pending tasks before it closes.

Orbax reads all arrays of a checkpoint at once, and closes its event loop as soon as one of them
cannot be read. Threads that still read the others then write thousands of lines to stderr, and hide
the one line that matters.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from typing import Any


class _Finishing(asyncio.SelectorEventLoop):
    def close(self) -> None:
        """Wait for all tasks, ignoring their errors, then close; close at once on Ctrl-C."""
        interrupted = isinstance(sys.exc_info()[1], KeyboardInterrupt)
        if not (self.is_closed() or self.is_running() or interrupted):
            tasks = asyncio.all_tasks(self)
            if tasks:
                self.run_until_complete(asyncio.wait(tasks))
            for task in tasks:
                if not task.cancelled():
                    task.exception()  # an exception that nobody asks for is printed
        super().close()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Print nothing about a task that failed after another one: the first failure is raised."""
        if "never retrieved" not in context["message"]:
            super().call_exception_handler(context)


class _FinishingPolicy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return _Finishing()


@contextlib.contextmanager
def finishing() -> Iterator[None]:
    """Make every new event loop of this process wait for its tasks, until the block ends."""
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(_FinishingPolicy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(before)
