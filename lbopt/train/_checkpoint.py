"""Checkpoints of the whole training state, by Orbax: asynchronous, atomic, the latest few and the best."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import math
import os
import pathlib
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from lbopt import _typed_json, tree
from lbopt._regular import check_regular
from lbopt.errors import EnvironmentProblem, UserError
from lbopt.job import Job, SoloJob
from lbopt.parallel import TrainState
from lbopt.train import _earlier, _replica_rows, _seal
from lbopt.train._checksums import checksums, copies_of, differing, named, sums_of
from lbopt.train._seal import Seal
from lbopt.workdir import checkpoint_root, is_whole_checkpoint, move_checkpoint

Say = Callable[[str], None]
"""Gets a line for the user."""
PHASE = "phase"
"""Among the metrics of a checkpoint: the number of its phase, if it is not the first."""
BROKEN = "broken"
"""Among the metrics of a checkpoint: 1 if its network has numbers that are not finite; left out otherwise."""
_PHASE_COUNTS = 1e9
"""A later phase, with its other examples, is better than an earlier one whatever its metrics."""
_LOOKS, _PAUSE_S = 120, 0.5
"""How long a folder of the network may take to show all hosts the same."""
_MARGIN_BYTES = 1 << 17
"""For what is saved beside the arrays."""
ARRAYS, _SEAL = "default", "seal"
_NOT_DAMAGE = (
    *(
        "PERMISSION_DENIED",
        "UNAUTHENTICATED",
        "UNAVAILABLE",
        "DEADLINE_EXCEEDED",
        "RESOURCE_EXHAUSTED",
    ),
    *("ABORTED", "CANCELLED"),
)
_WRONG_KIND = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_CLIENTS = ("gcsfs", "aiohttp", "google")
"""Who raise when a bucket does not answer."""


class Damaged(EnvironmentProblem):
    """A checkpoint is not what was saved."""


class Checkpoints:
    """The `checkpoints/` folder of a workdir.

    A checkpoint is there under its step's number once it is whole. Its seal has the checksums of its arrays: what is read and is not
    what was saved is never given out.

    Args:
      workdir: the run's folder.
      keep: how many of the latest are kept. The best one is kept besides, and the latest whose network is finite.
      best_metric: which metric says which is best; lower is better if its name ends in "loss".
      read_only: leave the disk as it is.
      always: steps that are kept whatever comes after: the ends of phases.
      job: of which this process is one; None if it is alone. All of its processes call the same methods in the same order.

    Raises:
      UserError: if they are only read, and there are none.
      EnvironmentProblem: if the folder cannot be read, or shows the processes different checkpoints.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        keep: int = 3,
        best_metric: str = "eval/accuracy",
        read_only: bool = False,
        always: Sequence[int] = (),
        job: Job | None = None,
    ):
        root = checkpoint_root(workdir)
        check_name(str(root), read_only)
        self._folder = root / "checkpoints"
        self._aside = root / "damaged"
        self._local = isinstance(root, pathlib.Path)
        self._best_metric, self._keep, self._always = best_metric, keep, set(always)
        self._read_only, self._job = read_only, SoloJob() if job is None else job
        steps = self._steps_seen_by_all()
        if not steps and read_only:
            raise UserError(
                f"--workdir = {str(workdir)!r}: no checkpoint is there yet; let lbopt train save one"
            )
        self._metrics = self._job.from_first(
            "metrics of checkpoints", [[s, self._read_metrics(s)] for s in steps]
        )
        self._metrics = {step: metrics for step, metrics in self._metrics if metrics}
        if self._job.count > 1:
            if self._job.index == 0 and not read_only:
                with self._writing():
                    self._folder.mkdir(parents=True, exist_ok=True)
            self._job.together("folder of checkpoints", True)
        self._manager = self._opened()
        self._no_folders = {
            step for step in steps if self._local and not os.path.isdir(self._folder / str(step))
        }
        self._best = max(map(self._goodness, self._metrics.values()), default=-math.inf)
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "lbopt checkpoints")
        self._saving: concurrent.futures.Future[None] | None = None
        self._compiled: concurrent.futures.Future[Any] | None = None
        self._shapes: list[jax.ShapeDtypeStruct] = []
        self._copies: bool | None = None  # not known until a step has shown what it uses
        self._saved_step = self.latest_step()
        self._was_read_back = False
        self._generator = _generator()

    def _steps_seen_by_all(self) -> list[int]:
        for _ in range(_LOOKS):
            seen = self._job.together("steps of checkpoints", steps_on_disk(self._folder))
            others = [index for index, steps in enumerate(seen) if steps != seen[0]]
            if not others:
                return seen[0]
            time.sleep(_PAUSE_S)
        raise EnvironmentProblem(
            f"{self._folder}: process 0 sees checkpoints of the steps {seen[0]}, process {others[0]} of {seen[others[0]]}; "
            "mount it so that all hosts see the same, then run the same command again"
        )

    def _opened(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_Policy(self._kept),
            enable_async_checkpointing=not self._read_only,
            async_options=_in_background(),
            read_only=self._read_only,
            create=not self._read_only and self._job.count == 1,
            multiprocessing_options=_by_messages(),
            cleanup_tmp_directories=not self._read_only,
            lightweight_initialize=True,  # or it reads a file of each checkpoint, and a FIFO in its place without end
        )
        try:
            return ocp.CheckpointManager(self._folder, options=options)
        except Exception as error:  # whatever the storage layers raise
            raise EnvironmentProblem(
                f"{self._folder} cannot be read ({reason_of(error)}); mend it"
            ) from error

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, ascending: also of a file or a link to nothing in the place of one."""
        return sorted(self._no_folders.union(self._manager.all_steps()))

    def latest_step(self) -> int | None:
        """Return the step of the newest checkpoint, None if there is none."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """Return the step of the best checkpoint by the metric, None if none has one."""
        scored = {
            step: self._goodness(self._metrics[step])
            for step in self.steps()
            if step in self._metrics
        }
        scored = {step: goodness for step, goodness in scored.items() if goodness > -math.inf}
        return max(scored, key=lambda step: (scored[step], step), default=None)

    def latest_finite_step(self) -> int | None:
        """Return the step of the newest checkpoint whose network is finite, None if there is none."""
        return self._latest_finite(self.steps())

    def would_be_best(self, metrics: Mapping[str, float]) -> bool:
        """Return whether an evaluation is better than that of every checkpoint so far."""
        return bool(metrics) and self._goodness(metrics) > self._best

    def prepare(self, state: TrainState) -> None:
        """Compile, beside whatever else goes on, what `save` will ask of the devices.

        Called where a phase begins: its first save looks anew whether there is room for a copy beside the most that was used so far,
        copies of an earlier phase included.
        """
        self._copies = None
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for x in jax.tree.leaves(state)
        ]
        if shapes != self._shapes:
            self._shapes = shapes
            self._compiled = self._worker.submit(
                lambda: [program.lower(shapes).compile() for program in (copies_of, sums_of)]
            )

    def save(
        self,
        state: TrainState,
        metrics: Mapping[str, float] | None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Start saving; returns at once, and the state's buffers may be donated.

        They are copied on the devices, and a thread does the rest. Where the devices have no room for a copy, this returns when the
        state is copied to the host.

        Args:
          state: after a step.
          metrics: of the evaluation after that step.
          before: is called, in the thread, before anything is written.
        """
        step = int(state.step)
        if step == self._saved_step:
            return
        self._finish_saving()
        self._check_space(state)
        self._saved_step = step
        if metrics:
            self._metrics[step] = dict(metrics)
            self._best = max(self._best, self._goodness(metrics))
        leaves, structure = jax.tree.flatten(state)
        if self._copies is None:
            self._copies = all(
                self._job.together("room for a copy of the state", _has_room(leaves))
            )
        if self._copies:
            copy, add_up = self._compiled.result() if self._compiled else (copies_of, sums_of)
            copies = copy(leaves)
            copied = jax.tree.unflatten(structure, copies)
            self._saving = self._worker.submit(
                self._write, step, copied, add_up(copies), metrics, before
            )
        else:
            with self._writing():
                self._write(step, state, sums_of(leaves), metrics, before)

    def _write(
        self,
        step: int,
        state: TrainState,
        sums: jax.Array,
        metrics: Mapping[str, float] | None,
        before: Callable[[], None],
    ) -> None:
        before()
        rows = _replica_rows.count(state), _replica_rows.parts_of(state)
        seal = Seal(
            step,
            named(tree.leaf_names(state), sums),
            dict(metrics or {}),
            *rows,
            _earlier.NOW,
            self._generator,
        )
        items = {ARRAYS: ocp.args.StandardSave(state), _SEAL: ocp.args.JsonSave(seal.to_json())}
        self._manager.save(step, args=ocp.args.Composite(**items))
        if not self._was_read_back:
            self._manager.wait_until_finished()
            self._read_back(step, state.step)
            self._was_read_back = True

    def _read_back(self, step: int, like: jax.Array) -> None:
        """Read one number of the first checkpoint, so that a folder out of which nothing can be read is known before the run ends."""
        try:
            read_seal(self._folder, step)
            found = _read_one(self._folder / str(step) / ARRAYS, "step", like)
            if int(found) != step:
                raise ValueError(f"it says step {int(found)}")
        except Exception as error:  # whatever the storage layers raise
            raise EnvironmentProblem(
                f"checkpoint {self._folder / str(step)} was saved and cannot be read back ({reason_of(error)}); use another --workdir"
            ) from error

    def settle(self) -> None:
        """Wait until the thread is idle, whatever it has met: `before` of the last save needs what comes after to be open."""
        if self._saving is not None:
            concurrent.futures.wait([self._saving])

    def _finish_saving(self) -> None:
        """Wait for the thread, and raise what it met."""
        saving, self._saving = self._saving, None
        if saving is not None:
            with self._writing():
                saving.result()

    def _check_space(self, state: TrainState) -> None:
        """Say that the disk is full before half of a checkpoint is on it; a bucket never is."""
        if not self._local:
            return
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + _MARGIN_BYTES
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise EnvironmentProblem(
                f"{self._folder}: a checkpoint needs {needed / 2**20:.1f} MiB and {free / 2**20:.1f} MiB are free; free space, then run the same command again"
            )

    def restore(self, like: TrainState, step: int, say: Say = lambda line: None) -> TrainState:
        """Read a checkpoint.

        What an aggregator remembers of each replica is rebuilt if there are more or fewer of them now, or devices with a part of it.

        Args:
          like: shapes, dtypes and shardings (`Run.shapes`); the run that saved it may have had other shardings and devices.
          step: which one.
          say: is given a line if something was rebuilt.

        Raises:
          Damaged: if it is not what was saved.
          EnvironmentProblem: if it cannot be read now.
        """
        problem: tuple[str, bool] | None = None
        wanted: dict[str, str] = {}
        state, parts, generator = like, None, None
        try:
            _check_files(self._folder / str(step))
            seal = read_seal(self._folder, step)
            generator = None if self._read_only else seal.generator
            if generator not in (None, self._generator):
                raise ValueError(f"its random keys are those of {generator}")
            parts, place = seal.parts, self._folder / str(step) / ARRAYS
            shapes = _replica_rows.shapes_for(like, seal.replicas, parts)
            if seal.layout == _earlier.NESTED:
                wanted = _earlier.renamed(seal.sums, shapes)
                found = _earlier.read(
                    described(place), shapes, functools.partial(_read_arrays, place)
                )
            else:
                wanted, found = seal.sums, _read_arrays(place, shapes)
            state = _replica_rows.as_now(found)
        except Exception as error:  # whatever the storage layers raise
            other = _of_another_generator(self._folder / str(step), like, generator)
            problem = (
                other or _unreadable(self._folder, step, reason_of(error)),
                other is None and _is_damage(error),
            )
        problems = [
            each for each in self._job.together(f"restored {step}", problem) if each is not None
        ]
        if not problems:
            names = differing(checksums(state), wanted)
            differences = self._job.together(
                f"compared {step}", names
            )  # a process may have read another seal
            problems = [
                (_unreadable(self._folder, step, f"{tree.some(names)} is not what was saved"), True)
                for names in differences
                if names
            ]
        if problems:
            kind = Damaged if all(damage for _, damage in problems) else EnvironmentProblem
            raise kind(problems[0][0])
        return _replica_rows.fitted(state, like, parts, say)

    def restore_newest(
        self, shapes: Callable[[int], TrainState], say: Say = lambda line: None
    ) -> TrainState | None:
        """Read the newest checkpoint that is intact; None if there is none at all.

        Newer ones that are damaged are moved to `damaged/` of the workdir, unless the disk is to be left as it is.

        Args:
          shapes: step -> shapes, dtypes and shardings of its state.
          say: is given a line for each damaged one.

        Raises:
          EnvironmentProblem: if none is intact, or if one cannot be read now.
        """
        damaged: list[tuple[int, Damaged]] = []
        for step in reversed(self.steps()):
            try:
                state = self._restore_twice(shapes(step), step, say)
            except Damaged as error:
                damaged.append((step, error))
                continue
            for other, problem in damaged:
                where = "" if self._read_only else f"; moved to {self._set_aside(other)}"
                reason = str(problem).partition("; remove that folder")[0]
                say(f"{reason}{where}; going back to step {step}")
            if damaged and not self._read_only:
                self._manager.close()
                self._manager = self._opened()
            self._saved_step = step
            return state
        if damaged:
            raise damaged[0][1]
        return None

    def _restore_twice(self, like: TrainState, step: int, say: Say) -> TrainState:
        """Read a checkpoint, and once more before it is taken for damaged: what read it may have been at fault."""
        with contextlib.suppress(Damaged):
            return self.restore(like, step, say)
        return self.restore(like, step, say)

    def _set_aside(self, step: int) -> pathlib.Path:
        """Move a checkpoint out of the way, so that its step can be saved again."""
        taken = [entry.name for entry in self._aside.iterdir()] if self._aside.is_dir() else []
        target = self._aside / next(
            name
            for name in (f"{step}", *(f"{step}-{n}" for n in range(2, 10**6)))
            if name not in taken
        )
        if self._job.index == 0:
            with self._writing():
                move_checkpoint(self._folder / str(step), target)
        self._no_folders.discard(step)
        self._metrics.pop(step, None)
        self._best = max(map(self._goodness, self._metrics.values()), default=-math.inf)
        self._job.together("damaged checkpoint set aside", step)
        return target

    def wait(self) -> None:
        """Wait until what is being saved is whole on disk."""
        self._finish_saving()
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait and close."""
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
        try:
            yield
        except (UserError, EnvironmentProblem):
            raise
        except Exception as error:  # whatever the storage layers raise
            raise EnvironmentProblem(
                f"checkpoints cannot be written to {self._folder} ({reason_of(error)}); free space or mend the folder, then run the same command again"
            ) from error

    def _read_metrics(self, step: int) -> dict[str, float]:
        """Return a checkpoint's metrics; none if its seal is damaged, of which `restore` will speak."""
        try:
            return read_seal(self._folder, step).metrics
        except Exception:  # whatever the storage layers raise
            return {}

    def _kept(self, steps: Sequence[int]) -> list[bool]:
        latest, others = (
            sorted(steps)[-self._keep :],
            (self.best_step(), self._latest_finite(steps)),
        )
        return [step in latest or step in self._always or step in others for step in steps]

    def _latest_finite(self, steps: Sequence[int]) -> int | None:
        return max(
            (step for step in steps if not _is_broken(self._metrics.get(step, {}))), default=None
        )

    def _goodness(self, metrics: Mapping[str, float]) -> float:
        value = metrics.get(self._best_metric, math.nan)
        if _is_broken(metrics) or math.isnan(value):
            return -math.inf
        goodness = -value if self._best_metric.endswith("loss") else value
        return goodness + _PHASE_COUNTS * metrics.get(PHASE, 0)


