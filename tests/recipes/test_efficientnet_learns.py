"""EfficientNet learns the digits in a shorter, narrower run than configs/; compiling dominates."""

import pytest
from short_run import trained


@pytest.mark.slow
def test_efficientnet_on_digits():
    found, _ = trained(
        "digits_efficientnet.py:lamb-256", num_epochs=6.0, model__depth_coefficient=0.25
    )
    assert found["accuracy"] > 0.90
