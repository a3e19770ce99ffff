"""Do the parameters diffuse ultra-slowly? ||w_t - w_0|| on digits beside log t and t^p.

    lbopt sweep --config=configs/sweeps/diffusion_digits.py --workdir=runs/diffusion_digits

Hoffer et al. (arXiv 1705.08741v2, abstract) see the distance grow like log t in the initial phase
of a high learning rate; the abstract of "The Limit of the Batch Size" (arXiv 2006.08517v1) says
that its results contradict this. So the learning rate is constant here, there is no weight decay,
and both curves are fitted from the end of warmup on, for an MLP and a CNN with batch norm at three
batch sizes.

Rows (`:ROW`): (none), 1,000 steps at every batch size; `epochs`, 50 epochs at every batch size;
`smoke`, tiny.
"""

import common
import digits_cnn

from lbopt.config import (
    About,
    MeasureConfig,
    ModelConfig,
    OptimizerConfig,
    SearchConfig,
    SweepConfig,
    TrainConfig,
)
from lbopt.errors import require_choice

ROWS = ("", "epochs", "smoke")


def get_config(arg: str = "") -> SweepConfig:
    """Return the study: at equal steps, at equal epochs (`epochs`), or a tiny one (`smoke`)."""
    if arg:
        require_choice("--config row", arg, ROWS[1:])

    def constant(optimizer: str, rate: float) -> common.Optimizer:
        schedule = common.legw(rate, warmup_epochs=0.25, decay="constant")
        return OptimizerConfig(optimizer), schedule

    momentum = constant("momentum", 0.1)
    cnn = digits_cnn.get_config().model

    config = SweepConfig(
        name=f"diffusion_digits{':' * bool(arg)}{arg}",
        about=About(
            paper="Hoffer et al. 1705.08741v2, The Limit of the Batch Size 2006.08517v1",
            status="measured here",
        ),
        train=TrainConfig(
            name="diffusion_digits", num_epochs=50.0, model=ModelConfig("mlp", (128,))
        ),
        arms=(
            common.make_arm("MLP, momentum", momentum),
            common.make_arm("CNN, momentum", momentum, model=cnn),
            common.make_arm("CNN, Adam", constant("adam", 0.004), model=cnn),
            common.make_arm("CNN, LAMB", constant("lamb", 0.01), model=cnn),
        ),
        global_batch_sizes=(16, 128, 1024),
        search=SearchConfig(
            learning_rate_factors=(0.125, 0.25, 0.5, 1.0, 2.0, 4.0),
            widen_candidates=0,  # as its committed results were searched
        ),
        final_seeds=common.final_seeds(5),
        measure=MeasureConfig(distance=True),
    )

    if arg == "smoke":
        common.make_small(config, batches=(128, 1024))
        config.train.num_steps = 10
        config.arms = config.arms[:1]
    elif not arg:
        config.train.num_steps = 1000
    return config
