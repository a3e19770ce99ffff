"""`run_plan`: what a run costs on a TPU pod, as `lbopt plan`."""

from __future__ import annotations

from typing import Any

import jax

from lbopt.api._problem import Problem, in_python, train_config
from lbopt.cli import SAFE_DEVICES
from lbopt.errors import require
from lbopt.plan import Plan, make_plan, open_topology, planning
from lbopt.train import say


def run_plan(
    problem: Problem,
    optimizer: Any = "lamb",
    schedule: Any = None,
    *,
    topology: str,
    global_batch_size: int = 256,
    evaluation: bool = True,
    **fields: Any,
) -> Plan:
    """Compile a run's steps for a TPU pod that is not here, and say what they cost.

    Nothing is trained. The TPU compiler runs on the CPU: `pip install 'lbopt[plan]'`.

    Args:
      problem: Data, model and loss.
      optimizer: As in `run_training`.
      schedule: As in `run_training`.
      topology: Chips of the pod: "v5e:8x8", "v5p:4x4x8" and so on.
      global_batch_size: Examples per optimizer step over all devices and microsteps.
      evaluation: Whether to compile the evaluation too.
      **fields: Other fields of `lbopt.config.TrainConfig` by name.

    Returns:
      Memory, the cost of a step and the time of training; `print` shows them as `lbopt plan` does.

    Raises:
      UserError: Naming the argument and the fix; in a program that computes on other devices than
        CPUs.
      EnvironmentProblem: If there is no TPU compiler.

    >>> import flax.linen as nn, lbopt, numpy as np
    >>> x = np.random.default_rng(0).normal(size=(1280, 2)).astype(np.float32)
    >>> label = (x[:, 0] > x[:, 1]).astype(np.int32)
    >>> problem = lbopt.Problem({"x": x, "label": label}, nn.Dense(2))
    >>> plan = run_plan(  # doctest: +SKIP
    ...     problem, "lamb", 0.02, topology="v5e:2x2", global_batch_size=128, num_epochs=5
    ... )
    >>> plan.fits, plan.num_steps, plan.num_devices  # doctest: +SKIP
    (True, 40, 4)
    """
    with in_python():
        config = train_config(
            problem, optimizer, schedule, global_batch_size=global_batch_size, **fields
        )
        config.validate()
        backend = jax.default_backend()
        fix = "the TPU compiler needs JAX on the CPU; start Python with JAX_PLATFORMS=cpu"
        require(backend == "cpu", "jax.default_backend()", backend, fix, code="conflict")
        with planning():
            pod = open_topology(topology)
            fix = f"the compiler may crash above {SAFE_DEVICES} devices; use lbopt plan"
            require(len(pod.devices) <= SAFE_DEVICES, "topology", topology, fix, code="resource")
            return make_plan(config, "run_plan", pod, evaluation, say)
