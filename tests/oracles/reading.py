"""The fields of a config that a factory reads, and those declared to apply."""

import dataclasses

from lbopt.config import _fields


class Recorder:
    """A config group that remembers which of its fields were read."""

    def __init__(self, group):
        self._group = group
        self.names = set()

    def __getattr__(self, name):
        value = getattr(self._group, name)
        if name in {field.name for field in dataclasses.fields(self._group)}:
            self.names.add(name)
        return value


def reads(group, factory):
    """Return the names of the fields that `factory(group)` reads."""
    recorder = Recorder(group)
    factory(recorder)
    return recorder.names


def declared(group, *around):
    """Return the names of the fields that apply, except those that another field replaces."""
    return {
        field.name
        for field in dataclasses.fields(group)
        if _fields.applies(field, group, *around)
        and not _is_replaced(group, _fields.applicability(field).unless)
    }


def _is_replaced(group, other):
    return bool(other) and getattr(group, other) is not None
