"""Groups of examples of the global batch that share their batch statistics."""

from __future__ import annotations

import dataclasses
import re
from typing import NamedTuple, NoReturn

from lbopt.errors import UserError
from lbopt.replicas import Replicas

_FORMS = (
    "global, local, replicas:N, examples:N (contiguous groups), tiles:RxC or tiles:RxC@HxW (of a "
    "grid of replicas)"
)


class View(NamedTuple):
    """A reshape of the batch axis in which a group's statistics are means over some axes.

    Attributes:
      shape: Sizes of the axes that replace the batch axis.
      over: Axes of `shape` that run within a group.
    """

    shape: tuple[int, ...]
    over: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class StatsScope:
    """A rule for the groups of examples that share their batch statistics.

    Attributes:
      kind: "global", "local" (one replica), "replicas", "examples" or "tiles".
      size: Number of replicas or examples in a group; 0 for the other kinds.
      tile: Rows and columns of replicas in a group; None for the other kinds.
      grid: Rows and columns of all replicas; None takes those of the mesh.

    >>> scope = StatsScope.parse("replicas:4")
    >>> scope.kind, scope.size, scope.num_groups(num_replicas=16, num_examples=256)
    ('replicas', 4, 4)
    """

    kind: str
    size: int = 0
    tile: tuple[int, int] | None = None
    grid: tuple[int, int] | None = None

    @classmethod
    def parse(cls, text: str) -> StatsScope:
        """Read `global`, `local`, `replicas:N`, `examples:N`, `tiles:RxC` or `tiles:RxC@HxW`.

        >>> StatsScope.parse("replicas:4")
        StatsScope(kind='replicas', size=4, tile=None, grid=None)
        >>> StatsScope.parse("tiles:2x2@4x8").grid
        (4, 8)
        """
        if text in ("global", "local"):
            return cls(text)
        if match := re.fullmatch(r"(replicas|examples):([1-9]\d*)", text):
            return cls(match[1], int(match[2]))
        if match := re.fullmatch(r"tiles:([1-9]\d*)x([1-9]\d*)(?:@([1-9]\d*)x([1-9]\d*))?", text):
            rows, columns, height, width = (int(part) if part else 0 for part in match.groups())
            return cls("tiles", tile=(rows, columns), grid=(height, width) if height else None)
        raise UserError("stats_scope", text, f"use {_FORMS}")

    def num_groups(
        self, num_replicas: int, num_examples: int, grid: tuple[int, int] | None = None
    ) -> int:
        """Return the number of groups in the global batch.

        Args:
          num_replicas: Number of replicas that share the global batch.
          num_examples: Number of examples in the global batch (of one microstep).
          grid: Rows and columns of the mesh's replicas; None if the mesh has no grid.

        Raises:
          UserError: If groups would differ in size, or if a group would cross the boundary of a
            replica without holding whole replicas.
        """
        if self.kind == "tiles":
            rows, columns = self.tile_counts(num_replicas, grid)
            groups = rows * columns
        elif self.kind == "replicas":
            groups = self._divide(num_replicas, "replicas")
        elif self.kind == "examples":
            groups = self._divide(num_examples, "examples of the batch")
        else:
            groups = num_replicas if self.kind == "local" else 1

        # Groups and replicas must nest: statistics are reduced over whole replicas or within one.
        if max(groups, num_replicas) % min(groups, num_replicas):
            self._refuse(
                f"{groups} groups do not line up with {num_replicas} replicas: choose groups of "
                "whole replicas, or groups that divide one replica's examples"
            )
        if num_examples % groups:
            self._refuse(
                f"{groups} groups do not divide the {num_examples} examples of the batch: choose "
                "another batch or group size"
            )
        if self.kind == "tiles" and num_examples % num_replicas:
            self._refuse(
                f"{num_replicas} replicas do not divide the {num_examples} examples of the batch: "
                f"choose a batch that is a multiple of {num_replicas}"
            )
        return groups

    def tile_counts(self, num_replicas: int, grid: tuple[int, int] | None) -> tuple[int, int]:
        """Return the numbers of tiles along the rows and along the columns of the grid."""
        height, width = self._resolve_grid(num_replicas, grid)
        rows, columns = self.tile or (1, 1)
        if height % rows or width % columns:
            self._refuse(
                f"tiles of {rows} x {columns} do not divide a grid of {height} x {width} replicas: "
                "choose tiles whose sides divide the grid's"
            )
        return height // rows, width // columns

    def view(self, here: Replicas, num_examples: int, folded: int = 1) -> View:
        """Return the split of the local batch axis into groups.

        The local batch is the one that the traced function gets: under `jit` the examples of all
        replicas; under `pmap`, or if a device runs its replicas in turn, those of one replica. A
        group that spans mapped replicas covers the whole local batch.

        Args:
          here: The replicas for which the function is traced.
          num_examples: Number of examples in the local batch.
          folded: Number of examples that share an entry of the batch axis; must divide the number
            of examples of a group on one replica.
        """
        seen = here.count if here.axis_name else 1
        groups = self.num_groups(here.count, seen * num_examples, here.grid)
        if here.simulated > 1 and (self.kind == "global" or groups < here.count):
            self._refuse(
                f"the {here.simulated} replicas of a device run one after another and share no "
                "statistics: use 'local', or 'examples:N' with a divisor of a replica's "
                f"{seen * num_examples // here.count}"
            )

        if self.kind == "tiles" and not here.axis_name:
            below, beside = self.tile_counts(here.count, here.grid)
            rows, columns = self.tile or (1, 1)
            # Axes: tiles below each other, rows in a tile, tiles beside each other, columns in a
            # tile, examples of a replica.
            return View(
                (below, rows, beside, columns, self._rows(num_examples // here.count, folded)),
                (1, 3, 4),
            )
        groups_here = max(1, groups // seen)
        return View((groups_here, self._rows(num_examples // groups_here, folded)), (1,))

    def peers(self, here: Replicas, num_examples: int) -> list[list[int]] | None:
        """Return the groups of mapped replicas that share statistics.

        The list is empty if no replica shares any; None means that all share the same.
        """
        groups = self.num_groups(here.count, here.count * num_examples, here.grid)
        if groups >= here.count:
            return []
        if groups == 1:
            return None
        if self.kind == "tiles":
            return self._tiles(here)
        size = here.count // groups
        return [list(range(start, start + size)) for start in range(0, here.count, size)]

    @property
    def text(self) -> str:
        """Form that `parse` reads."""
        if self.tile:
            grid = f"@{self.grid[0]}x{self.grid[1]}" if self.grid else ""
            return f"tiles:{self.tile[0]}x{self.tile[1]}{grid}"
        return f"{self.kind}:{self.size}" if self.size else self.kind

    def _tiles(self, here: Replicas) -> list[list[int]]:
        _, width = self._resolve_grid(here.count, here.grid)
        below, beside = self.tile_counts(here.count, here.grid)
        rows, columns = self.tile or (1, 1)
        return [
            [
                (top * rows + row) * width + left * columns + column
                for row in range(rows)
                for column in range(columns)
            ]
            for top in range(below)
            for left in range(beside)
        ]

    def _resolve_grid(self, num_replicas: int, grid: tuple[int, int] | None) -> tuple[int, int]:
        height, width = self.grid or grid or (0, 0)
        if not height:
            self._refuse(
                "the mesh has no grid of replicas: use {order}='torus' of make_mesh on TPU, or "
                f"state rows and columns, {self.text}@HxW"
            )
        if height * width != num_replicas:
            self._refuse(
                f"a grid of {height} x {width} is not {num_replicas} replicas: state the grid of "
                "this mesh"
            )
        return height, width

    def _rows(self, num_examples: int, folded: int) -> int:
        if num_examples % folded:
            self._refuse(
                f"groups of {num_examples} examples do not hold {folded} folded into one: use a "
                "fold that divides them"
            )
        return num_examples // folded

    def _divide(self, total: int, what: str) -> int:
        if total % self.size:
            self._refuse(
                f"groups of {self.size} do not divide the {total} {what}: choose a group size that "
                "does"
            )
        return total // self.size

    def _refuse(self, reason: str) -> NoReturn:
        raise UserError("stats_scope", self.text, reason, code="mismatch", also={"order": "order"})
