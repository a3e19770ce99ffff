"""How far does the batch size go on Fashion-MNIST? From 64 to all 50,000 training images.

    lbopt prepare fashion_mnist
    lbopt sweep --config=configs/sweeps/fashion_limit.py:mlp --workdir=runs/fashion_limit

Protocol. Every run sees the same 999,424 images (19.99 epochs; 1,000,000 at the full batch; 245,760
in `small`), which are whole steps at every batch size. There every arm has the same search around
its own rule: three rates, and up to four more where the best lies at an edge. All choices are made
on 10,000 training images that nothing trains on. The base rates at batch 256 are from a coarse grid
on parts of the training set. The test set is read at the end, by six fresh seeds of the chosen rate
(four in `small`, ten in `waterfall`). A limit allows a loss of one point.

Two cells of `mlp`, momentum and LARS at the full batch, ran twice. At first all their candidates
stayed at chance, which then chose the rate and ended the search. Since then such a search follows
the validation loss. Their final runs, 10 to 15 % on the test set, were replaced.

Power, by `lbopt check`: at one batch size 6 seeds show a difference of one point between two of 10
arms with power 0.8, if seeds vary by 0.371 points; `small` shows 1.32, and `waterfall` 0.613.
`--pilot=WORKDIR` measures that spread.

"The Limit of the Batch Size" (arXiv 2006.08517v1) has this form. Its table of MNIST at the full
batch in 35 steps, another data set, whose settings were selected on the test set: momentum 93.74,
LARS 97.65, LAMB 98.87 %; see configs/mnist.py. Its step-by-step recipe is the row `waterfall`.

Rows (`:ROW`):

    (none)     ten arms, Simple CNN at a quarter of its width; for a GPU, on 2 CPU cores some 30 to
               43 hours, as `lbopt sweep` tells beforehand
    mlp        the same with a perceptron of 128 hidden units; 80 minutes on 2 CPU cores
    waterfall  momentum at the full batch, and what each part of a large-batch recipe adds to it; 8
               minutes on 2 CPU cores
    small      five arms, the perceptron, 4.9 epochs, four seeds; 4 minutes on 2 CPU cores
    smoke      tiny, on scikit-learn's digits

The row `waterfall` adds LARS's weight decay of 1e-4 together with the trust ratio. Shampoo treats
the shorter side of each matrix alone, as the longer one has 784 inputs.
"""

import copy

import common

from lbopt.config import (
    About,
    Arm,
    DataConfig,
    LossConfig,
    MeasureConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    SearchConfig,
    SweepConfig,
    TrainConfig,
)
from lbopt.errors import require_choice

ROWS = ("", "mlp", "waterfall", "small", "smoke")
BATCH = 256
"""Batch size to which the base rates belong."""
SIZES = (64, 256, 1024, 4096, 16384, 50_000)
IMAGES = 61 * 16384
"""Images that a run sees: whole steps of every batch size but the largest."""
WARMUP_EPOCHS = 0.05
"""LEGW's warmup at `BATCH`: 10 steps at every batch size."""
ARMS = {
    "Momentum + linear": (
        OptimizerConfig("momentum"),
        common.linear(0.12, batch=BATCH, warmup_epochs=1.0),
    ),
    "AdamW + sqrt": (
        OptimizerConfig("adamw", weight_decay=0.01),
        ScheduleConfig(0.008, base_batch_size=BATCH, warmup_rule="epochs", base_warmup_epochs=1.0),
    ),
    "AdamW + LEGW": (
        OptimizerConfig("adamw", weight_decay=0.01),
        common.legw(0.008, batch=BATCH, warmup_epochs=WARMUP_EPOCHS),
    ),
    "LARS + LEGW": (
        OptimizerConfig("lars", weight_decay=1e-4),
        common.legw(8.0, batch=BATCH, warmup_epochs=WARMUP_EPOCHS),
    ),
    "LAMB + LEGW": (
        OptimizerConfig("lamb", weight_decay=0.01),
        common.legw(0.012, batch=BATCH, warmup_epochs=WARMUP_EPOCHS),
    ),
    "AdamH + LEGW": (
        OptimizerConfig("adamh"),
        common.legw(0.02, batch=BATCH, warmup_epochs=WARMUP_EPOCHS),
    ),
    "Muon + LEGW": (
        OptimizerConfig("muon"),
        common.legw(0.06, batch=BATCH, warmup_epochs=WARMUP_EPOCHS),
    ),
    "MuonH + LEGW": (
        OptimizerConfig("muonh"),
        common.legw(0.03, batch=BATCH, warmup_epochs=WARMUP_EPOCHS),
    ),
    "Shampoo + LEGW": (
        OptimizerConfig("shampoo", options={"variant": "one_sided"}),
        common.legw(0.008, batch=BATCH, warmup_epochs=WARMUP_EPOCHS),
    ),
    "Schedule-Free + LEGW": (
        OptimizerConfig("optax.contrib.schedule_free_adamw"),
        common.legw(0.008, batch=BATCH, warmup_epochs=WARMUP_EPOCHS, decay="constant"),
    ),
}
"""Optimizer and rules of each arm, with its rate at `BATCH`."""
SEARCH = SearchConfig(learning_rate_factors=(0.5, 1.0, 2.0))
PERCEPTRON = ModelConfig("mlp", widths=(128,))
INGREDIENTS = ("+ polynomial decay", "+ warmup", "+ LEGW", "+ trust ratio", "+ label smoothing")


