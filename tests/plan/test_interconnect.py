"""The torus model, compared with written-out results for a few groups."""

import pytest

from lbopt.plan import _interconnect, _topology
from lbopt.plan._collectives import Collective

pytestmark = pytest.mark.tpu_compiler

LINK = 82e9
HOP = 1e-6


def exchange(op, num_bytes, group, count=1):
    return Collective(op, "f32", num_bytes, count, len(group), "gradients", tuple(group))


@pytest.fixture(scope="module")
def pod():
    return _topology.open_topology("v3:32x32")


def seconds(place, one):
    return _interconnect.seconds_of(place, place.devices, one)


def test_a_whole_pod_is_a_torus(pod):
    every = exchange("all-reduce", 10**8, range(2048), 3)
    wanted = 2 * 10**8 * (1 - 1 / 1024) / (4 * LINK) + 3 * 2 * (16 + 16) * HOP
    assert seconds(pod, every) == pytest.approx(wanted)


def test_a_smaller_slice_is_a_mesh():
    place = _topology.open_topology("v3:4x4")
    wanted = 2 * 10**8 * (1 - 1 / 16) / (2 * LINK) + 2 * (3 + 3) * HOP
    assert seconds(place, exchange("all-reduce", 10**8, range(32))) == pytest.approx(wanted)


def test_a_slice_may_be_a_ring_along_one_axis():
    place = _topology.open_topology("v3:16x32")
    assert [place.is_ring(axis) for axis in (0, 1)] == [False, True]
    wanted = 10**8 * (1 - 1 / 512) / (3 * LINK) + (15 + 16) * HOP
    assert seconds(place, exchange("all-gather", 10**8, range(1024))) == pytest.approx(wanted)


def test_cores_of_a_chip_talk_for_nothing(pod):
    assert seconds(pod, exchange("all-reduce", 10**8, (0, 1))) == 0


def test_neighbours_are_a_line(pod):
    """A host's 2 x 2 chips have one link along each axis."""
    wanted = 2 * 10**6 * 3 / 4 / (2 * LINK) + 5 * 2 * 2 * HOP
    assert seconds(pod, exchange("all-reduce", 10**6, range(8), 5)) == pytest.approx(wanted)


def test_everybody_to_everybody_crosses_half_of_the_longest_axis(pod):
    wanted = 10**6 * 32 / (8 * LINK) + 32 * HOP
    assert seconds(pod, exchange("all-to-all", 10**6, range(2048))) == pytest.approx(wanted)
    assert seconds(pod, exchange("collective-permute", 10**6, (0, 1))) == pytest.approx(
        10**6 / LINK + HOP
    )


@pytest.mark.parametrize(
    ("name", "rings"),
    [
        ("v5e:16x16", [True, True]),
        ("v5e:8x16", [False, True]),
        ("v5p:4x4x4", [True] * 3),
        ("v5p:2x2x4", [False] * 3),
    ],
)
def test_which_axes_close(name, rings):
    place = _topology.open_topology(name)
    assert [place.is_ring(axis) for axis in range(len(place.shape))] == rings


@pytest.mark.parametrize(
    ("name", "devices", "hosts", "gibibytes"),
    [
        ("v2:2x2", 8, 1, 7.5),
        ("v3:4x4", 32, 4, 15.5),
        ("v4:2x2x2", 8, 2, 31),
        ("v5e:2x2", 4, 1, 15.75),
        ("v5p:2x2x2", 8, 2, 95.7),
        ("v6e:2x4", 8, 2, 31.2),
        ("tpu7x:2x2x2", 16, 2, 94.7),
    ],
)
def test_generations(name, devices, hosts, gibibytes):
    """Devices are cores up to v3 and on tpu7x, and chips on the others."""
    place = _topology.open_topology(name)
    assert (len(place.devices), len({device.process_index for device in place.devices})) == (
        devices,
        hosts,
    )
    assert len(place.devices) == place.chip.cores_per_chip * len(
        {tuple(device.coords) for device in place.devices}
    )
    assert _topology.memory_limit(place.devices[0]) / 2**30 == pytest.approx(gibibytes, rel=0.01)


def test_every_listed_slice_is_known():
    for generation, shapes in _topology.SHAPES.items():
        for shape in shapes:
            assert _topology.open_topology(f"{generation}:{shape}").chip.generation == generation