def _is_broken(metrics: Mapping[str, float]) -> bool:
    """Return whether a checkpoint's network has numbers that are not finite; earlier versions said so by its metrics only."""
    return bool(metrics.get(BROKEN)) or not all(map(math.isfinite, metrics.values()))


def read_seal(folder: pathlib.Path, step: int) -> Seal:
    """Return the seal of a checkpoint.

    Raises:
      OSError, ValueError: if it is missing or damaged.
    """
    seal = _seal.read(_typed_json.read_file(folder / str(step) / _SEAL / "metadata"))
    if seal.step != step:
        raise ValueError(f"it was saved at step {seal.step}")
    return seal


@dataclasses.dataclass
class _Policy(checkpoint_managers.PreservationPolicy):
    """Ask a function of the steps which to keep."""

    kept: Callable[[Sequence[int]], list[bool]]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        del context
        return self.kept([checkpoint.step for checkpoint in checkpoints])


def _in_background() -> ocp.AsyncOptions:
    """Let no thread wait for what has failed.

    By default Orbax makes folders in a thread, and if that fails the threads that fill them wait for them for minutes. And a process
    whose save has failed waits for the others before it says so, while they wait for it.
    """

    def wait(*, key: str, timeout_ms: int) -> None:
        if (
            error := sys.exc_info()[1]
        ) is not None and threading.current_thread() is not threading.main_thread():
            raise error
        barrier(key=key, timeout_ms=timeout_ms)

    count = jax.process_count()
    if count == 1:
        return ocp.AsyncOptions(create_directories_asynchronously=False)
    barrier = ocp.multihost.get_barrier_sync_fn(processes=set(range(count)))
    return ocp.AsyncOptions(create_directories_asynchronously=False, barrier_sync_fn=wait)


