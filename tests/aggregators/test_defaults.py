"""The functions' defaults are the sources', and the config's are the functions'."""

import inspect

import pytest

import lbopt
from lbopt.config import AggregatorConfig

PUBLISHED = {
    # Sense-X/AGVM@b60d59813d238f4c7a37cf85ac51203f408c85e4:agvm/optim/agvm_optimizer_hook.py: the
    # hook's arguments, and the bounds and eps in its code
    lbopt.agvm: {
        "interval": 5,
        "start": 500,
        "stop": None,
        "alpha": 0.97,
        "clip": (0.5, 10.0),
        "eps": 1e-6,
    },
    # drcut/CPD@ddd9a67c7599214a4061ae04b28387171d29d96a:CPDtorch/utils/dist_util.py: exp 5, man 2
    lbopt.aps: {"exponent_bits": 5, "mantissa_bits": 2},
    # epfml/powersgd@f07be924eda568511c0ca00efdfed06b1d7e6332:powersgd/powersgd.py
    lbopt.powersgd: {"start": 100, "min_rate": 2.0},
}


def defaults(function):
    return {name: one.default for name, one in inspect.signature(function).parameters.items()}


@pytest.mark.parametrize("function", PUBLISHED, ids=lambda function: function.__name__)
def test_defaults_are_the_published_ones(function):
    found = defaults(function)
    assert {name: found[name] for name in PUBLISHED[function]} == PUBLISHED[function]


@pytest.mark.parametrize(
    ("function", "fields"),
    [
        (
            lbopt.agvm,
            {
                "interval": "interval_steps",
                "alpha": "alpha",
                "clip": "scale_bounds",
                "stop": "stop_step",
            },
        ),
        (
            lbopt.aps,
            dict.fromkeys(
                ("exponent_bits", "mantissa_bits", "accumulate", "shift", "overflow", "rounding")
            ),
        ),
        (lbopt.ef21, {"momentum": None, "dense_start": None}),
        (lbopt.econtrol, {"eta": None, "dense_start": None}),
        (lbopt.powersgd, {"min_rate": None}),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_the_config_has_the_same(function, fields):
    config = AggregatorConfig()
    found = defaults(function)
    for name, field in fields.items():
        assert getattr(config, field or name) == found[name], name
