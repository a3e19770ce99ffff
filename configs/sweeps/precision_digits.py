"""How many bits does the gradient reduction need? LAMB on scikit-learn's digits.

    lbopt sweep --config=configs/sweeps/precision_digits.py --workdir=runs/precision_digits

Network, LAMB and its rule are those of configs/digits_cnn.py. Eight replicas round their gradients
to a format of 3 to 32 bits and sum them in fp32. The sum is rounded to the format too, as for
sending it. Values that are too large become the largest number of the format. With auto-precision
scaling (APS, arXiv 1911.08907v3) each layer's gradient is first scaled by the largest power of two
that the format allows. Batch norm uses each replica's own examples. Each arm has its own learning
rate, by the same search.

Rows (`:ROW`): (none); `same`, in which partial sums are also rounded to the format, as published;
`smoke`, tiny.
"""

import common
import digits_cnn

from lbopt.config import About, AggregatorConfig, Arm, SearchConfig, SweepConfig, TrainConfig
from lbopt.errors import require_choice

ROWS = ("", "same", "smoke")
FORMATS = ((2, 0), (3, 0), (4, 0), (4, 1), (4, 3), (5, 2), (5, 10), (8, 7))
"""Exponent bits and mantissa bits; with the sign bit 3 to 16 bits."""
REPLICAS = 8


def get_config(arg: str = "") -> SweepConfig:
    """Return the study: with sums in fp32, in the format (`same`), or a tiny one (`smoke`)."""
    if arg:
        require_choice("--config row", arg, ROWS[1:])

    lamb = digits_cnn.OPTIMIZERS["lamb"]
    model = digits_cnn.get_config().model
    # Each replica normalizes its own examples, also when one device runs all replicas.
    model.batch_norm_scope = "local"

    def reduced(exponent_bits: int, mantissa_bits: int, shift: bool) -> Arm:
        bits = 1 + exponent_bits + mantissa_bits
        name = f"{bits} bits (e{exponent_bits}m{mantissa_bits}){', APS' * shift}"
        aggregator = AggregatorConfig(
            "aps",
            replicas_per_device=REPLICAS,
            exponent_bits=exponent_bits,
            mantissa_bits=mantissa_bits,
            shift=shift,
            overflow="saturate",
            accumulate="same" if arg == "same" else "fp32",
        )
        return common.make_arm(name, lamb, aggregator=aggregator)

    whole = common.make_arm(
        "32 bits", lamb, aggregator=AggregatorConfig("mean", replicas_per_device=REPLICAS)
    )

    config = SweepConfig(
        name=f"precision_digits{':' * bool(arg)}{arg}",
        about=About(paper="Auto-Precision Scaling 1911.08907v3", status="measured here"),
        train=TrainConfig(name="precision_digits", num_epochs=20.0, model=model),
        arms=(whole, *(reduced(*form, shift) for form in FORMATS for shift in (True, False))),
        global_batch_sizes=(64, 256, 1024),
        search=SearchConfig(
            learning_rate_factors=(0.25, 0.5, 1.0, 2.0, 4.0),
            seeds=(0,),
            widen_candidates=0,  # as its committed results were searched
        ),
        final_seeds=common.final_seeds(5),
    )

    if arg == "smoke":
        common.make_small(config, batches=(128, 1024))
        config.train.num_epochs = 8.0
        config.arms = config.arms[:3]
        config.search = SearchConfig(learning_rate_factors=(0.5, 1.0), widen_candidates=0)
    return config