def _by_messages() -> ocp.options.MultiprocessingOptions:
    """Let Orbax's processes wait for each other by messages; by default they do by a program on all devices.

    Saving goes on in a thread while steps do: two programs that every device has to take part in, in an order that differs from
    process to process, would wait for each other for ever.
    """
    count = jax.process_count()
    if count == 1:
        return ocp.options.MultiprocessingOptions()
    return ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes=set(range(count)), barrier_sync_key_prefix="lbopt"
    )


def _check_files(checkpoint: Any) -> None:
    """Raise `ValueError` if a checkpoint in a folder is none, or holds what is neither a file nor a folder: a reader would wait for it."""
    if isinstance(checkpoint, pathlib.Path):
        if not os.path.isdir(checkpoint):
            raise ValueError("it is no folder")
        for file in checkpoint.rglob("*"):
            try:
                check_regular(file.stat().st_mode, str(file))
            except FileNotFoundError:
                continue  # what is read will be missed by name
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ELOOP):
                    raise
                raise ValueError(f"{file.relative_to(checkpoint)} is {error.strerror}") from error


def described(folder: Any) -> Any:
    """Return a leaf for each array of a saved state, in containers without types, as Orbax describes them."""
    _check_files(folder)
    with ocp.PyTreeCheckpointer() as reader:
        found = reader.metadata(folder).item_metadata
    if found is None:
        raise ValueError("the description of its arrays is missing or damaged")
    return found.tree


