"""Train and evaluate on four devices of one process or two: `python shared_run.py [INDEX PORT]`.

Prints the results. The devices are in the order of a ring through two hosts: the second host's lie
between those of the first.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from lbopt.config import CheckpointConfig, DataConfig, ModelConfig, TrainConfig
from lbopt.data.squad import EvaluationWindows, Question
from lbopt.data.text import WordPiece
from lbopt.data.text._pieces import SPECIAL_TOKENS
from lbopt.evaluation import evaluate_answers, predict_fn
from lbopt.models import Model
from lbopt.parallel import TrainState, _mesh, make_eval_step, put_batch, replicated_sharding
from lbopt.recipes import build_run

RING = (0, 2, 3, 1)


def text_config():
    config = TrainConfig(
        global_batch_size=8,
        num_steps=4,
        data=DataConfig("pydoc_lm", sequence_length=16, vocab_size=256, carry_state=True),
        model=ModelConfig("lstm_lm", size="small", width_coefficient=0.08),
        eval_global_batch_size=2048,
        checkpoint=CheckpointConfig(best_metric="eval/loss"),
    )
    config.schedule.warmup_steps = 0
    config.schedule.base_learning_rate = 8.0
    config.optimizer.name = "momentum"
    return config


def text():
    """Return the devices' global batches, the training losses, and the evaluation."""
    run = build_run(text_config())
    whole = jax.jit(lambda batch: batch["tokens"], out_shardings=replicated_sharding(run.mesh))
    state = run.init()
    tokens = []
    losses = []
    for step in range(run.num_steps):
        batch = put_batch(run.mesh, run.batches[step])
        tokens.append(np.asarray(whole(batch)).tolist())
        state, found = jax.block_until_ready(run.train_step(state, batch))
        losses.append(float(found["loss"][0] / found["loss"][1]))
    return {"tokens": tokens, "losses": losses, "text": run.evaluate(state)}


def answers():
    """Return the scores of a network whose logits are those of single tokens."""
    random = np.random.default_rng(0)
    pieces = WordPiece([*SPECIAL_TOKENS, *"abcdefghij"])
    contexts = [" ".join(random.choice(list("abcdefghij"), 9 + number)) for number in range(22)]
    questions = [
        Question(str(number), "a b", context, (context[8:11],), (8,))
        for number, context in enumerate(contexts)
    ]
    logits = {
        name: random.normal(size=20).astype(np.float32) for name in ("start_logits", "end_logits")
    }

    def network(params, model_state, inputs, train, rng=None):
        return {name: value[inputs["input_ids"]] for name, value in params.items()}, model_state

    step = make_eval_step(predict_fn(Model(None, network), 6), _mesh.make_mesh())
    state = TrainState(jnp.int32(0), logits, {}, (), None)
    return evaluate_answers(step, state, EvaluationWindows(questions, pieces, 16, 4, 6), 8)


def main(index=None, port=None):
    jax.config.update("jax_disable_most_optimizations", True)
    if index is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index))
    ring = [jax.devices()[place] for place in RING]
    _mesh.available_devices = lambda: ring
    owners = [device.process_index for device in ring]
    print(json.dumps({"owners": owners, **text(), "answers": answers()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
