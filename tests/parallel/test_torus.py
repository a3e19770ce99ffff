"""Meshes follow the order of the torus, which is read from fake devices' coordinates."""

import types

import jax
import pytest
from refusal import refused

import lbopt
from lbopt.parallel import _mesh


def chips(columns, rows, planes=1, cores=2):
    """Return devices row by row: x varies fastest; cores of a chip are adjacent."""
    return [
        types.SimpleNamespace(coords=(x, y, z), core_on_chip=core)
        for z in range(planes)
        for y in range(rows)
        for x in range(columns)
        for core in range(cores)
    ]


def by_host(devices):
    """Order devices as a TPU does: hosts of 2 x 2 chips one after another."""
    return sorted(
        devices,
        key=lambda device: (
            device.coords[1] // 2,
            device.coords[0] // 2,
            device.coords[1],
            device.coords[0],
            device.core_on_chip,
        ),
    )


class OnDevices:
    """The attributes of a mesh that `torus_grid` reads."""

    def __init__(self, devices):
        self.devices = types.SimpleNamespace(flat=devices)
        self.size = len(devices)


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ({"columns": 4, "rows": 4}, (4, 8)),
        ({"columns": 8, "rows": 4}, (4, 16)),
        ({"columns": 4, "rows": 8}, (8, 8)),
        ({"columns": 4, "rows": 4, "cores": 1}, (4, 4)),
        ({"columns": 2, "rows": 2, "planes": 4, "cores": 1}, (8, 2)),
        ({"columns": 1, "rows": 1, "cores": 1}, (1, 1)),
    ],
)
def test_rows_of_chips_are_a_grid(shape, grid):
    assert _mesh.torus_grid(OnDevices(chips(**shape))) == grid


def test_host_order_is_no_grid():
    devices = chips(4, 4)
    assert by_host(devices) != devices
    assert _mesh.torus_grid(OnDevices(by_host(devices))) is None


def test_two_neighbours_exchanged_are_no_grid():
    devices = chips(2, 2)
    devices[1], devices[2] = devices[2], devices[1]
    assert _mesh.torus_grid(OnDevices(devices)) is None


def test_rows_of_different_lengths_are_no_grid():
    assert _mesh.torus_grid(OnDevices(chips(4, 2)[:-1])) is None


def test_make_mesh_brings_devices_into_torus_order(monkeypatch):
    monkeypatch.setattr(
        _mesh, "Mesh", lambda devices, names, axis_types: OnDevices(list(devices.flat))
    )
    devices = chips(4, 4)
    mesh = lbopt.make_mesh(devices=by_host(devices), order="torus")
    assert list(mesh.devices.flat) == devices
    assert _mesh.torus_grid(mesh) == (4, 8)
    given = lbopt.make_mesh(devices=by_host(devices))
    assert list(given.devices.flat) == by_host(devices)
    assert _mesh.torus_grid(given) is None
    half = lbopt.make_mesh(16, devices=by_host(devices), order="torus")
    assert _mesh.torus_grid(half) == (2, 8), "the first rows"


def test_cpu_devices_have_no_grid():
    assert _mesh.torus_grid(lbopt.make_mesh(4)) is None
    assert not hasattr(jax.devices()[0], "coords")
    with refused("order", "torus", "conflict"):
        lbopt.make_mesh(4, order="torus")


def test_unknown_order_is_refused():
    with refused("order", "rows", "choice"):
        lbopt.make_mesh(4, order="rows")


def test_gpus_with_coordinates_have_no_torus():
    gpus = [types.SimpleNamespace(coords=(0, 0, number)) for number in range(4)]
    assert _mesh.torus_grid(OnDevices(gpus)) is None
