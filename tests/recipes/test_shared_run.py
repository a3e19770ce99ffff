"""Two processes whose devices alternate along the mesh compute what one process does."""

import json
import pathlib
import runpy
import subprocess
import sys

import numpy as np
import pytest
from forked import Forked
from jobs import free_ports, on_devices

from lbopt.data import TrainBatches
from lbopt.data.from_config import load_source

SHARED_RUN = pathlib.Path(__file__).with_name("shared_run.py")


def start(devices, *arguments):
    variables = {**on_devices(devices), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, str(SHARED_RUN), *map(str, arguments)]
    return Forked(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def alone():
    return result(start(4))


@pytest.fixture(scope="module")
def shared():
    port = free_ports()
    return [result(process) for process in [start(2, index, port) for index in range(2)]]


@pytest.mark.process
@pytest.mark.slow
def test_both_know_the_whole(shared, alone):
    assert shared[0] == shared[1]
    assert (alone["owners"], shared[0]["owners"]) == ([0, 0, 0, 0], [0, 1, 1, 0])


@pytest.mark.slow
def test_the_global_batches_are_those_of_the_stream(shared, alone):
    config = runpy.run_path(str(SHARED_RUN))["text_config"]()
    batches = TrainBatches(load_source(config.data, 8).splits.train, config.seed, 8, 4)
    for found in (alone, shared[0]):
        np.testing.assert_array_equal(
            found["tokens"], [batches[step]["tokens"] for step in range(4)]
        )


@pytest.mark.slow
def test_a_state_that_is_carried_stays_with_its_text(shared, alone):
    assert shared[0]["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    assert shared[0]["text"] == pytest.approx(alone["text"], rel=1e-6)
    assert len(set(alone["losses"])) == 4


def test_answers_belong_to_their_questions(shared, alone):
    assert shared[0]["answers"] == alone["answers"]
    assert 5 < alone["answers"]["f1"] < 95