def get_config(arg: str = "") -> SweepConfig:
    """Return the study of the row."""
    if arg:
        require_choice("--config row", arg, ROWS[1:])

    config = SweepConfig(
        name=f"fashion_limit{':' * bool(arg)}{arg}",
        about=About(
            paper="The Limit of the Batch Size 2006.08517v1, Fashion-MNIST 1708.07747",
            note="Own choice: batch sizes, epochs, networks, rates, search, seeds.",
            status="measured here" if arg in ("mlp", "waterfall", "small") else "not yet run",
        ),
        train=TrainConfig(
            name="fashion_limit",
            num_epochs=IMAGES / 50_000,
            data=common.fashion_mnist(),
            model=ModelConfig("simple_cnn", width_coefficient=0.25),
            eval_global_batch_size=10_000,
        ),
        arms=tuple(common.make_arm(name, optimizer) for name, optimizer in ARMS.items()),
        global_batch_sizes=SIZES,
        search=copy.deepcopy(SEARCH),
        final_seeds=common.final_seeds(6),
        measure=MeasureConfig(num_probes=6, probe_part_size=64),
        microstep_size=50_000 if arg else 4_096,
    )

    if arg:
        config.train.model = copy.deepcopy(PERCEPTRON)
    if arg == "waterfall":
        config.arms = _waterfall()
        config.waterfall = tuple(arm.name for arm in config.arms)
        config.global_batch_sizes = SIZES[-1:]
        config.final_seeds = common.final_seeds(10)
    if arg in ("small", "smoke"):
        _make_small(config)
    if arg == "smoke":
        common.make_small(config, batches=(128, 1024))
        config.train.data = DataConfig("digits")
        config.train.eval_global_batch_size = 256
        config.arms = config.arms[2:]
        config.search = SearchConfig(learning_rate_factors=(0.5, 1.0), widen_candidates=1)
        config.measure.probe_part_size = 16
        config.microstep_size = None
    return config


def _make_small(config: SweepConfig) -> None:
    config.train.num_epochs = 15 * 16384 / 50_000
    config.arms = tuple(arm for arm in config.arms if arm.name.split()[0] in _SMALL)
    config.global_batch_sizes = SIZES[1:-1]
    config.final_seeds = common.final_seeds(4)


_SMALL = ("Momentum", "AdamW", "LAMB", "MuonH")


def _waterfall() -> tuple[Arm, ...]:
    """Return momentum with linear scaling, and arms that each add one thing to the one before."""
    momentum, linear = ARMS["Momentum + linear"]
    plain = ScheduleConfig(
        linear.base_learning_rate,
        base_batch_size=BATCH,
        scaling_rule="linear",
        warmup_rule="none",
        decay="constant",
    )
    arms = [Arm("momentum, linear", copy.deepcopy(momentum), plain, loss=LossConfig())]
    for name, add in zip(INGREDIENTS, (_decay, _warmup, _legw, _trust, _smoothing), strict=True):
        arm = copy.deepcopy(arms[-1])
        arm.name = name
        add(arm)
        arms.append(arm)
    return tuple(arms)


def _decay(arm: Arm) -> None:
    arm.schedule.decay = "polynomial"


def _warmup(arm: Arm) -> None:
    arm.schedule.warmup_rule = "epochs"
    arm.schedule.base_warmup_epochs = 1.0


def _legw(arm: Arm) -> None:
    arm.schedule.scaling_rule = "sqrt"
    arm.schedule.warmup_rule = "legw"
    arm.schedule.base_warmup_epochs = WARMUP_EPOCHS


def _trust(arm: Arm) -> None:
    optimizer, schedule = ARMS["LARS + LEGW"]
    arm.optimizer = copy.deepcopy(optimizer)
    arm.schedule = copy.deepcopy(schedule)


def _smoothing(arm: Arm) -> None:
    arm.loss = LossConfig(label_smoothing=0.1)