def _read_arrays(folder: pathlib.Path, like: Any) -> Any:
    """Read this process's part of a state, without waiting for other processes: one of them may fail to."""
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process_{me}"
    )
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
        return reader.restore(folder, args=ocp.args.StandardRestore(like))


def _read_one(folder: Any, name: str, like: jax.Array) -> jax.Array:
    """Read one array of a state, as `_read_arrays` does."""
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process_{me}_one"
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    shape, where = (
        {name: jax.eval_shape(lambda: like)},
        {name: ocp.ArrayRestoreArgs(sharding=like.sharding)},
    )
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
        return reader.restore(
            folder, args=ocp.args.PyTreeRestore(shape, where, partial_restore=True)
        )[name]


def check_name(workdir: str, read_only: bool = False) -> None:
    """Raise UserError for a workdir in which Orbax would save what it cannot find again: it looks for patterns, not for names.

    It would also put what a killed run has left in `runs/axb` into the checkpoints of `runs/a*b`. With a backslash nothing can be read.

    >>> check_name("runs/batch=1024 (second)")
    """
    if re.search(r"\\" if read_only else r"\[.*\]|[*?\\]", workdir, re.DOTALL):
        raise UserError(
            f"--workdir = {workdir!r}: no checkpoint can be read in a path with * ? [...] or a backslash; use another name"
        )


