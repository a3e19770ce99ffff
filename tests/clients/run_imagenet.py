"""Train Flax's `examples/imagenet` with lbopt's LARS.

python run_imagenet.py EXAMPLE WORKDIR STEPS [STEPS]
"""

import sys
from unittest import mock

import foreign
import jax
import numpy as np
import optax

import lbopt

BATCH = 16
SIZE = 32
CLASSES = 4
STEPS_PER_EPOCH = 2
RANDOM = np.random.default_rng(0)
KINDS = RANDOM.normal(size=(CLASSES, SIZE, SIZE, 3))
LABELS = RANDOM.integers(CLASSES, size=(16, BATCH))
IMAGES = (KINDS[LABELS] + RANDOM.normal(size=(16, BATCH, SIZE, SIZE, 3))).astype(np.float32)
BATCHES = foreign.tensors([{"image": x, "label": y} for x, y in zip(IMAGES, LABELS, strict=True)])


def optimizer(learning_rate, momentum, nesterov):
    """Return the replacement of `optax.sgd`."""
    lars = lbopt.lars(learning_rate, momentum=momentum, nesterov=nesterov, trust_coefficient=0.02)
    return optax.chain(lars, lbopt.monitor_layers())


def main(example, workdir, *steps):
    """Run the example for each number of steps; the second run resumes from a checkpoint."""
    begin = 0  # a resumed run takes the following batches
    foreign.module(
        "input_pipeline",
        create_split=lambda *_, train, **__: iter(BATCHES[begin if train else 0 :]),
    )
    sys.path.insert(0, example)
    with foreign.stand_in("clu", "tensorflow", "tensorflow_datasets"):
        import train

        from configs import default

    config = default.get_config()
    config.update(
        model="_ResNet1", batch_size=BATCH, num_epochs=4.0, warmup_epochs=1.0, learning_rate=1.6
    )
    config.update(log_every_steps=1, steps_per_eval=1, profile=False)
    train.tfds.builder.return_value.info.splits["train"].num_examples = BATCH * STEPS_PER_EPOCH
    writer = train.metric_writers.create_default_writer.return_value = foreign.Scalars()
    with mock.patch.object(optax, "sgd", optimizer):
        for number in steps:
            config.num_train_steps = int(number)
            begin = int(number)
            state = train.train_and_evaluate(config, workdir)
    assert all(
        x.sharding.is_fully_replicated for x in jax.tree.leaves((state.params, state.opt_state))
    )
    foreign.keep(
        workdir + "/kept.npz",
        writer.of("train_loss"),
        params=state.params,
        opt_state=state.opt_state,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
