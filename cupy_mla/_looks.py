"""What arrays look like (shape, strides, dtype, device), by which calls are known again.

Each sequence of array types has functions of its own, made from text as `collections.namedtuple`
makes its methods: what is asked of the arrays is written out, one after the other, which takes a
fifth less time than a loop. Arrays of CuPy and torch have looks that are cheap to read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from . import _arrays

__all__ = ["UNKNOWN", "Looks", "known", "learn"]


#: What comes of a call that is not known.
UNKNOWN: Final[Any] = object()


@dataclass(frozen=True, slots=True)
class Looks:
    """What is made for a sequence of array types.

    Attributes
    ----------
    key : callable
        Takes options and arrays; returns what such a call is known by: the options, what the
        arrays look like, and what their addresses leave of 8.
    call : callable
        Takes launches by such keys, options and arrays; calls the launch with the addresses of
        the arrays, 0 for None, and returns what it returns, or `UNKNOWN`.
    """

    key: Callable[..., tuple[Any, ...]]
    call: Callable[..., Any]


#: Each `Looks.call` by the types of the arrays.
known: dict[tuple[type, ...], Callable[..., Any]] = {}
_made: dict[tuple[type, ...], Looks] = {}

# Of the i-th array: what comes first and finds its address p{i}, and what gives its looks.
_WORDS = {
    "torch": (
        "p{i} = a{i}.data_ptr()",
        "a{i}.shape, a{i}.stride(), a{i}.dtype, a{i}.get_device()",
    ),
    "cupy": (
        "d{i} = a{i}.data; p{i} = d{i}.ptr",
        "a{i}.shape, a{i}.strides, a{i}.dtype, d{i}.device_id",
    ),
    "none": ("p{i} = 0", "None"),
}

_TEXT = """
def key(options, {arrays}):
    {addresses}
    return options, {looks}, {offsets}

def call(launches, options, {arrays}):
    {addresses}
    try:
        launch = launches.get((options, {looks}, {offsets}))
    except TypeError:  # an option that cannot be hashed
        return UNKNOWN
    return UNKNOWN if launch is None else launch({pointers})
"""


def learn(arrays: Sequence[Any]) -> Looks | None:
    """Return what is made for such arrays, which `describe` has seen.

    None where one is neither CuPy's nor torch's nor None.
    """
    kinds = tuple(map(type, arrays))
    made = _made.get(kinds)
    if made is None:
        frameworks = ["none" if obj is None else _arrays.framework_of(obj) for obj in arrays]
        if None in frameworks:
            return None
        made = _made[kinds] = _make([_WORDS[str(name)] for name in frameworks])
        known[kinds] = made.call
    return made


def _make(words: Sequence[tuple[str, str]]) -> Looks:
    def listed(text: str, between: str = ", ") -> str:
        return between.join(text.format(i=i, shift=3 * i) for i in range(len(words)))

    text = _TEXT.format(
        arrays=listed("a{i}"),
        addresses="; ".join(first.format(i=i) for i, (first, _) in enumerate(words)),
        looks=", ".join(looks.format(i=i) for i, (_, looks) in enumerate(words)),
        offsets=listed("(p{i} & 7) << {shift}", " | "),
        pointers=listed("p{i}"),
    )
    names: dict[str, Any] = {"UNKNOWN": UNKNOWN}
    exec(text, names)
    return Looks(names["key"], names["call"])
