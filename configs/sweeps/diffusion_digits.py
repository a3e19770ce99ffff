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

from lbopt.config import (
    About,
    Arm,
    MeasureConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
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

    constant = {
        "base_batch_size": 64,
        "warmup_rule": "legw",
        "base_warmup_epochs": 0.25,
        "decay": "constant",
    }
    cnn = ModelConfig("cnn", (16, 32), 64, batch_norm_momentum=0.8)
    momentum = OptimizerConfig("momentum")

    config = SweepConfig(
        name=f"diffusion_digits{':' * bool(arg)}{arg}",
        about=About(
            paper="Hoffer et al. 1705.08741v2, The Limit of the Batch Size 2006.08517v1",
            status="not yet run" if arg == "smoke" else "measured here",
        ),
        train=TrainConfig(
            name="diffusion_digits", num_epochs=50.0, model=ModelConfig("mlp", (128,))
        ),
        arms=(
            Arm("MLP, momentum", momentum, ScheduleConfig(0.1, scaling_rule="sqrt", **constant)),
            Arm(
                "CNN, momentum",
                momentum,
                ScheduleConfig(0.1, scaling_rule="sqrt", **constant),
                model=cnn,
            ),
            Arm(
                "CNN, Adam",
                OptimizerConfig("adam"),
                ScheduleConfig(0.004, scaling_rule="sqrt", **constant),
                model=cnn,
            ),
            Arm(
                "CNN, LAMB",
                OptimizerConfig("lamb"),
                ScheduleConfig(0.01, scaling_rule="sqrt", **constant),
                model=cnn,
            ),
        ),
        global_batch_sizes=(16, 128, 1024),
        search=SearchConfig(learning_rate_factors=(0.125, 0.25, 0.5, 1.0, 2.0, 4.0)),
        final_seeds=(100, 101, 102, 103, 104),
        measure=MeasureConfig(distance=True),
    )

    if arg == "smoke":
        config.train.num_steps = 10
        config.arms = config.arms[:1]
        config.global_batch_sizes = (128, 1024)
        config.final_seeds = (100, 101)
    elif not arg:
        config.train.num_steps = 1000
    return config
