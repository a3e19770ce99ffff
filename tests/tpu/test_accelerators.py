"""The table of accelerators is consistent and agrees with `lbopt plan`'s topologies."""

import math
import pathlib

import pytest
from refusal import refused

from lbopt.plan import _topology

TABLE = pathlib.Path(__file__).parents[2] / "tpu" / "accelerators.tsv"
LINES = [line.split("\t") for line in TABLE.read_text().splitlines() if not line.startswith("#")]
ROWS = [dict(zip(LINES[0], line, strict=True)) for line in LINES[1:]]
CORES_IN_NAME = {"v2": 2, "v3": 2, "v4": 2, "v5p": 2, "v5e": 1, "v6e": 1}
DEVICES_PER_CHIP = {"v2": 2, "v3": 2, "v4": 1, "v5p": 1, "v5e": 1, "v6e": 1}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["accelerator"])
def test_row(row):
    generation = row["generation"]
    chips = int(row["chips"])
    hosts = int(row["hosts"])
    prefix, number = row["accelerator"].rsplit("-", 1)
    assert prefix == ("v5litepod" if generation == "v5e" else generation)
    assert int(number) == chips * CORES_IN_NAME[generation]
    assert int(row["devices"]) == chips * DEVICES_PER_CHIP[generation]
    # A machine has four chips; the smallest slices of v5e and v6e are one machine with one, four or
    # eight.
    assert hosts == (1 if generation in ("v5e", "v6e") and chips <= 8 else chips // 4)
    name, shape = row["plan"].split(":")
    assert name == generation
    assert _product(shape) == chips
    assert shape in _topology.SHAPES[generation] or chips <= 4
    if row["gke_topology"] == "-":
        assert row["gke_machine"] == row["gke_accelerator"] == "-"
    else:
        assert row["gke_topology"] == shape
        assert row["gke_machine"].endswith(f"-{chips // hosts}t")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["accelerator"])
def test_plan_answers_the_name_of_an_accelerator_with_its_topology(row):
    with refused("topology", row["accelerator"], "value") as caught:
        _topology.parse_topology(row["accelerator"])
    assert str(caught.value).endswith(f"use {row['plan']}")


def test_every_generation_is_there_once():
    assert {row["generation"] for row in ROWS} == set(DEVICES_PER_CHIP)
    assert len({row["accelerator"] for row in ROWS}) == len(ROWS)


def _product(shape):
    return math.prod(int(side) for side in shape.split("x"))
