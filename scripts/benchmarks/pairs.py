"""Time two functions in turn, so that a drift of the machine's speed affects both alike."""

import statistics
import time
from collections.abc import Callable


def in_turn(
    ours: Callable[[], None], peer: Callable[[], None], rounds: int, discard: int = 1
) -> tuple[float, float, float]:
    """Time both functions in each round, the first of them alternating.

    Args:
      ours: The function to judge.
      peer: The function to compare it with.
      rounds: Number of rounds that count.
      discard: Number of rounds before them that do not count.

    Returns:
      (median seconds of ours, median seconds of the peer, median over rounds of peer / ours);
      a ratio above 1 means that ours is faster.
    """
    times = []
    for number in range(rounds + discard):
        pair = (ours, peer) if number % 2 else (peer, ours)
        seconds = [_seconds(fn) for fn in pair]
        times.append(tuple(seconds) if number % 2 else tuple(reversed(seconds)))
    times = times[discard:]
    mine, theirs = zip(*times, strict=True)
    return (
        statistics.median(mine),
        statistics.median(theirs),
        statistics.median(b / a for a, b in times),
    )


def _seconds(fn: Callable[[], None]) -> float:
    begin = time.perf_counter()
    fn()
    return time.perf_counter() - begin


def row(
    name: str,
    unit: str,
    ours: float | None,
    peer: float | None,
    peer_name: str | None,
    ratio: float | None,
    aim: tuple[str, str, float] | None,
) -> dict:
    """Return one row of a benchmark's table.

    Args:
      name: What is measured.
      unit: Unit of both figures.
      ours: Figure of lbopt.
      peer: Figure of the peer; None without one.
      peer_name: What the peer is.
      ratio: Ratio of the two figures.
      aim: What is wanted, as ("ratio", ">=", 0.97) or ("lbopt", "<=", 20.0); None for nothing.
    """
    met = None
    if aim is not None:
        of, sign, value = aim
        figure = {"lbopt": ours, "ratio": ratio}[of]
        met = bool(figure >= value if sign == ">=" else figure <= value)
    return {
        "name": name,
        "unit": unit,
        "ours": ours,
        "peer": peer,
        "peer_name": peer_name,
        "ratio": ratio,
        "aim": aim,
        "met": met,
    }
