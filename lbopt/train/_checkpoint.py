"""Checkpoints of the whole training state: saved in the background, atomic, the latest and best."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from lbopt import tree
from lbopt.errors import EnvironmentProblem, UserError
from lbopt.job import Job, SoloJob
from lbopt.parallel import TrainState
from lbopt.train import _earlier, _orbax, _replica_memory
from lbopt.train._checksums import mismatch, named, sums_of
from lbopt.train._device_copies import DeviceCopies
from lbopt.train._faults import Damaged, Fault, is_damage, reason_of, unreadable
from lbopt.train._on_disk import ARRAYS, check_files, check_name, require_checkpoint, steps_on_disk
from lbopt.train._ranking import Ranking
from lbopt.train._seal import Seal, read_seal
from lbopt.workdir import checkpoint_root, move_checkpoint

Say = Callable[[str], None]
"""Function that gets a line for the user."""
_LOOKS = 120
_PAUSE_S = 0.5
"""Number of looks, and seconds between two, at a network folder until all processes see the same
checkpoints in it."""
_MARGIN_BYTES = 1 << 17
"""Bytes for the files beside the arrays."""
_KEY_SIZES = {(2,): "threefry2x32", (4,): "rbg (or unsafe_rbg)"}
"""Shapes of key data, and the generators of such keys."""


def _silent(line: str) -> None:
    """Say nothing."""


class _Read(NamedTuple):
    """A checkpoint as it was read, before its checksums are compared.

    Attributes:
      state: The state.
      sums: Checksums that were saved, by the names that the leaves have today.
      slices: Number of slices of each replica's memory that the seal states.
    """

    state: TrainState
    sums: dict[str, str]
    slices: int | None


class Checkpoints:
    """The `checkpoints/` folder of a workdir.

    A checkpoint appears under the number of its step when it is complete. Its seal has the
    checksums of its arrays, and a state that differs from what was saved is never returned.

    Args:
      workdir: The run's folder.
      keep: Number of the latest checkpoints to keep. The best one, and the latest with a finite
        network, are kept besides.
      best_metric: Name of the metric that says which is best, as in `Ranking`.
      read_only: Whether the disk is left as it is.
      always: Steps whose checkpoints are always kept: the ends of phases.
      job: The job that this process belongs to; None for a process alone. All processes of a job
        call the same methods in the same order.
      trains: Whether training goes on from what is restored, so that its random keys must be those
        of this process, and a memory that is rebuilt is told; None for whether it may save too.

    Raises:
      UserError: If there is no checkpoint to read.
      EnvironmentProblem: If the folder cannot be read, or shows the processes different
        checkpoints.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        keep: int = 3,
        best_metric: str = "eval/accuracy",
        read_only: bool = False,
        always: Sequence[int] = (),
        job: Job | None = None,
        trains: bool | None = None,
    ):
        root = checkpoint_root(workdir)
        check_name(str(root), read_only)
        self._folder = root / "checkpoints"
        self._aside = root / "damaged"
        self._is_local = isinstance(root, pathlib.Path)
        self._keep = keep
        self._always = set(always)
        self._read_only = read_only
        self._trains = not read_only if trains is None else trains
        self._job = SoloJob() if job is None else job

        # Processes that saw different checkpoints would resume at different steps.
        steps = self._steps_seen_by_all()
        if read_only:
            require_checkpoint(steps, workdir)
        found = [[step, self._read_metrics(step)] for step in steps]
        found = self._job.from_first("metrics of checkpoints", found)
        self._ranking = Ranking(best_metric, dict(found))

        # Orbax's manager makes a folder in a process alone only.
        if self._job.count > 1:
            if self._job.index == 0 and not read_only:
                with self._writing():
                    self._folder.mkdir(parents=True, exist_ok=True)
            self._job.together("folder of checkpoints", True)
        self._manager = self._open_manager()
        self._no_folders = {
            step for step in steps if self._is_local and not os.path.isdir(self._folder / str(step))
        }

        self._worker = concurrent.futures.ThreadPoolExecutor(1, "lbopt checkpoints")
        self._saving: concurrent.futures.Future[None] | None = None
        self._copies = DeviceCopies(self._worker, self._job)
        self._saved_step = self.latest_step()
        self._was_read_back = False
        self._generator = _generator()

    def _steps_seen_by_all(self) -> list[int]:
        """Return the steps on disk; wait until all processes see the same ones."""
        for _ in range(_LOOKS):
            seen = self._job.together("steps of checkpoints", steps_on_disk(self._folder))
            others = [index for index, steps in enumerate(seen) if steps != seen[0]]
            if not others:
                return seen[0]
            time.sleep(_PAUSE_S)
        other = others[0]
        fix = (
            f"process 0 sees checkpoints of the steps {seen[0]}, process {other} of {seen[other]}; "
            "mount it so that all hosts see the same, then run the same command again"
        )
        raise EnvironmentProblem(str(self._folder), reason=fix, code="mismatch")

    def _open_manager(self) -> _orbax.CheckpointManager:
        create = not self._read_only and self._job.count == 1
        try:
            return _orbax.open_manager(
                self._folder, self._keep, self._chosen, self._read_only, create
            )
        except Exception as error:  # any class, from the storage layers
            fix = f"cannot be read ({reason_of(error)}); make it readable or use another workdir"
            raise EnvironmentProblem(str(self._folder), reason=fix, code="damaged") from error

    def _chosen(self, steps: Sequence[int]) -> set[int]:
        """Return the steps to keep besides the latest ones."""
        others = {self.best_step(), self._ranking.latest_finite(steps)}
        return self._always | {step for step in others if step is not None}

    def _read_metrics(self, step: int) -> dict[str, float]:
        """Return a checkpoint's metrics; none if its seal is damaged, which `restore` reports."""
        try:
            return read_seal(self._folder, step).metrics
        except Exception:  # any class, from the storage layers
            return {}

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, ascending.

        A file or a dangling link in the place of a checkpoint counts as one.
        """
        return sorted(self._no_folders.union(self._manager.all_steps()))

    def latest_step(self) -> int | None:
        """Return the step of the newest checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """Return the step of the best checkpoint by the metric; None if none has it."""
        return self._ranking.best(self.steps())

    def latest_finite_step(self) -> int | None:
        """Return the step of the newest checkpoint with a finite network; None if there is none."""
        return self._ranking.latest_finite(self.steps())

    def would_be_best(self, metrics: Mapping[str, float]) -> bool:
        """Return whether an evaluation is better than that of every checkpoint so far."""
        return self._ranking.would_be_best(metrics)

    def prepare(self, state: TrainState) -> None:
        """Compile in the background what `save` runs on the devices.

        Call at the start of a phase. The next save re-checks whether device memory can hold a copy
        beside peak usage, which includes copies of an earlier phase.
        """
        self._copies.prepare(state)

    def save(
        self,
        state: TrainState,
        metrics: Mapping[str, float] | None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Start to save; returns at once, and the state's buffers may be donated.

        A thread writes a copy of the state that is made on the devices. If they have no room for
        one, this returns when the state is copied to the host.

        Args:
          state: The state after a step.
          metrics: The metrics of the evaluation after that step, if there was one.
          before: Function that the thread calls before it writes.
        """
        step = int(state.step)
        if step == self._saved_step:
            return
        self._finish_saving()
        self._check_space(state)
        self._saved_step = step
        if metrics:
            self._ranking.add(step, metrics)

        # The next step takes the state's own arrays, while the thread still writes.
        leaves, structure = jax.tree.flatten(state)
        if self._copies.fit(leaves):
            copies, sums = self._copies.copy(leaves)
            copied = jax.tree.unflatten(structure, copies)
            self._saving = self._worker.submit(self._write, step, copied, sums, metrics, before)
        else:
            with self._writing():
                self._write(step, state, sums_of(leaves), metrics, before)

    def _write(
        self,
        step: int,
        state: TrainState,
        sums: Sequence[jax.Array],
        metrics: Mapping[str, float] | None,
        before: Callable[[], None],
    ) -> None:
        before()
        seal = Seal(
            step=step,
            sums=named(tree.leaf_names(state), sums),
            metrics=dict(metrics or {}),
            replicas=_replica_memory.count(state),
            parts=_replica_memory.slices_of(state),
            layout=_earlier.NOW,
            generator=self._generator,
        )
        _orbax.save(self._manager, step, state, seal)
        if not self._was_read_back:
            self._manager.wait_until_finished()
            self._read_back(step, state.step)
            self._was_read_back = True

    def _read_back(self, step: int, like: jax.Array) -> None:
        """Read one number of the first checkpoint.

        So a folder out of which nothing can be read is known before the run ends.
        """
        checkpoint = self._folder / str(step)
        try:
            read_seal(self._folder, step)
            found = _orbax.read_array(checkpoint / ARRAYS, "step", like)
            if int(found) != step:
                raise ValueError(f"it says step {int(found)}")
        except Exception as error:  # any class, from the storage layers
            fix = (
                f"this checkpoint was saved and cannot be read back ({reason_of(error)}); use "
                "another workdir"
            )
            raise EnvironmentProblem(str(checkpoint), reason=fix, code="damaged") from error

    def settle(self) -> None:
        """Wait for the background save, ignoring its errors.

        Call before closing what `before` of the last save still uses.
        """
        if self._saving is not None:
            concurrent.futures.wait([self._saving])

    def _finish_saving(self) -> None:
        """Wait for the background save, and raise its error."""
        saving = self._saving
        self._saving = None
        if saving is not None:
            with self._writing():
                saving.result()

    def _check_space(self, state: TrainState) -> None:
        """Raise `EnvironmentProblem` if the disk has no space for a checkpoint."""
        if not self._is_local:
            return
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + _MARGIN_BYTES
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            fix = (
                f"a checkpoint needs {needed / 2**20:.1f} MiB and {free / 2**20:.1f} MiB are free; "
                "free space, then run the same command again"
            )
            raise EnvironmentProblem(str(self._folder), reason=fix, code="resource")

    def restore(self, like: TrainState, step: int, say: Say = _silent) -> TrainState:
        """Read a checkpoint.

        An aggregator's memory is rebuilt if the number of replicas, or of slices of one, has
        changed.

        Args:
          like: Shapes, dtypes and shardings (`Run.shapes`). The run that saved the state may have
            had other shardings and devices.
          step: The step of the checkpoint.
          say: Function that gets a line if something was rebuilt.

        Raises:
          Damaged: If the state differs from the saved one.
          EnvironmentProblem: If it cannot be read now.
        """
        found: _Read | None = None
        fault: Fault | None = None
        try:
            found = self._read(like, step)
        except Exception as error:  # any class, from the storage layers
            fault = self._other_generator(like, step) or self._unreadable(
                step, reason_of(error), is_damage(error)
            )
        faults = self._faults_of_all(f"restored {step}", fault)

        # Each process compares, because it may have read another seal than the others.
        if not faults and found is not None:
            wrong = mismatch(found.state, found.sums)
            fault = self._unreadable(step, wrong, True) if wrong else None
            faults = self._faults_of_all(f"compared {step}", fault)

        if faults or found is None:
            # A checkpoint that some process cannot reach now may be intact.
            damaged = all(each.is_damage for each in faults)
            raise faults[0]._replace(is_damage=damaged).error()
        if not self._trains:  # nothing goes on from memories
            say = _silent
        return _replica_memory.fitted(found.state, like, found.slices, say)

    def _read(self, like: TrainState, step: int) -> _Read:
        """Read a checkpoint, in the layout of this process.

        Raises:
          Exception: If it cannot be read, of any class that the storage layers raise.
        """
        checkpoint = self._folder / str(step)
        check_files(checkpoint)
        seal = read_seal(self._folder, step)
        if self._trains and seal.generator not in (None, self._generator):
            raise ValueError(f"its random keys are those of {seal.generator}")

        arrays = checkpoint / ARRAYS
        shapes = _replica_memory.shapes_for(like, seal.replicas, seal.parts)
        if seal.layout == _earlier.NESTED:
            sums = _earlier.renamed(seal.sums, shapes)
            read_arrays = functools.partial(_orbax.read_arrays, arrays)
            state = _earlier.read(_orbax.described(arrays), shapes, read_arrays)
        else:
            sums = seal.sums
            state = _orbax.read_arrays(arrays, shapes)
        return _Read(_replica_memory.as_now(state), sums, seal.parts)

    def _faults_of_all(self, key: str, ours: Fault | None) -> list[Fault]:
        """Return the faults that the processes of the job have met."""
        return [Fault(*each) for each in self._job.together(key, ours) if each is not None]

    def _unreadable(self, step: int, reason: str, is_damage: bool) -> Fault:
        earlier = [other for other in steps_on_disk(self._folder) if other < step]
        return unreadable(self._folder / str(step), earlier, reason, is_damage)

    def _other_generator(self, like: TrainState, step: int) -> Fault | None:
        """Return the fault of a checkpoint with random keys of another generator; None otherwise.

        A checkpoint of an earlier version does not name its generator, and one that is only looked
        at may be used under another one of the same keys: then the size of the keys decides.
        """
        checkpoint = self._folder / str(step)
        name: str | None = None
        if self._trains:
            with contextlib.suppress(Exception):
                name = read_seal(self._folder, step).generator
        try:
            size = _orbax.described(checkpoint / ARRAYS)["rng"].shape
        except Exception:  # any class, from the storage layers: something else is wrong
            return None
        if size == like.rng.shape and name in (None, _generator()):
            return None

        name = name or _KEY_SIZES.get(size, "the generator of the run that saved it")
        what = f"checkpoint {checkpoint} has the random keys of another generator"
        fix = f"set JAX_DEFAULT_PRNG_IMPL to {name}"
        return Fault("jax_default_prng_impl", _generator(), what, fix, is_damage=False)

    def restore_newest(
        self,
        shapes: Callable[[int], TrainState],
        say: Say = _silent,
        fits: Callable[[int], bool] = lambda step: True,
    ) -> TrainState | None:
        """Read the newest checkpoint that is intact; None if there is none at all.

        Newer ones that are damaged are moved to `damaged/` of the workdir, unless `read_only`.

        Args:
          shapes: Function of the step that returns shapes, dtypes and shardings of its state.
          say: Function that gets a line for each damaged checkpoint.
          fits: Predicate on the step; checkpoints of other steps are passed over.

        Raises:
          EnvironmentProblem: If none is intact, or one cannot be read now.
        """
        damaged: list[tuple[int, Damaged]] = []
        for step in filter(fits, reversed(self.steps())):
            try:
                state = self._restore_twice(shapes(step), step, say)
            except Damaged as error:
                damaged.append((step, error))
                continue

            for other, problem in damaged:
                where = "" if self._read_only else f"; moved to {self._set_aside(other)}"
                say(f"{problem.field}: {problem.what}{where}; going back to step {step}")
            # The open manager still lists the moved checkpoints, whose steps are to be saved again.
            if damaged and not self._read_only:
                self._manager.close()
                self._manager = self._open_manager()
            self._saved_step = step
            return state
        if damaged:
            raise damaged[0][1]
        return None

    def _restore_twice(self, like: TrainState, step: int, say: Say) -> TrainState:
        """Read a checkpoint, and once more if it seems damaged: the reading may be at fault."""
        with contextlib.suppress(Damaged):
            return self.restore(like, step, say)
        return self.restore(like, step, say)

    def _set_aside(self, step: int) -> pathlib.Path:
        """Move a damaged checkpoint away, so that its step can be saved again."""
        taken = [entry.name for entry in self._aside.iterdir()] if self._aside.is_dir() else []
        names = (f"{step}", *(f"{step}-{number}" for number in range(2, 10**6)))
        target = self._aside / next(name for name in names if name not in taken)
        if self._job.index == 0:
            with self._writing():
                move_checkpoint(self._folder / str(step), target)
        self._no_folders.discard(step)
        self._ranking.forget(step)
        self._job.together("damaged checkpoint set aside", step)
        return target

    def wait(self) -> None:
        """Wait until the last save is complete on disk."""
        self._finish_saving()
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for the last save, and close."""
        try:
            self._finish_saving()
        finally:
            self._worker.shutdown(cancel_futures=True)
            with self._writing():
                self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(Exception) if exception[0] else contextlib.nullcontext():
            self.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an error of the storage layers into an `EnvironmentProblem` of one line."""
        try:
            yield
        except (UserError, EnvironmentProblem):
            raise
        except Exception as error:
            fix = (
                f"checkpoints cannot be written there ({reason_of(error)}); free space or make the "
                "folder writable, then run the same command again"
            )
            raise EnvironmentProblem(str(self._folder), reason=fix, code="resource") from error


def _generator() -> str:
    """Return JAX's name of the generator of random keys."""
    return str(jax.config.jax_default_prng_impl)  # type: ignore[attr-defined]


def restore_chosen(
    checkpoints: Checkpoints,
    which: str,
    shapes: Callable[[int], TrainState],
    say: Say = _silent,
) -> TrainState:
    """Read the latest intact checkpoint, the best one, or that of a step.

    Args:
      checkpoints: The checkpoints of a workdir.
      which: "latest", "best" or a step.
      shapes: Function of the step that returns shapes, dtypes and shardings of its state.
      say: Function that gets a line for each damaged checkpoint.

    Raises:
      UserError: If there is no such checkpoint.
      EnvironmentProblem: If it cannot be read.
    """
    step = choose_step(checkpoints, which)
    state = checkpoints.restore_newest(shapes, say) if which == "latest" else None
    return checkpoints.restore(shapes(step), step, say) if state is None else state


def choose_step(checkpoints: Checkpoints, which: str) -> int:
    """Return the step of a checkpoint; see `restore_chosen`."""
    known = {str(step): step for step in checkpoints.steps()}
    step = known.get(which)
    if which == "latest":
        step = checkpoints.latest_step()
    if which == "best":
        step = checkpoints.best_step()
    if step is None:
        fix = (
            "there is no such checkpoint; use latest, best or a step, after lbopt train has saved "
            "one"
        )
        raise UserError("checkpoint", which, fix, code="missing")
    return step
