"""Statistics of repeated measurements, and ratios between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: A call that takes less than so many empty kernel nodes is launch-bound: how many bytes it moves
#: hardly shows in its time.
LAUNCH_BOUND_NODES = 5.0


@dataclass(frozen=True)
class Figures:
    """What is kept of repeated measurements, in microseconds.

    Attributes
    ----------
    median, minimum, p90 : float
    """

    median: float
    minimum: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figures:
        """Summarise at least one measurement.

        Examples
        --------
        >>> Figures.of([4.0, 1.0, 2.0, 3.0])
        Figures(median=2.5, minimum=1.0, p90=3.7)
        """
        return cls(percentile(values, 50), min(values), percentile(values, 90))

    def to_dict(self) -> dict[str, float]:
        """Return the figures as plain data."""
        return {"median": self.median, "min": self.minimum, "p90": self.p90}


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, on the straight line between the two values next to it.

    Parameters
    ----------
    values : sequence of float
        At least one, in any order.
    percent : float
        0 to 100.

    Examples
    --------
    >>> percentile([10.0, 30.0], 25)
    15.0
    """
    if not values:
        raise ValueError("percentile: values must have at least one element, got none")
    if not 0 <= percent <= 100:
        raise ValueError(f"percentile: percent must be between 0 and 100, got {percent}")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def is_launch_bound(microseconds: float, empty_node: float) -> bool:
    """Return whether a time says more about launching than about moving bytes."""
    return microseconds < LAUNCH_BOUND_NODES * empty_node


def gigabytes_per_second(nbytes: int, microseconds: float) -> float:
    """Return a rate in 10^9 bytes a second.

    Examples
    --------
    >>> gigabytes_per_second(4_000_000, 1000.0)
    4.0
    """
    return nbytes / microseconds / 1e3