def _has_room(leaves: Sequence[jax.Array]) -> bool:
    """Return whether this process's devices have room for a second state beside the most they have used; on hosts there is."""
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            used = max(stats.get("peak_bytes_in_use", 0), stats.get("bytes_in_use", 0))
            needed = sum(
                s.data.nbytes
                for leaf in leaves
                for s in leaf.addressable_shards
                if s.device == device
            )
            if used + needed > stats["bytes_limit"]:
                return False
    return True


def _is_damage(error: Exception) -> bool:
    """Return whether what was read is wrong; else it could not be read."""
    cannot = isinstance(error, OSError | MemoryError) and not isinstance(error, _WRONG_KIND)
    cannot = cannot or type(error).__module__.partition(".")[0] in _CLIENTS
    return not cannot and not any(word in str(error) for word in _NOT_DAMAGE)


def _unreadable(folder: pathlib.Path, step: int, reason: str) -> str:
    earlier = [other for other in steps_on_disk(folder) if other < step]
    fix = (
        f"to resume at step {max(earlier)}"
        if earlier
        else "to start again, or use another --workdir"
    )
    return f"checkpoint {folder / str(step)} cannot be read ({reason}); remove that folder {fix}"


def _generator() -> str:
    return str(jax.config.jax_default_prng_impl)  # type: ignore[attr-defined]


