"""Shards of a study in one workdir: one process holds each, all of one division and one config."""

import contextlib

import pytest
from refusal import names_in, numbers_in, refused, troubled

from lbopt.errors import NO_VALUE
from lbopt.workdir import Shard, open_workdir

CONFIG = {"name": "study", "value": 1}


def opened(folder, shard=None, config=CONFIG):
    def compare(saved):
        return [] if saved["config"] == config else ["value is 1 there and 2 here"]

    return open_workdir(
        folder, "sweep", config, compare, shard=Shard.parse(shard) if shard else None
    )


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/2/3", "-1/2", "1/0", ""])
def test_what_is_no_shard_is_refused(text):
    with refused("shard", text):
        Shard.parse(text)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_item_is_in_one_shard(count):
    shards = [Shard(number, count).items_of(range(7)) for number in range(1, count + 1)]
    assert sorted(item for items in shards for item in items) == list(range(7))


def test_two_shards_are_held_side_by_side(tmp_path):
    with opened(tmp_path / "w", "1/2") as one, opened(tmp_path / "w", "2/2") as other:
        assert one == other


def test_one_shard_is_held_once(tmp_path):
    with opened(tmp_path / "w", "1/2"), refused("shard", "1/2", "conflict"):
        opened(tmp_path / "w", "1/2").__enter__()


def test_shards_of_two_divisions_would_do_work_twice(tmp_path):
    with opened(tmp_path / "w", "1/2"), refused("shard", "1/3", "conflict"):
        opened(tmp_path / "w", "1/3").__enter__()
    with opened(tmp_path / "w", "1/3"):  # once those have ended
        pass


@pytest.mark.parametrize("shards", [("1/2", None), (None, "1/2")])
def test_the_whole_and_a_shard_exclude_each_other(tmp_path, shards):
    first, second = shards
    with opened(tmp_path / "w", first), refused("workdir", str(tmp_path / "w"), "conflict"):
        opened(tmp_path / "w", second).__enter__()


def test_a_shard_of_another_config_is_refused_and_nothing_changes(tmp_path):
    with opened(tmp_path / "w", "1/2"):
        before = (tmp_path / "w" / "config.json").read_bytes()
        with refused("workdir", str(tmp_path / "w"), "exists") as caught:
            opened(tmp_path / "w", "2/2", {"name": "study", "value": 2}).__enter__()
        assert numbers_in(caught)[:2] == [1, 2]
        assert "value" in names_in(caught)
        assert (tmp_path / "w" / "config.json").read_bytes() == before


def test_a_shard_is_free_again_when_its_process_has_ended(tmp_path):
    with contextlib.ExitStack() as stack:
        stack.enter_context(opened(tmp_path / "w", "1/2"))
    with opened(tmp_path / "w", "1/2"):
        pass


@pytest.mark.parametrize("name", [".shards", ".shard-1-of-2"])
def test_a_lock_that_cannot_be_made_is_the_disks_fault(tmp_path, name):
    (tmp_path / name).mkdir()
    with troubled(str(tmp_path / name), NO_VALUE, "resource"), opened(tmp_path, "1/2"):
        pass
