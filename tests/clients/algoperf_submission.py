"""A submission to AlgoPerf: LAMB, LEGW and lbopt's step."""

from algoperf import spec

import lbopt
from lbopt.metrics import means


def init_optimizer_state(workload, model_params, model_state, hyperparameters, rng):
    def loss_fn(params, model_state, batch, key):
        mode = spec.ForwardPassMode.TRAIN
        logits, model_state = workload.model_fn(
            params, batch, model_state, mode, key, update_batch_norm=True
        )
        found = workload.loss_fn(batch["targets"], logits, batch.get("weights"))
        total = found["summed"]
        number = found["n_valid_examples"]
        return total / number, (model_state, {"loss": (total, number)})

    batch = get_batch_size("mnist")
    epochs = workload.step_hint * batch / workload.num_train_examples
    rate = lbopt.legw_schedule(
        hyperparameters.learning_rate, 128, 0.1, batch, workload.num_train_examples, epochs
    )
    tx = lbopt.lamb(rate, weight_decay=hyperparameters.weight_decay)
    step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh())
    return lbopt.TrainState.create(model_params, model_state, tx, rng), step


def update_params(
    workload, current_param_container, model_state, batch, optimizer_state, global_step, **_
):
    state, step = optimizer_state
    state, metrics = step(
        state.replace(params=current_param_container, model_state=model_state), batch
    )
    if workload.metrics_logger is not None:
        workload.metrics_logger.append_scalar_metrics(means([metrics]), global_step)
    return (state, step), state.params, state.model_state


def get_batch_size(workload_name):
    return 512


def data_selection(workload, input_queue, *_):
    return next(input_queue)
