"""The use of Orbax: the manager of a folder of checkpoints, and readers of one of them."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from lbopt.parallel import TrainState
from lbopt.train._on_disk import ARRAYS, SEAL, check_files
from lbopt.train._seal import Seal

CheckpointManager: TypeAlias = ocp.CheckpointManager


@dataclasses.dataclass
class _Chosen(checkpoint_managers.PreservationPolicy):
    """Keeps the checkpoints whose steps a function chooses."""

    choose: Callable[[Sequence[int]], set[int]]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        del context
        steps = [checkpoint.step for checkpoint in checkpoints]
        chosen = self.choose(steps)
        return [step in chosen for step in steps]


def open_manager(
    folder: Any,
    keep: int,
    choose: Callable[[Sequence[int]], set[int]],
    read_only: bool,
    create: bool,
) -> CheckpointManager:
    """Open Orbax's manager of a folder of checkpoints.

    Args:
      folder: The folder.
      keep: Number of the latest checkpoints to keep.
      choose: Function of the steps on disk that returns those to keep besides.
      read_only: Whether the disk is left as it is.
      create: Whether a missing folder is made.
    """
    latest = checkpoint_managers.LatestN(keep)
    options = ocp.CheckpointManagerOptions(
        preservation_policy=checkpoint_managers.AnyPreservationPolicy([latest, _Chosen(choose)]),
        enable_async_checkpointing=not read_only,
        async_options=_async_options(),
        read_only=read_only,
        create=create,
        multiprocessing_options=_multiprocessing_options(),
        cleanup_tmp_directories=not read_only,
        # Otherwise it reads a file of each checkpoint, and waits for ever if that is a FIFO.
        lightweight_initialize=True,
    )
    return CheckpointManager(folder, options=options)


def save(manager: CheckpointManager, step: int, state: TrainState, seal: Seal) -> None:
    """Save a state and its seal under a step."""
    items = {ARRAYS: ocp.args.StandardSave(state), SEAL: ocp.args.JsonSave(seal.to_json())}
    manager.save(step, args=ocp.args.Composite(**items))


def described(folder: Any) -> Any:
    """Return a saved state as Orbax describes it: a leaf for each array, in untyped containers."""
    check_files(folder)
    with ocp.PyTreeCheckpointer() as reader:
        found = reader.metadata(folder).item_metadata
    if found is None:
        raise ValueError("the description of its arrays is missing or damaged")
    return found.tree


def read_arrays(folder: Any, like: Any) -> Any:
    """Read this process's shards of a state.

    It does not wait for other processes, because one of them may fail to read.

    Args:
      folder: The folder of the arrays.
      like: Shapes, dtypes and shardings.
    """
    alone = _alone("")
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
        return reader.restore(folder, args=ocp.args.StandardRestore(like))


def read_array(folder: Any, name: str, like: jax.Array) -> jax.Array:
    """Read one array of a state, as `read_arrays` does."""
    alone = _alone("_one")
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    shape = {name: jax.eval_shape(lambda: like)}
    sharding = {name: ocp.ArrayRestoreArgs(sharding=like.sharding)}
    restore = ocp.args.PyTreeRestore(shape, sharding, partial_restore=True)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
        return reader.restore(folder, args=restore)[name]


def read_as_numpy(folder: Any) -> Any:
    """Read a whole state of an unknown run as NumPy arrays, in untyped containers."""
    as_numpy = jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray),
        described(folder),
    )
    with ocp.PyTreeCheckpointer() as reader:
        return reader.restore(folder, restore_args=as_numpy)


def _alone(suffix: str) -> ocp.options.MultiprocessingOptions:
    """Return the options of a reader that waits for no other process."""
    me = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process_{me}{suffix}"
    )


def _async_options() -> ocp.AsyncOptions:
    """Return options with which no thread or process waits for a save that has failed.

    By default Orbax makes folders in a thread. If that fails, the threads that fill the folders
    wait for minutes. And a process whose save has failed waits for the others before it raises,
    while they wait for it.
    """
    count = jax.process_count()
    if count == 1:
        return ocp.AsyncOptions(create_directories_asynchronously=False)
    barrier = ocp.multihost.get_barrier_sync_fn(processes=set(range(count)))

    def wait(*, key: str, timeout_ms: int) -> None:
        # Orbax meets the other processes in a `finally`: raise the error instead.
        error = sys.exc_info()[1]
        if error is not None and threading.current_thread() is not threading.main_thread():
            raise error
        barrier(key=key, timeout_ms=timeout_ms)

    return ocp.AsyncOptions(create_directories_asynchronously=False, barrier_sync_fn=wait)


def _multiprocessing_options() -> ocp.options.MultiprocessingOptions:
    """Return options with which Orbax's processes wait for each other by messages.

    By default they run a program on all devices. But a thread saves while steps run: if processes
    started the two programs in different orders, they would wait for each other for ever.
    """
    count = jax.process_count()
    if count == 1:
        return ocp.options.MultiprocessingOptions()
    return ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes=set(range(count)), barrier_sync_key_prefix="lbopt"
    )
