"""How many bits does the gradient reduction of large-batch training need? LAMB on scikit-learn's digits, with and without APS.

    lbopt sweep --config=configs/sweeps/precision_digits.py --workdir=runs/precision_digits

Eight replicas round their gradients to a format of 3 to 32 bits and sum them in fp32; the sum is rounded to the format too, as
it would be to travel on. What is too large becomes the largest number. With APS (arXiv 1911.08907v3) each layer is shifted by the power of two that the format allows; without, the
format is what it is. Batch norm sees a replica's part. Each arm has its own learning rate by the same search.

Rows (`:ROW`): (none); `same`, in which partial sums are rounded to the format as well, as published; `smoke`, tiny.
"""

from lbopt.config import (
    About,
    AggregatorConfig,
    Arm,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    SearchConfig,
    SweepConfig,
    TrainConfig,
)
from lbopt.errors import require_choice

ROWS = ("", "same", "smoke")
FORMATS = ((2, 0), (3, 0), (4, 0), (4, 1), (4, 3), (5, 2), (5, 10), (8, 7))
"""(exponent bits, mantissa bits), and a bit for the sign: 3 to 16 bits."""
REPLICAS = 8


def get_config(arg: str = "") -> SweepConfig:
    """Return the study, with sums in fp32 or in the format, or a tiny one."""
    if arg:
        require_choice("--config row", arg, ROWS[1:])
    lamb = OptimizerConfig("lamb", weight_decay=0.01)
    # Replicas that one device has in turn normalize their own examples.
    model = ModelConfig("cnn", (16, 32), 64, batch_norm_scope="local", batch_norm_momentum=0.8)
    legw = ScheduleConfig(
        0.02, base_batch_size=64, warmup_rule="legw", base_warmup_epochs=0.25, scaling_rule="sqrt"
    )

    def reduced(exponent_bits: int, mantissa_bits: int, shift: bool) -> Arm:
        name = f"{1 + exponent_bits + mantissa_bits} bits (e{exponent_bits}m{mantissa_bits}){', APS' * shift}"
        aggregator = AggregatorConfig(
            "aps",
            replicas_per_device=REPLICAS,
            exponent_bits=exponent_bits,
            mantissa_bits=mantissa_bits,
            shift=shift,
            overflow="saturate",
            accumulate="same" if arg == "same" else "fp32",
        )
        return Arm(name, lamb, legw, aggregator=aggregator)

    whole = Arm(
        "32 bits", lamb, legw, aggregator=AggregatorConfig("mean", replicas_per_device=REPLICAS)
    )
    config = SweepConfig(
        name=f"precision_digits{':' * bool(arg)}{arg}",
        about=About(
            paper="Auto-Precision Scaling 1911.08907v3",
            status="not yet run" if arg == "smoke" else "measured here",
        ),
        train=TrainConfig(name="precision_digits", num_epochs=20.0, model=model),
        arms=(whole, *(reduced(*form, shift) for form in FORMATS for shift in (True, False))),
        global_batch_sizes=(64, 256, 1024),
        search=SearchConfig(learning_rate_factors=(0.25, 0.5, 1.0, 2.0, 4.0), seeds=(0,)),
        final_seeds=(100, 101, 102, 103, 104),
    )
    if arg == "smoke":
        config.train.num_epochs, config.arms, config.global_batch_sizes = (
            8.0,
            config.arms[:3],
            (128, 1024),
        )
        config.search, config.final_seeds = (
            SearchConfig(learning_rate_factors=(0.5, 1.0)),
            (100, 101),
        )
    return config
