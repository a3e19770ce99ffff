"""Score `algoperf_submission.py` with AlgoPerf's own runner on its MNIST workload.

python run_algoperf.py ALGOPERF WORKDIR STEPS [STEPS]
"""

import contextlib
import json
import pathlib
import sys
from unittest import mock

import foreign
import jax
import numpy as np
import pytest

SPACE = {"learning_rate": {"feasible_points": [0.03]}, "weight_decay": {"feasible_points": [0.01]}}
WORKLOAD = {
    "workload_path": "algoperf/workloads/mnist/mnist_jax/workload.py",
    "workload_class_name": "MnistWorkload",
}
RANDOM = np.random.default_rng(0)
KINDS = RANDOM.normal(size=(10, 28, 28, 1))


def examples(number):
    """Return pictures of ten kinds in place of MNIST."""
    labels = RANDOM.integers(10, size=number)
    return {
        "inputs": (KINDS[labels] + 2 * RANDOM.normal(size=(number, 28, 28, 1))).astype(np.float32),
        "targets": labels,
    }


class Log(foreign.Scalars):
    """AlgoPerf's log of metrics."""

    def append_scalar_metrics(self, metrics, global_step, preemption_count=None, is_eval=False):
        """Keep the metrics."""
        self.write_scalars(global_step, metrics)


def main(algoperf, workdir, *steps):
    """Score the submission for each number of steps; the second run resumes from a checkpoint."""
    jax.devices()  # before the runner sets XLA_FLAGS anew
    sys.path.insert(0, algoperf)
    foreign.module("algoperf._version", version="0")
    absent = (
        "clu",
        "tensorflow",
        "tensorflow.io",
        "tensorflow_datasets",
        "GPUtil",
        "pandas",
        "psutil",
        "wandb",
    )
    with foreign.stand_in(*absent):
        import submission_runner as runner
        from algoperf import jax_sharding_utils
        from algoperf.workloads.mnist import workload

    begin = 0  # a resumed run takes the following batches
    last = {}
    train = [examples(512) for _ in range(16)]
    test = examples(10_000)

    def queue(self, data_rng, split, *_, **__):
        return iter(train[begin:end] if split == "train" else [test] * len(train))

    def restore(folder, target):
        found = load(folder, target)
        return {
            **found,
            "eval_results": found["eval_results"] or {},
        }  # it cannot read checkpoints of the current Orbax

    def keep(**state):
        last.update(state)
        return save(**state)

    log = Log()
    utils = runner.checkpoint_utils
    load = utils.flax_checkpoints.restore_checkpoint
    save = utils.save_checkpoint
    runner.FLAGS(["runner", "--framework=jax"])
    space = pathlib.Path(workdir, "space.json")
    space.parent.mkdir(parents=True, exist_ok=True)
    space.write_text(json.dumps(SPACE))
    with (
        mock.patch.object(workload.BaseMnistWorkload, "_build_input_queue", queue),
        mock.patch.object(
            workload.BaseMnistWorkload, "eval_period_time_sec", 0
        ),  # wait for every step
        mock.patch.object(utils.flax_checkpoints, "restore_checkpoint", restore),
        mock.patch.object(
            utils.jax_utils, "replicate", jax_sharding_utils.replicate
        ),  # it stacks copies for `pmap`
        mock.patch.object(utils, "save_checkpoint", keep),
        mock.patch.object(runner.logger_utils, "get_meta_data", return_value={}),
        mock.patch.object(runner.logger_utils, "set_up_loggers", return_value=log),
    ):
        for end in map(int, steps):
            with (
                pytest.raises(StopIteration) if end < int(steps[-1]) else contextlib.nullcontext()
            ):  # the run is preempted
                runner.score_submission_on_workload(
                    runner.workloads.import_workload(**WORKLOAD, workload_init_kwargs={}),
                    "mnist",
                    "algoperf_submission.py",
                    data_dir="",
                    tuning_ruleset="external",
                    profiler=runner.PassThroughProfiler(),
                    max_global_steps=int(steps[-1]),
                    tuning_search_space=space,
                    num_tuning_trials=1,
                    log_dir=workdir,
                    rng_seed=1,
                )
            begin = end
    state, _ = last["optimizer_state"]
    assert all(
        x.sharding.is_fully_replicated for x in jax.tree.leaves((state, last["model_params"]))
    )
    foreign.keep(
        workdir + "/kept.npz",
        log.of("loss"),
        params=last["model_params"],
        opt_state=state.opt_state,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
