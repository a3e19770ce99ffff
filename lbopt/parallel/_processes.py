"""Bring JAX's runtime up in every process of a job."""

from __future__ import annotations

import jax

from lbopt.errors import EnvironmentProblem
from lbopt.job import STARTING_PATIENCE, Job, MemberJob

_HEARTBEAT_S = 300
"""lbopt's guards report a dead process by name within 30 s; JAX's runtime would abort first."""


def connect_processes(job: Job) -> None:
    """Connect this process's JAX with the other processes', before any device is used.

    A process that is alone needs no connection. The call changes JAX's settings for the whole
    process: CPU collectives use Gloo, and JAX's own preemption service is off.

    Args:
      job: The job, from `lbopt.job.join_job`.

    Raises:
      EnvironmentProblem: If the processes cannot be connected.
    """
    if not isinstance(job, MemberJob):
        return
    job.doing("waiting for JAX's runtime of the others", patience=STARTING_PATIENCE)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # The guard handles SIGTERM, and all agree on a step by `MemberJob.stops_after`.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            job.jax_address,
            job.count,
            job.index,
            local_device_ids=job.local_device_ids,
            cluster_detection_method="deactivate",
            initialization_timeout=int(job.start_timeout_s) + 60,
            heartbeat_timeout_seconds=_HEARTBEAT_S,
            coordinator_bind_address=job.jax_bind_address,
        )
    except Exception as error:  # whatever the runtime says
        cause = " ".join(str(error).split())[:200]
        fix = f"JAX cannot connect the job's processes there ({cause}); see that this port of "
        fix += "process 0 is free and can be reached"
        raise EnvironmentProblem("jax_address", job.jax_address, fix, code="resource") from error

    counted = jax.process_count()
    if counted != job.count:
        fix = f"the job has {job.count}, and this platform's runtime was started before; start all "
        fix += "processes of the job anew"
        raise EnvironmentProblem("jax.process_count()", counted, fix, code="mismatch")
