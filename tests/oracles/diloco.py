"""DiLoCo (arXiv:2311.08105v3, Algorithm 1) with fragments, in NumPy float64."""

import numpy as np


def gradient(params, batch):
    """Return the gradient of the mean squared error of x A B + c."""
    x, y = (np.float64(batch[name]) for name in ("x", "y"))
    hidden = x @ params["first"]
    error = 2 * (hidden @ params["second"] + params["bias"] - y) / y.size
    return {
        "first": x.T @ error @ params["second"].T,
        "second": hidden.T @ error,
        "bias": error.sum(0),
    }


def rounds(start, batches, workers, every, owners, offsets, inner, outer, present=None):
    """Yield the shared parameters after each step; the last one exchanges all fragments.

    Args:
      start: Name -> first parameters.
      batches: The global batches; worker i has the i-th equal slice of each.
      workers: Number of workers.
      every: Inner steps of a round.
      owners: Name -> fragment.
      offsets: Remainder of the steps that exchange each fragment.
      inner: (learning rate, momentum) of the workers' SGD.
      outer: (learning rate, Nesterov momentum) of the outer SGD.
      present: Step, counted from 1 -> the workers that its exchange counts; all if it is not there.
        The others continue with the velocity of the first of these.
    """
    shared = {name: np.float64(x) for name, x in start.items()}
    velocity = {name: np.zeros(x.shape) for name, x in start.items()}
    own = [{name: x.copy() for name, x in shared.items()} for _ in range(workers)]
    traces = [{name: np.zeros(x.shape) for name, x in start.items()} for _ in range(workers)]
    for step, batch in enumerate(batches, 1):
        for worker in range(workers):
            part = {name: np.split(x, workers)[worker] for name, x in batch.items()}
            for name, g in gradient(own[worker], part).items():
                traces[worker][name] = inner[1] * traces[worker][name] + g
                own[worker][name] = own[worker][name] - inner[0] * traces[worker][name]

        due = [step % every == offset or step == len(batches) for offset in offsets]
        counted = (present or {}).get(step, range(workers))
        for name, fragment in owners.items():
            if not due[fragment]:
                continue
            way = np.mean([shared[name] - own[worker][name] for worker in counted], axis=0)
            velocity[name] = outer[1] * velocity[name] + way
            shared[name] = shared[name] - outer[0] * (outer[1] * velocity[name] + way)
            for worker in range(workers):
                own[worker][name] = shared[name].copy()
        left_out = [worker for worker in range(workers) if worker not in counted]
        if any(due):
            for worker in left_out:
                own[worker] = {name: x.copy() for name, x in shared.items()}
                traces[worker] = {name: x.copy() for name, x in traces[counted[0]].items()}
        yield {name: x.copy() for name, x in shared.items()}
