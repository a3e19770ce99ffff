"""Train Flax's `examples/lm1b` with lbopt's LAMB.

python run_lm1b.py EXAMPLE WORKDIR FSDP TENSOR STEPS [STEPS]
"""

import sys
from unittest import mock

import foreign
import numpy as np
import optax

import lbopt

VOCABULARY = 64
LENGTH = 16
BATCH = 8
FIRST = np.random.default_rng(0).integers(VOCABULARY - 1, size=(64, BATCH, 1))
BATCHES = foreign.tensors(
    [{"inputs": (first + np.arange(LENGTH)) % (VOCABULARY - 1) + 1} for first in FIRST]
)
TRAINING = iter(BATCHES)  # a resumed run takes the following batches


def batches(config, **_):
    """Return training, evaluation and prediction sets of counting sentences, and a tokenizer."""
    encoder = mock.MagicMock()
    encoder.vocab_size.return_value = VOCABULARY
    encoder.tokenize.return_value.numpy.return_value = np.array([1, 2])
    return TRAINING, BATCHES, BATCHES, encoder


def optimizer(learning_rate, b1, b2, eps, weight_decay):
    """Return the replacement of `optax.adamw`."""
    lamb = lbopt.lamb(learning_rate, b1, b2, eps, weight_decay=weight_decay)
    return optax.chain(lamb, lbopt.monitor_layers())


def main(example, workdir, fsdp, tensor, *steps):
    """Run the example for each number of steps; the second run resumes from a checkpoint."""
    foreign.module("input_pipeline", get_datasets=batches)
    sys.path.insert(0, example)
    with foreign.stand_in("clu", "tensorflow"):
        import train

        from configs import default

    config = default.get_config()
    config.update(num_layers=2, qkv_dim=32, emb_dim=32, mlp_dim=64, num_heads=2)
    config.update(
        max_target_length=LENGTH, max_eval_target_length=LENGTH, max_predict_length=LENGTH
    )
    config.update(
        num_eval_steps=1, eval_every_steps=1, use_bfloat16=False, learning_rate=0.02, warmup_steps=4
    )
    config.update(
        ici_fsdp_parallelism=int(fsdp), ici_tensor_parallelism=int(tensor), per_device_batch_size=2
    )

    adamw = optax.adamw
    setup = train.utils.setup_initial_state
    save = train.checkpoints.save_checkpoint_multiprocess
    first = []
    last = []

    def setup_initial_state(model, tx, *rest):
        theirs, _ = setup(model, adamw(0.1), *rest)
        state, annotations = setup(model, tx, *rest)
        foreign.check_inherited(state.opt_state, theirs.opt_state)
        assert foreign.places(state.params) == foreign.places(theirs.params)
        first.append(foreign.places(state))
        return state, annotations

    def save_checkpoint(workdir, state, step):
        last.append(state)
        assert foreign.places(state) == first[0]
        return save(workdir, state, step)

    writer = train.metric_writers.create_default_writer.return_value = foreign.Scalars()
    with (
        mock.patch.object(optax, "adamw", optimizer),
        mock.patch.object(train.utils, "setup_initial_state", setup_initial_state),
        mock.patch.object(train.checkpoints, "save_checkpoint_multiprocess", save_checkpoint),
    ):
        for number in steps:
            config.num_train_steps = int(number)
            train.train_and_evaluate(config.copy_and_resolve_references(), workdir)
    assert (
        float(lbopt.optimizer_metrics(last[-1].opt_state)["learning_rate"])
        == writer.of("train_learning_rate")[-1]
    )
    foreign.keep(
        workdir + "/kept.npz",
        writer.of("train_loss"),
        params=last[-1].params,
        opt_state=last[-1].opt_state,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
