"""Parameters out of a checkpoint whose run one does not know: to start another run from."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from lbopt import tree
from lbopt.errors import EnvironmentProblem, UserError
from lbopt.train._checkpoint import ARRAYS, described, read_seal, reason_of, steps_on_disk
from lbopt.train._checksums import checksums, differing
from lbopt.transforms import EmaState, find_states
from lbopt.workdir import checkpoint_root


def read_variables(workdir: pathlib.Path) -> dict[str, Any]:
    """Read parameters (their average, if the run kept one) and model state of a run's newest checkpoint, whatever the run was.

    Returns:
      {"params": ..., "batch_stats": ...}, NumPy arrays.

    Raises:
      UserError: if there is no checkpoint.
      EnvironmentProblem: if it cannot be read, or is not what was saved.
    """
    folder = checkpoint_root(workdir) / "checkpoints"
    steps = steps_on_disk(folder)
    if not steps:
        fix = "no checkpoint is there yet; let lbopt train save one"
        raise UserError("--workdir", str(workdir), fix, code="missing")
    try:
        with ocp.PyTreeCheckpointer() as reader:
            place = folder / str(steps[-1]) / ARRAYS
            saved = reader.restore(place, restore_args=_as_numpy(described(place)))
        wrong = differing(checksums(saved), read_seal(folder, steps[-1]).sums)
        if wrong:
            raise ValueError(f"{tree.some(wrong)} is not what was saved")
    except Exception as error:  # whatever the storage layers raise
        fix = f"checkpoint {steps[-1]} cannot be read ({reason_of(error)}); use another checkpoint"
        raise EnvironmentProblem("--workdir", str(workdir), fix, code="damaged") from error
    averages = [state.ema for state in find_states(saved["opt_state"], (EmaState,))]
    return {"params": averages[0] if averages else saved["params"], **saved["model_state"]}


def _as_numpy(leaves: Any) -> Any:
    return jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), leaves)
