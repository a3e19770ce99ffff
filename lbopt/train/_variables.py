"""Parameters from a checkpoint of any run, to start another run from."""

from __future__ import annotations

import pathlib
from typing import Any

from lbopt.errors import EnvironmentProblem
from lbopt.train import _orbax
from lbopt.train._checksums import mismatch
from lbopt.train._faults import reason_of
from lbopt.train._on_disk import ARRAYS, require_checkpoint, steps_on_disk
from lbopt.train._seal import read_seal
from lbopt.transforms import EmaState, find_states
from lbopt.workdir import checkpoint_root


def read_variables(workdir: pathlib.Path) -> dict[str, Any]:
    """Read parameters and model state from the newest checkpoint of a run.

    The parameters are their moving average, if the run kept one.

    Args:
      workdir: The run's folder; nothing else needs to be known of the run.

    Returns:
      `{"params": ..., "batch_stats": ...}` of NumPy arrays.

    Raises:
      UserError: If there is no checkpoint.
      EnvironmentProblem: If it cannot be read, or differs from the saved one.
    """
    folder = checkpoint_root(workdir) / "checkpoints"
    steps = steps_on_disk(folder)
    require_checkpoint(steps, workdir)
    newest = steps[-1]
    try:
        saved = _orbax.read_as_numpy(folder / str(newest) / ARRAYS)
        wrong = mismatch(saved, read_seal(folder, newest).sums)
        if wrong:
            raise ValueError(wrong)
    except Exception as error:  # any class, from the storage layers
        fix = f"checkpoint {newest} cannot be read ({reason_of(error)}); use another checkpoint"
        raise EnvironmentProblem("workdir", str(workdir), fix, code="damaged") from error

    averages = [state.ema for state in find_states(saved["opt_state"], (EmaState,))]
    return {"params": averages[0] if averages else saved["params"], **saved["model_state"]}
