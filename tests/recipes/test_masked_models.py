"""The number of decayed and adapted leaves per shipped model, which a renamed module changes."""

import re

import jax
import pytest

import lbopt
from lbopt.config import DataConfig, ModelConfig
from lbopt.recipes import make_problem

# Counted by hand. CNN: 9 x 16 + 9 x 16 x 32 + 128 x 64 + 64 x 10 numbers in 4 kernels; 96 in two
# norms, 74 in two biases. LSTM: 4 x (8 x 64 + 64 x 64) + 64 x 10 in 9 kernels; 4 x 64 + 10 in 5
# biases.
COUNTS = {
    "cnn": "10 parameters (13,754 numbers): 4 decayed (13,584), 4 adapted (13,584)",
    "lstm": "14 parameters (19,338 numbers): 9 decayed (19,072), 9 adapted (19,072)",
}


@pytest.mark.parametrize("model", COUNTS)
@pytest.mark.parametrize("build", [lbopt.lamb, lbopt.lans, lbopt.lars])
def test_tensors_and_numbers_that_are_decayed_and_adapted(model, build, capsys):
    params, _ = jax.eval_shape(
        make_problem(DataConfig(), ModelConfig(model)).init, jax.random.key(0)
    )
    lbopt.summarize_masks(params, build(0.1, weight_decay=0.1))
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == COUNTS[model]
    roles = {line.split()[0]: re.split(r"\s{2,}", line)[2] for line in printed[1:-1]}
    assert set(roles.values()) <= {"weight", "bias", "norm"}