def _of_another_generator(
    checkpoint: pathlib.Path, like: TrainState, generator: str | None
) -> str | None:
    """Return what to say where a checkpoint's random keys are not of the generator of this process; None where they are.

    Args:
      checkpoint: its folder.
      like: shapes of this process.
      generator: name of the checkpoint's generator; None if it does not say, and the size of the keys decides.
    """
    try:
        saved = described(checkpoint / ARRAYS)["rng"].shape
    except Exception:  # whatever the storage layers raise: something else is wrong
        return None
    if saved == like.rng.shape and generator in (None, _generator()):
        return None
    name = generator or {(2,): "threefry2x32", (4,): "rbg (or unsafe_rbg)"}.get(
        saved, "what it was"
    )
    return (
        f"jax_default_prng_impl = {_generator()!r}: "
        f"checkpoint {checkpoint} has the random keys of another generator; set JAX_DEFAULT_PRNG_IMPL to {name}"
    )


def reason_of(error: Exception) -> str:
    """Return the first line of what a storage layer has said."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:120]


def is_begun(workdir: pathlib.Path) -> bool:
    """Return whether a workdir has a checkpoint."""
    folder = checkpoint_root(workdir) / "checkpoints"
    return folder.is_dir() and bool(steps_on_disk(folder))


def steps_on_disk(folder: pathlib.Path) -> list[int]:
    """Return the steps that have a checkpoint, ascending."""
    try:
        entries = [entry for entry in folder.iterdir() if re.fullmatch("0|[1-9][0-9]*", entry.name)]
        return sorted(int(entry.name) for entry in entries if is_whole_checkpoint(entry))
    except FileNotFoundError:
        return []
    except Exception as error:  # whatever the storage layers raise
        reason = getattr(error, "strerror", None) or reason_of(error)
        raise EnvironmentProblem(
            f"{folder} cannot be read ({reason}); mend it or use another --workdir"
        ) from error


def restore_chosen(
    checkpoints: Checkpoints,
    which: str,
    shapes: Callable[[int], TrainState],
    say: Say = lambda line: None,
) -> TrainState:
    """Read the "latest" checkpoint that is intact, the "best" one, or the one whose step is given.

    Args:
      checkpoints: of a workdir.
      which: see above.
      shapes: see `Checkpoints.restore_newest`, as `say`.

    Raises:
      UserError: if there is none.
      EnvironmentProblem: if it cannot be read.
    """
    step = choose_step(checkpoints, which)
    state = checkpoints.restore_newest(shapes, say) if which == "latest" else None
    return checkpoints.restore(shapes(step), step, say) if state is None else state


def choose_step(checkpoints: Checkpoints, which: str) -> int:
    named = {"latest": checkpoints.latest_step, "best": checkpoints.best_step}
    step = (
        named[which]()
        if which in named
        else next((step for step in checkpoints.steps() if str(step) == which), None)
    )
    if step is None:
        raise UserError(
            f"--checkpoint = {which!r}: there is no such checkpoint; use latest, best or a step, after lbopt train has saved one"
        )
    return step
