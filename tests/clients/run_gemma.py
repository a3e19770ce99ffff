"""Train Flax's `examples/gemma` (NNX) with lbopt's LAMB.

python run_gemma.py EXAMPLE WORKDIR FSDP TENSOR STEPS [STEPS]
"""

import sys
from unittest import mock

import foreign
import jax
import numpy as np
import optax
from flax import nnx

import lbopt

VOCABULARY = 64
LENGTH = 16
BATCH = 8
FIRST = np.random.default_rng(0).integers(VOCABULARY - 1, size=(64, BATCH, 1))
SENTENCES = (FIRST + np.arange(LENGTH + 1)) % (VOCABULARY - 1) + 1
MODEL = {
    "num_layers": 2,
    "embed_dim": 32,
    "hidden_dim": 64,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "use_post_attn_norm": True,
    "use_post_ffw_norm": True,
    "use_qk_norm": True,
    "attention_types": (1, 1),
    "final_logit_softcap": None,
}


def optimizer(learning_rate, b1, b2, eps, weight_decay):
    """Return the replacement of `optax.adamw`."""
    lamb = lbopt.lamb(learning_rate, b1, b2, eps, weight_decay=weight_decay)
    return optax.chain(lamb, lbopt.monitor_layers())


class Sums(nnx.MultiMetric):
    """The example's metrics, recording their sums when they are read, which is after every step."""

    made = []
    sums = {}

    def __init__(self, **metrics):
        super().__init__(**metrics)
        self.made.append(self)

    def compute(self):
        """Return the means so far."""
        self.sums.setdefault(id(self), []).append(
            [float(self.loss.total[...]), float(self.loss.count[...])]
        )
        return super().compute()

    @classmethod
    def losses(cls):
        """Return the mean training loss of each step of the last run.

        A run makes two sets of metrics; the first is for training.
        """
        total, count = np.diff(cls.sums[id(cls.made[-2])], axis=0, prepend=0).T
        return total[count > 0] / count[count > 0]


def main(example, workdir, fsdp, tensor, *steps):
    """Run the example for each number of steps; the second run resumes from a checkpoint."""
    begin = 0  # a resumed run takes the following batches

    def get_datasets(config, vocab_path, data_sharding):
        positions = np.broadcast_to(np.arange(LENGTH), (BATCH, LENGTH))
        batches = [
            jax.device_put(
                {
                    "inputs": x[:, :-1],
                    "targets": x[:, 1:],
                    "inputs_position": positions,
                    "inputs_segmentation": x[:, 1:] * 0 + 1,
                },
                data_sharding,
            )
            for x in SENTENCES
        ]
        encoder = mock.MagicMock()
        encoder.vocab_size.return_value = VOCABULARY
        encoder.pad_id.return_value = 0
        return batches[begin:], batches, encoder

    foreign.module("input_pipeline", get_datasets=get_datasets)
    sys.path.insert(0, example)
    with foreign.stand_in("clu", "jaxtyping", "sentencepiece", "sampler", "tokenizer"):
        import train

        from configs import tiny

    config = tiny.get_config().replace(transformer_name=None, transformer_params=MODEL)
    config = config.replace(fsdp_parallelism=int(fsdp), tensor_parallelism=int(tensor))
    config = config.replace(
        num_eval_steps=1, prompts=(), use_bfloat16=False, learning_rate=0.02, warmup_steps=4
    )

    adamw = optax.adamw
    make = nnx.Optimizer
    losses = []
    made = []

    def make_optimizer(model, tx, wrt):
        theirs, ours = (make(model, tx=one, wrt=wrt) for one in (adamw(0.1), tx))
        foreign.check_inherited(*(nnx.to_pure_dict(nnx.state(one)) for one in (ours, theirs)))
        made.append((model, ours, foreign.places(nnx.state(ours))))
        return ours

    with (
        mock.patch.object(optax, "adamw", optimizer),
        mock.patch.object(nnx, "Optimizer", make_optimizer),
        mock.patch.object(nnx, "MultiMetric", Sums),
    ):
        for number in steps:
            transforms = (
                "all" if begin else "no"
            )  # the example supports both NNX's and JAX's transforms
            config = config.replace(num_train_steps=int(number), use_nnx_transforms=transforms)
            train.train_and_evaluate(config, workdir)
            losses += [*Sums.losses()]
            begin = int(number)
    model, opt, places = made[-1]
    params, opt_state = (nnx.to_pure_dict(nnx.state(one)) for one in (model, opt))
    assert foreign.places(nnx.state(opt)) == places
    assert float(lbopt.optimizer_metrics(nnx.state(opt))["trust_ratio/embedder/embedding"]) > 0
    foreign.keep(workdir + "/kept.npz", losses, params=params, opt_state=opt_state)


if __name__ == "__main__":
    main(*sys.argv[1:])
