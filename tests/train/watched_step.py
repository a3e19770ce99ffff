"""A training step that calls a test's function before every step."""


class WatchedStep:
    """A training step for `Run.train_step`; what is not a call goes to the step itself.

    Args:
      step: The training step.
      before: Function of (state, batch) that is called before the step; it may end the run.
    """

    def __init__(self, step, before):
        self._step = step
        self._before = before

    def __call__(self, state, batch):
        self._before(state, batch)
        return self._step(state, batch)

    def __getattr__(self, name):
        return getattr(self._step, name)
