"""Train by `lbopt train`, but die by SIGKILL: `python killed_run.py WHERE STEP ARGUMENTS...`.

WHERE is "step" (before the step after STEP) or "save" (in the background thread, when checkpoint
STEP is written, before it gets its name).
"""

import dataclasses
import os
import pathlib
import signal
import sys

from watched_step import WatchedStep

from lbopt.cli import _train, main


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_before_the_step_after(last, train=_train.train):
    def train_until(run, *rest):
        def before(state, batch):
            if int(state.step) == last:
                die()

        step = WatchedStep(run.train_step, before)
        return train(dataclasses.replace(run, train_step=step), *rest)

    _train.train = train_until


def die_when_committing(last):
    def watch(event, arguments):
        if event == "os.rename" and pathlib.Path(os.fsdecode(arguments[1])).name == str(last):
            die()

    sys.addaudithook(watch)


if __name__ == "__main__":
    {"step": die_before_the_step_after, "save": die_when_committing}[sys.argv[1]](int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
