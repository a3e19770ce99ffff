"""An event loop that is closed while its tasks are running."""

import asyncio
import gc

import pytest

from lbopt.cli._event_loop import finishing


def run(error):
    """Run a loop as Orbax does, closing it when its first task fails; return the other's steps."""
    done = []

    async def slow():
        await asyncio.sleep(0.05)
        done.append("slow")
        raise RuntimeError

    async def main():
        main.task = asyncio.create_task(slow())
        await asyncio.sleep(0)
        raise error

    def run_sync():
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(main())
        finally:
            loop.close()

    with finishing(), pytest.raises(type(error)):
        run_sync()
    return done


def test_its_other_tasks_come_to_their_end():
    assert run(ValueError()) == ["slow"]


def test_not_on_ctrl_c():
    assert run(KeyboardInterrupt()) == []


def test_other_loops_are_as_before():
    before = asyncio.get_event_loop_policy()
    with finishing():
        assert asyncio.get_event_loop_policy() is not before
    assert asyncio.get_event_loop_policy() is before


def test_two_that_fail_at_once_are_one_failure(caplog):
    """asyncio would print the traceback of a task that failed before the loop was closed."""

    async def fail():
        raise OSError("full")

    async def both():
        tasks = [asyncio.create_task(fail()) for _ in range(2)]
        await asyncio.sleep(0)
        await tasks[0]

    gc.collect()
    caplog.clear()
    with finishing(), pytest.raises(OSError, match="full"):
        asyncio.run(both())
    gc.collect()
    assert caplog.records == []
